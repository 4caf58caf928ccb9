"""Lookups without a call say what a call says, cost no call, and are counted."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from kvstore_client import Client, Durability, Match, connect
from kvstore_client.prompt import PageHashes
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import Exhausted, Unavailable
from kvstore.handoff import passing
from kvstore.handoff.messages import Answer, PresenceAnswer
from kvstore.handoff.packets import decode_answer
from kvstore.keys import chain_digests, fingerprint, presence_salt
from kvstore.presence import HEADER_WORDS, PARTIAL, SLOTS_MIN, pack_news, slots_of, tag_of
from kvstore.spec import ChunkState, Encoding, Exactness, LayerSpec, MissReason, Provenance, RopeSpec, Tier
from tests.server.raw import Raw, eventually
from tests.specs import random_cache, small_spec, tokens_of

STEP = 16


@pytest.fixture
def client(sidecar: Sidecar) -> Iterator[Client]:
    with looking(sidecar) as found:
        yield found


@contextmanager
def looking(sidecar: Sidecar) -> Iterator[Client]:
    """A client that has the table: it comes a moment after the session."""
    with connect(sidecar.address) as found:
        eventually(lambda: found.connect_now().presence.is_there)
        yield found


@contextmanager
def by_call(client: Client) -> Iterator[None]:
    """As a client whose sidecar offers no table."""
    session = client.connect_now()
    kept, session.presence = session.presence, None
    try:
        yield
    finally:
        session.presence = kept


@contextmanager
def no_calls(client: Client) -> Iterator[None]:
    """A lookup that calls the sidecar fails here."""
    session = client.connect_now()
    kept = session.cache

    class Refusing:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} was called")

    session.cache = Refusing()
    try:
        yield
    finally:
        session.cache = kept


def agreed(client: Client, spec: Any, tokens: Any, **how: Any) -> Match:
    """What both ways say of a prompt."""
    seen = client.lookup(spec, tokens, **how)
    with by_call(client):
        assert client.lookup(spec, tokens, **how) == seen
    return seen


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
    assert (slots_of(before), slots_of(after) > SLOTS_MIN) == (SLOTS_MIN, True)


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


def test_a_restarted_sidecar_shows_what_its_device_has(tmp_path: Any) -> None:
    spec, tokens = small_spec(model_id="again"), tokens_of(4 * STEP + 3)
    other = small_spec(model_id="again", chunk_tokens=32)
    document = tokens[:STEP]
    with Sidecar("--capacity", "32 MiB", nvme="64 MiB") as sidecar:
        with looking(sidecar) as client:
            assert client.store(spec, tokens, random_cache(spec, len(tokens))).wait() is Durability.LOCAL
            assert client.store_segment(spec, document, random_cache(spec, len(document))).wait() is Durability.LOCAL
            client.put_bytes("again", "key", b"value").wait()
            seen = agreed(client, spec, tokens)
        for kill in (False, True):
            sidecar.stop(kill=kill)
            sidecar.start()
            with looking(sidecar) as client:
                assert not client.lookup(other, tokens), "registers another model, and only that"
                match = agreed(client, spec, tokens, segments=[(0, STEP)])
                assert match.prefix_token_count == seen.prefix_token_count == tokens.size
                assert {chunk.tier for chunk in match.chunks} == {Tier.NVME}
                assert match.segments[0].is_whole
                longer = np.concatenate([tokens, tokens_of(40, seed=5)])
                assert agreed(client, spec, longer).prefix_token_count == tokens.size, "tails, too"
                assert client.exists("again", ["key", "none"]) == [True, False]
                assert client.fetch(spec, tokens).token_count == tokens.size


def test_a_killed_sidecar_has_nothing(own_sidecar: Sidecar) -> None:
    """What the table said last is not believed any more."""
    spec, tokens = small_spec(model_id="killed"), tokens_of(2 * STEP)
    with looking(own_sidecar) as client:
        client.store(spec, tokens, random_cache(spec, len(tokens))).wait()
        assert client.lookup(spec, tokens)
        session = client.connect_now()
        os.kill(own_sidecar.pid, signal.SIGKILL)
        eventually(lambda: not session.is_usable)
        match = client.lookup(spec, tokens)
        assert (match.prefix_token_count, match.chunks[0].reason) == (0, MissReason.UNAVAILABLE)
        with pytest.raises(Unavailable):
            client.connect_now()


def test_a_killed_sidecar_has_nothing_before_anybody_noticed(own_sidecar: Sidecar) -> None:
    """The session's watcher may be slow to wake: what a dead sidecar's table says is not believed meanwhile."""
    spec, tokens = small_spec(model_id="just killed"), tokens_of(2 * STEP)
    with looking(own_sidecar) as client:
        client.store(spec, tokens, random_cache(spec, len(tokens))).wait()
        client.store_segment(spec, tokens, random_cache(spec, len(tokens))).wait()
        client.put_bytes("killed", "key", b"value").wait()
        session = client.connect_now()
        end, session.close = session.close, lambda: None
        try:
            own_sidecar.stop(kill=True)
            assert session.is_usable, "the watcher's news would make this test of nothing"
            match = client.lookup(spec, tokens, segments=[(0, STEP)])
            assert (match.prefix_token_count, match.chunks[0].reason) == (0, MissReason.UNAVAILABLE)
            assert not match.segments[0].is_whole
            assert client.peek(spec, tokens) is None
            assert client.exists("killed", "key") is False
            assert client.fetch(spec, tokens_of(STEP, seed=9)).reason is MissReason.UNAVAILABLE
        finally:
            del session.close
            end()


def test_the_limit_on_tokens_holds(tmp_path: Any) -> None:
    environment = {**os.environ, "KVSTORE__LIMITS__TOKEN_COUNT_MAX": str(8 * STEP)}
    spec = small_spec(model_id="limit")
    with Sidecar("--capacity", "16 MiB", environment=environment) as own, looking(own) as client:
        assert not client.lookup(spec, tokens_of(8 * STEP))
        with pytest.raises(Exhausted, match=r"limits\.token_count_max"):
            client.lookup(spec, tokens_of(20 * STEP))


def test_an_earlier_sidecar_is_called(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that offers no table is not asked for it."""
    spec, tokens = small_spec(model_id="earlier"), tokens_of(2 * STEP)

    def earlier(packet: bytes) -> Answer:
        said = json.loads(packet)
        assert said.pop("offers") == ["presence", "uses"]
        return decode_answer(json.dumps(said).encode())

    monkeypatch.setattr(passing, "decode_answer", earlier)
    with connect(sidecar.address) as client:
        monkeypatch.undo()
        client.store(spec, tokens, random_cache(spec, len(tokens))).wait()
        assert client.connect_now().presence is None
        assert client.lookup(spec, tokens).prefix_token_count == 2 * STEP


