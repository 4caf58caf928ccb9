"""Partial chunks of a real sidecar: any number beside each other, found by the longest, first to go once superseded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kvstore_client import Client, connect
from kvstore_client.prompt import PageHashes
from kvstore_ops.sidecar import Sidecar

from kvstore.catalog.tails import NAMED_MAX
from kvstore.spec import Durability, MissReason
from kvstore.v1 import cache_pb2 as pb
from tests.server.raw import eventually
from tests.specs import bits, random_cache, small_spec, tokens_of

STEP = 16


def joined(*parts: Any) -> Any:
    return np.concatenate([np.asarray(part, np.uint32) for part in parts])


def assert_same(fetched: Any, kv: Any, count: int) -> None:
    assert fetched.token_count == count
    for (k, v), (kept_k, kept_v) in zip(fetched, kv, strict=True):
        assert np.array_equal(bits(k), kept_k[:, :count])
        assert np.array_equal(bits(v), kept_v[:, :count])


def store(client: Client, spec: Any, tokens: Any, seed: int) -> Any:
    kv = random_cache(spec, len(tokens), seed)
    assert client.store(spec, tokens, kv).wait(20) is not Durability.NONE
    return kv


def test_short_prompts_stay_beside_each_other_and_beside_a_long_one() -> None:
    """They all hang on the root. What was acknowledged as LOCAL is found, also after a restart."""
    spec = small_spec(chunk_tokens=256)
    short = [tokens_of(200, seed) for seed in range(8)]
    with Sidecar("--capacity", "64 MiB", nvme="64 MiB") as sidecar:
        with connect(sidecar.address) as client:
            caches = []
            for seed, tokens in enumerate(short):
                caches.append(random_cache(spec, 200, seed))
                assert client.store(spec, tokens, caches[-1]).wait(20) is Durability.LOCAL
            store(client, spec, tokens_of(300, 99), 99)
            store(client, spec, joined(short[3], tokens_of(100, 100)), 100)
            for tokens in short:
                assert client.lookup(spec, tokens).prefix_token_count == 200
            assert client.stats().counters["superseded_chunks"] == 1
        sidecar.stop(kill=True)
        sidecar.start()
        with connect(sidecar.address) as client:
            for tokens, kv in zip(short, caches, strict=True):
                assert client.lookup(spec, joined(tokens, [1, 2, 3])).prefix_token_count == 200
                assert_same(client.fetch(spec, joined(tokens, [1, 2, 3])), kv, 200)
            assert client.stats().counters["evicted_chunks"] == 0


def test_the_longest_of_many_is_found(client: Client) -> None:
    """Of one text and of others, after the root and after a chunk; for who holds it, too."""
    spec, text = small_spec(model_id="longest"), tokens_of(2 * STEP, 1)
    for start in (0, STEP):
        kv = random_cache(spec, len(text), 1)
        for count in range(2, STEP, 3):
            part = text[: start + count]
            client.store(spec, part, [(k[:, : len(part)], v[:, : len(part)]) for k, v in kv]).wait(20)
            store(client, spec, joined(text[:start], tokens_of(count, 100 + count)), count)
        for count in range(1, STEP):
            found = start + (count + 1) // 3 * 3 - 1 if count > 1 else start
            asked = joined(text[: start + count], [1, 2, 3])
            assert client.lookup(spec, asked).prefix_token_count == found
            assert_same(client.fetch(spec, asked), kv, found)
            held = client.lookup(spec, asked, hold=True)
            assert held.prefix_token_count == found
            assert (held.ticket is None) == (found == 0)
            client.release_ticket(held.ticket)
        client.store(spec, text[: start + STEP], [(k[:, : start + STEP], v[:, : start + STEP]) for k, v in kv]).wait(20)


def test_with_hidden_states_the_longest_that_has_them_is_found(client: Client) -> None:
    spec = small_spec(model_id="hidden tails")
    text = tokens_of(STEP, 2)
    for count in range(2, STEP, 2):
        hidden = {1: random_hidden(spec, count)} if count % 4 == 0 else None
        client.store(spec, text[:count], random_cache(spec, count, count), hidden=hidden).wait(20)
    for count in range(2, STEP):
        asked = joined(text[:count], [1])
        assert client.lookup(spec, asked).prefix_token_count == count // 2 * 2
        fetched = client.fetch(spec, asked, hidden_layers=[1])
        assert fetched.token_count == count // 4 * 4
        if fetched.token_count:
            assert np.array_equal(bits(fetched.hidden[1]), random_hidden(spec, fetched.token_count))


def random_hidden(spec: Any, count: int) -> Any:
    return np.random.default_rng(count).integers(0, 1 << 16, (count, spec.hidden_size), dtype=np.uint16)


def test_pages_named_by_their_engine_are_found(client: Client) -> None:
    spec, pages = small_spec(model_id="pages"), STEP // 2
    hashes = [bytes([number + 1]) * 32 for number in range(pages)]
    tokens = tokens_of(STEP, 3)
    for count in range(1, pages):
        for other in (0, 1):
            named = [*hashes[: count - 1], hashes[count - 1] if not other else bytes([count, 9]) * 16]
            prompt = PageHashes("test", 2, named, tokens[: 2 * count])
            client.store(spec, prompt, random_cache(spec, 2 * count, count)).wait(20)
    for count in range(1, pages):
        asked = PageHashes("test", 2, [*hashes[:count], bytes([99]) * 32])
        assert client.lookup(spec, asked).prefix_token_count == 2 * count
        assert_same(client.fetch(spec, asked), random_cache(spec, 2 * count, count), 2 * count)


def test_a_store_written_layer_by_layer_supersedes_what_it_begins_with(client: Client) -> None:
    spec, text = small_spec(model_id="written"), tokens_of(STEP, 4)
    before = client.stats().counters["superseded_chunks"]
    kv = random_cache(spec, STEP, 4)
    for count in (5, 9):
        client.store(spec, text[:count], [(k[:, :count], v[:, :count]) for k, v in kv]).wait(20)
    store(client, spec, tokens_of(7, 5), 5)
    assert client.stats().counters["superseded_chunks"] - before == 1, "the longer of two partial chunks"
    with client.start_store(spec, text) as writer:
        for layer, planes in enumerate(kv):
            writer.put_layer(layer, planes)
        assert writer.commit().wait(20) is not Durability.NONE
    assert client.stats().counters["superseded_chunks"] - before == 3
    assert [client.lookup(spec, text[:count]).prefix_token_count for count in (5, 9, 16)] == [5, 9, 16]
    assert client.lookup(spec, tokens_of(7, 5)).prefix_token_count == 7


class Stripped:
    """A sidecar's stub, or one of its calls, of which a side is of an older release: what that release does not know
    is lost on the way, as it is for a parser that has no such fields."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub

    def __getattr__(self, name: str) -> Any:
        if name == "future":
            return lambda request, **how: self._stub.future(asked(request), **how)
        return Stripped(getattr(self._stub, name))

    def __call__(self, request: Any, **how: Any) -> Any:
        return answered(self._stub(asked(request), **how))


