"""Lookups without a call say what a call says, cost no call, and are counted."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from kvstore_client import Client
from kvstore_client.prompt import PageHashes
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import Exhausted
from kvstore.presence import SLOTS_MIN, slot_count_of
from kvstore.spec import ChunkState, Exactness, LayerSpec, MissReason, RopeSpec, Tier
from tests.presence.looking import STEP, agreed, by_call, looking, no_calls
from tests.server.raw import Raw, eventually
from tests.specs import random_cache, small_spec, tokens_of


def test_hits_and_misses_without_a_call(client: Client) -> None:
    spec, tokens = small_spec(model_id="without"), tokens_of(5 * STEP)
    assert not client.lookup(spec, tokens)
    client.store(spec, tokens[: 3 * STEP], random_cache(spec, len(tokens[: 3 * STEP]))).wait()
    with no_calls(client):
        match = client.lookup(spec, tokens)
        assert match.prefix_token_count == 3 * STEP
        assert [chunk.state for chunk in match.chunks] == [ChunkState.HIT] * 3 + [ChunkState.MISS] * 2
        assert [chunk.tier for chunk in match.chunks] == [Tier.DRAM] * 3 + [Tier.NONE] * 2
        cold = client.lookup(spec, tokens_of(40, seed=9))
        assert [chunk.reason for chunk in cold.chunks] == [MissReason.COLD] * 3
        assert cold.chunks[-1].token_stop == 40
        assert client.fetch(spec, tokens_of(40, seed=9)).reason is MissReason.COLD
        assert client.fetch_layers(spec, tokens_of(40, seed=9)).token_count == 0
        nothing = client.lookup(spec, tokens_of(40, seed=9), hold=True)
        assert nothing.ticket is None, "nothing to hold: nothing to ask"
    assert agreed(client, spec, tokens) == match
    assert agreed(client, spec, tokens_of(40, seed=9)) == cold


def test_what_another_client_stores_is_seen_as_soon_as_it_is_stored(sidecar: Sidecar, client: Client) -> None:
    spec = small_spec(model_id="other")
    with looking(sidecar) as other:
        for seed in range(20):
            tokens = tokens_of(2 * STEP, seed=seed)
            with no_calls(client) if seed else by_call(client):
                assert not client.lookup(spec, tokens)
            other.store(spec, tokens, random_cache(spec, len(tokens))).wait()
            with no_calls(client):
                assert client.lookup(spec, tokens).prefix_token_count == 2 * STEP


def test_a_store_in_flight_is_pending(client: Client) -> None:
    spec, tokens = small_spec(model_id="flight"), tokens_of(2 * STEP)
    kv = random_cache(spec, len(tokens))
    with client.start_store(spec, tokens) as writer:
        writer.put_layer(0, kv[0])
        assert [chunk.state for chunk in agreed(client, spec, tokens).chunks] == [ChunkState.PENDING] * 2
        writer.abort()
    assert [chunk.state for chunk in agreed(client, spec, tokens).chunks] == [ChunkState.MISS] * 2


def test_ragged_tails_are_found(client: Client) -> None:
    """A partial chunk that another prompt ended with, after a chunk and after the root, without a call."""
    spec, tokens = small_spec(model_id="tails"), tokens_of(4 * STEP)
    short = tokens_of(60, seed=3)
    for part in (tokens[: 2 * STEP + 7], short[:5]):
        client.store(spec, part, random_cache(spec, len(part))).wait()
    assert agreed(client, spec, tokens).prefix_token_count == 2 * STEP + 7
    with no_calls(client):
        assert client.lookup(spec, tokens).prefix_token_count == 2 * STEP + 7
        assert client.lookup(spec, tokens[: 2 * STEP + 6]).prefix_token_count == 2 * STEP
        assert client.lookup(spec, short).prefix_token_count == 5
        assert client.lookup(spec, tokens_of(60, seed=4)).chunks[0].reason is MissReason.COLD
        assert client.peek(spec, tokens).prefix_token_count == 2 * STEP + 7
        assert client.peek(spec, short).prefix_token_count == 5
        assert client.peek(spec, short, hold=True) is None, "there is something to hold"
        assert client.peek(spec, tokens_of(60, seed=4), hold=True).prefix_token_count == 0
    presence = client.connect_now().presence
    told, presence._tail_tokens_max = presence._tail_tokens_max, 0  # an earlier release's table tells no lengths
    try:
        assert client.peek(spec, tokens) is None
        assert client.lookup(spec, tokens).prefix_token_count == 2 * STEP + 7
    finally:
        presence._tail_tokens_max = told
        assert client.lookup(spec, tokens[: 2 * STEP]).prefix_token_count == 2 * STEP
        assert client.lookup(spec, tokens[: 2 * STEP + 7]).prefix_token_count == 2 * STEP + 7
    assert agreed(client, spec, short).prefix_token_count == 5, "of the root, too"
    held = client.lookup(spec, tokens, hold=True)
    assert held.ticket is not None
    assert held.prefix_token_count == 2 * STEP + 7
    client.release_ticket(held.ticket)


def test_documents_hashes_and_exactness_are_kept_apart(client: Client) -> None:
    spec, tokens = small_spec(model_id="apart"), tokens_of(4 * STEP)
    document = tokens[STEP : 3 * STEP]
    client.store_segment(spec, document, random_cache(spec, len(document))).wait()
    with no_calls(client):
        assert not client.lookup(spec, document)
        match = client.lookup(spec, tokens, segments=[(STEP, 3 * STEP)])
    assert (match.prefix_token_count, match.segments[0].is_whole) == (0, True)
    assert agreed(client, spec, tokens, segments=[(0, STEP), (STEP, 3 * STEP)]).segments[1] == match.segments[0]
    client.store(spec, tokens, random_cache(spec, len(tokens)), exactness=Exactness.DERIVED).wait()
    assert not agreed(client, spec, tokens)
    assert agreed(client, spec, tokens, exactness=Exactness.DERIVED).prefix_token_count == 4 * STEP
    hashes = PageHashes("vllm-sha256_cbor", STEP, [os.urandom(32) for _ in range(4)], tokens=tokens)
    client.store(spec, hashes, random_cache(spec, len(tokens))).wait()
    assert agreed(client, spec, hashes).prefix_token_count == 4 * STEP


def test_opaque_values(client: Client) -> None:
    names = [f"key-{number}" for number in range(40)]
    large = np.zeros(5 << 20, np.uint8)
    client.put_bytes("presence", "large", large).wait()
    for name in names[::2]:
        client.put_bytes("presence", name, b"value").wait()
    assert client.exists("presence", [*names, "large"]) == [True, False] * 20 + [True]
    assert client.count_leading("presence", ["large", names[0], names[2], names[3], names[4]]) == 3
    with no_calls(client):
        assert client.exists("presence", names) == [True, False] * 20
        assert client.count_leading("presence", names) == 1
    with by_call(client):
        assert client.exists("presence", [*names, "large"]) == [True, False] * 20 + [True]
        assert client.count_leading("presence", ["large", names[0], names[2], names[3], names[4]]) == 3
    client.put_bytes("presence", names[0], large).wait()
    assert client.exists("presence", names[0])
    assert client.exists("presence", []) == []


def test_many_chunks_while_the_table_grows(client: Client) -> None:
    """The client notices that its table was replaced, and asks for the new one."""
    spec = small_spec(model_id="grows", chunk_tokens=1)
    first = tokens_of(40)
    client.store(spec, first, random_cache(spec, len(first))).wait()
    assert client.lookup(spec, first)
    before = client.connect_now().presence._words
    stored = [first]
    for seed in range(1, 21):  # those that are evicted meanwhile have words, too
        tokens = tokens_of(600, seed=seed)
        stored.append(tokens)
        client.store(spec, tokens, random_cache(spec, len(tokens))).wait()
        for each in (first, stored[len(stored) // 2], tokens):
            agreed(client, spec, each)
    eventually(lambda: client.lookup(spec, first) is not None and client.connect_now().presence.is_there)
    after = client.connect_now().presence._words
    assert (slot_count_of(before), slot_count_of(after) > SLOTS_MIN) == (SLOTS_MIN, True)


def test_lookups_are_counted_at_the_sidecar(own_sidecar: Sidecar) -> None:
    spec, tokens = small_spec(model_id="counted"), tokens_of(4 * STEP)
    names = ("lookup_calls", "lookup_hit_chunks", "lookup_miss_chunks", "fetch_calls", "fetch_miss_chunks")

    with Raw(own_sidecar) as raw:

        def counted() -> list[int]:
            counters = raw.stats().counters
            return [counters[name] for name in names]

        with looking(own_sidecar) as client:
            client.store(spec, tokens[: 3 * STEP], random_cache(spec, len(tokens[: 3 * STEP]))).wait()
            before = counted()
            for _ in range(5):
                client.lookup(spec, tokens)
            assert not client.fetch(spec, tokens_of(3 * STEP, seed=1)).token_count, "told without a call"
            assert client.fetch(spec, tokens).token_count == 3 * STEP
            client.release_ticket(client.lookup(spec, tokens, hold=True).ticket)
            assert client.exists("counted", ["a", "b"]) == [False, False]
        expected = [count + more for count, more in zip(before, (8, 18, 10, 2, 4), strict=True)]
        eventually(lambda: counted() == expected)


def test_evicted_chunks_and_what_the_device_has(own_sidecar: Sidecar) -> None:
    wide = (LayerSpec(kv_heads=8, k_dim=256, v_dim=256),) * 2
    spec = small_spec(model_id="device", layers=wide, rope=RopeSpec(rotary_dim=256), chunk_tokens=64)
    prompts = [tokens_of(256, seed=seed) for seed in range(12)]  # 4 MiB each
    with looking(own_sidecar) as client:
        for tokens in prompts:
            client.store(spec, tokens, random_cache(spec, len(tokens))).wait()
        tiers = {chunk.tier for tokens in prompts for chunk in agreed(client, spec, tokens).chunks}
        reasons = {chunk.reason for tokens in prompts for chunk in agreed(client, spec, tokens).chunks}
    assert Tier.DRAM in tiers
    assert tiers != {Tier.DRAM} or reasons != {MissReason.NONE}, "all of it fits: the test is too small"


def test_the_limit_on_tokens_holds(tmp_path: Any) -> None:
    environment = {**os.environ, "KVSTORE__LIMITS__TOKEN_COUNT_MAX": str(8 * STEP)}
    spec = small_spec(model_id="limit")
    with Sidecar("--capacity", "16 MiB", environment=environment) as own, looking(own) as client:
        assert not client.lookup(spec, tokens_of(8 * STEP))
        with pytest.raises(Exhausted, match=r"limits\.token_count_max"):
            client.lookup(spec, tokens_of(20 * STEP))


def test_more_keys_than_one_call_takes(client: Client) -> None:
    names = [f"key-{number}" for number in range(600)]
    for name in (*names[:3], names[599]):
        client.put_bytes("many", name, b"value").wait()
    expected = [number in (0, 1, 2, 599) for number in range(600)]
    assert client.exists("many", names) == expected
    with by_call(client):
        assert client.exists("many", names) == expected
        assert client.count_leading("many", names) == 3