def test_a_table_that_cannot_be_had_leaves_calls(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, tokens = small_spec(model_id="unmapped"), tokens_of(2 * STEP)

    def refuse(*args: Any, **how: Any) -> Any:
        raise Unavailable("cannot map: ulimit -v")

    with connect(sidecar.address) as client:
        session = client.connect_now()
        eventually(lambda: session.presence.is_there)
        monkeypatch.setattr("kvstore_client.lookup.presence.SharedMap", refuse)
        session.presence._words = None
        client.store(spec, tokens, random_cache(spec, len(tokens))).wait()
        assert client.lookup(spec, tokens).prefix_token_count == 2 * STEP
        session.presence.take(PresenceAnswer(4096, 1, 0), [])
        assert client.fetch(spec, tokens).token_count == 2 * STEP
        monkeypatch.undo()
        session.presence._asked_s = 0.0
        client.lookup(spec, tokens)
        eventually(lambda: session.presence.is_there)


def test_a_sidecar_that_stands_still_is_not_waited_for(own_sidecar: Sidecar) -> None:
    """What its table says stands; and without the table a lookup ends with its time."""
    spec, tokens = small_spec(model_id="still"), tokens_of(2 * STEP)
    with connect(own_sidecar.address, timeout_s=1.0) as client:
        client.store(spec, tokens, random_cache(spec, len(tokens))).wait()
        session = client.connect_now()
        eventually(lambda: session.presence.is_there)
        os.kill(own_sidecar.pid, signal.SIGSTOP)
        try:
            assert client.lookup(spec, tokens).prefix_token_count == 2 * STEP
            session.presence._words = None
            assert client.lookup(spec, tokens).chunks[0].reason is MissReason.UNAVAILABLE
            assert session.is_usable, "the session goes on when the sidecar does"
        finally:
            os.kill(own_sidecar.pid, signal.SIGCONT)
        assert client.lookup(spec, tokens).prefix_token_count == 2 * STEP
        eventually(lambda: session.presence.is_there)


def test_a_sidecar_that_looks_up_one_chain_at_a_time(client: Client) -> None:
    """As the first ones of this contract did: of keys in one call it says the first's."""
    for name in "ac":
        client.put_bytes("one-by-one", name, b"value").wait()
    session = client.connect_now()
    real = session.cache.Lookup

    def first_alone(request: Any, **how: Any) -> Any:
        reply = real(request, **how)
        del reply.segments[:]
        return reply

    with by_call(client), pytest.MonkeyPatch.context() as patch:
        patch.setattr(session.cache, "Lookup", first_alone)
        assert client.exists("one-by-one", ["a", "b", "c"]) == [True, False, True]
        assert client.count_leading("one-by-one", ["a", "c", "b"]) == 2


def test_more_keys_than_one_call_takes(client: Client) -> None:
    names = [f"key-{number}" for number in range(600)]
    for name in (*names[:3], names[599]):
        client.put_bytes("many", name, b"value").wait()
    expected = [number in (0, 1, 2, 599) for number in range(600)]
    assert client.exists("many", names) == expected
    with by_call(client):
        assert client.exists("many", names) == expected
        assert client.count_leading("many", names) == 3


def test_a_table_that_does_not_hold_all_still_says_what_is_there(client: Client) -> None:
    spec, tokens = small_spec(model_id="partial"), tokens_of(3 * STEP)
    client.store(spec, tokens, random_cache(spec, len(tokens))).wait()
    client.put_bytes("partial", "key", b"value").wait()
    presence = client.connect_now().presence
    words = presence._words.copy()
    words[0] = PARTIAL
    presence._words = words
    with no_calls(client):
        assert client.lookup(spec, tokens).prefix_token_count == 3 * STEP
        assert client.exists("partial", "key")
    longer = np.concatenate([tokens, tokens_of(STEP, seed=2)])
    for asked in (longer, tokens_of(STEP, seed=2)):
        assert client.peek(spec, asked) is None
        assert agreed(client, spec, asked).prefix_token_count == (3 * STEP if asked is longer else 0)
    assert client.exists("partial", ["key", "none"]) == [True, False]


def test_a_peek_waits_for_nobody(sidecar: Sidecar, client: Client) -> None:
    """Where a lookup would connect, name the model, or hold, it says that it cannot tell."""
    spec, tokens = small_spec(model_id="peek"), tokens_of(3 * STEP)
    assert client.peek(spec, tokens) is None, "the sidecar does not know the model yet"
    client.store(spec, tokens[: 2 * STEP], random_cache(spec, 2 * STEP)).wait()
    with no_calls(client):
        assert client.peek(spec, tokens) == client.lookup(spec, tokens)
        assert client.peek(spec, tokens, hold=True) is None
        assert client.peek(spec, tokens_of(STEP, seed=4), hold=True) == client.lookup(spec, tokens_of(STEP, seed=4))
        assert client.peek(spec, []) == client.lookup(spec, [])
    with connect(sidecar.address) as other:
        other.connect_now().close()
        assert other.peek(spec, tokens) is None, "it is not connected"


def test_a_chunk_the_table_has_and_the_catalog_has_not_is_a_miss(client: Client) -> None:
    """A tag is not a name: the fetch that follows brings less, and nothing wrong."""
    spec, tokens = small_spec(model_id="false"), tokens_of(2 * STEP)
    client.store(spec, tokens[:STEP], random_cache(spec, len(tokens[:STEP]))).wait()
    assert client.lookup(spec, tokens).prefix_token_count == STEP
    presence = client.connect_now().presence
    words = presence._words.copy()
    salt = presence_salt(fingerprint(spec, spec.kind), Provenance.IN_CONTEXT, Exactness.EXACT)
    tag = tag_of(salt, chain_digests(tokens, STEP)[1])
    place = HEADER_WORDS + (tag >> 12 & slots_of(words) - 1)
    words[place] = tag | pack_news(ChunkState.HIT, Tier.DRAM, Encoding.RAW)
    presence._words = words
    assert client.lookup(spec, tokens).prefix_token_count == 2 * STEP
    assert client.fetch(spec, tokens).token_count == STEP
    held = client.lookup(spec, tokens, hold=True)
    assert held.prefix_token_count == STEP, "what is held was asked for"
    client.release_ticket(held.ticket)