def asked(request: Any) -> Any:
    kept = type(request)()
    kept.CopyFrom(request)
    if isinstance(kept, pb.LookupRequest):
        kept.ClearField("tail_digests")
    if isinstance(kept, pb.StoreRequest) and kept.WhichOneof("step") == "commit":
        kept.commit.ClearField("supersedes")
    return kept


def answered(reply: Any) -> Any:
    if isinstance(reply, pb.LookupResponse):
        reply.ClearField("tail_lengths")
        reply.ClearField("tail_found")
    elif isinstance(reply, pb.StoreResponse):
        reply.ClearField("tails")
    return reply


@pytest.mark.parametrize("count", [NAMED_MAX, 3 * NAMED_MAX])
def test_sides_of_two_releases_find_what_is_named(sidecar: Sidecar, count: int) -> None:
    """Of an older sidecar, or by an older client, the newest few are found, and nothing fails."""
    spec = small_spec(model_id=f"older {count}")
    with connect(sidecar.address) as client:
        session = client.connect_now()
        eventually(lambda: session.presence is None or session.presence.is_there)
        session.presence = None
        session.cache = Stripped(session.cache)
        prompts = [tokens_of(3 + number, 50 + number) for number in range(count)]
        for number, tokens in enumerate(prompts):
            store(client, spec, tokens, number)
        for tokens in prompts[-NAMED_MAX:]:
            assert client.lookup(spec, joined(tokens, [1, 2])).prefix_token_count == len(tokens)
        for tokens in prompts:
            assert client.lookup(spec, tokens).prefix_token_count == len(tokens)
            assert client.fetch(spec, tokens).token_count == len(tokens)
        store(client, spec, joined(prompts[0], tokens_of(STEP, 9)), 9)
        assert client.lookup(spec, prompts[0]).prefix_token_count == len(prompts[0])
        assert client.lookup(spec, tokens_of(9, 1234)).chunks[0].reason is MissReason.COLD


@pytest.mark.parametrize("hidden_layers", [(), (1,)], ids=["kv", "and hidden states"])
@pytest.mark.parametrize("start", [0, STEP])
def test_a_prefix_that_ends_with_a_partial_chunk_says_why_the_rest_is_missing(
    client: Client, start: int, hidden_layers: tuple[int, ...]
) -> None:
    """All that was asked for in the end is there; the prompt is not. NONE would say that it is."""
    spec, count = small_spec(model_id=f"ends {start} {hidden_layers}"), start + 5
    hidden = {layer: random_hidden(spec, count) for layer in hidden_layers}
    tokens = tokens_of(count, 40)
    client.store(spec, tokens, random_cache(spec, count, 40), hidden=hidden or None).wait(20)
    for asked in (joined(tokens, [1, 2]), joined(tokens, tokens_of(2 * STEP, 41))):
        for _ in range(2):  # the second time without a call
            fetched = client.fetch(spec, asked, hidden_layers=hidden_layers)
            assert (fetched.token_count, fetched.reason) == (count, MissReason.COLD)
        layers = client.fetch_layers(spec, asked)
        assert len(list(layers)) == spec.layer_count
        assert (layers.token_count, layers.reason) == (count, MissReason.COLD)
    whole = client.fetch(spec, tokens, hidden_layers=hidden_layers)
    assert (whole.token_count, whole.reason) == (count, MissReason.NONE)
