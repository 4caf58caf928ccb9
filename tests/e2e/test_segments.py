"""Documents whose caches were computed alone: stored, looked up and fetched at any place, through a real server."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from kvstore_client import Client, Extra, PageHashes, connect, connect_async
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import Exhausted, InvalidRequest
from kvstore.spec import ChunkState, Durability, Exactness, MissReason, Tier
from tests.specs import bits, odd_spec, random_cache, small_spec, tokens_of

SPEC = small_spec()  # chunks of 16 tokens


def joined(*parts: Any) -> Any:
    return np.concatenate([np.asarray(part, np.uint32) for part in parts])


def assert_same(fetched: Any, kv: list[Any], count: int) -> None:
    assert fetched.token_count == count
    for (k, v), (k_kept, v_kept) in zip(fetched, kv, strict=True):
        assert (bits(k) == k_kept[:, :count]).all()
        assert (bits(v) == v_kept[:, :count]).all()


def store(client: Client, count: int, seed: int, **options: Any) -> tuple[Any, list[Any]]:
    tokens, kv = tokens_of(count, seed), random_cache(SPEC, count, seed)
    receipt = client.store_segment(SPEC, tokens, kv, **options)
    assert receipt.wait(10.0) is Durability.MEMORY
    assert receipt.stored_token_count == count
    return tokens, kv


@pytest.mark.parametrize("count", [1, 15, 16, 17, 50])
def test_stored_is_fetched_to_the_bit_with_its_ragged_tail(client: Client, count: int) -> None:
    hidden = {1: np.random.default_rng(count).integers(0, 65535, (count, SPEC.hidden_size), dtype=np.uint16)}
    tokens, kv = store(client, count, 1000 + count, hidden=hidden)
    found = client.fetch_segment(SPEC, tokens, hidden_layers=(1,), verify=True)
    assert_same(found, kv, count)
    assert found.reason is MissReason.NONE
    assert (bits(found.hidden[1]) == hidden[1]).all()
    into = [(np.zeros_like(k), np.zeros_like(v)) for k, v in kv]
    assert_same(client.fetch_segment(SPEC, tokens, into=into), kv, count)
    only_e = client.fetch_segment(SPEC, tokens, layers=(), hidden_layers=(1,))
    assert (list(only_e), only_e.token_count) == ([], count)
    assert (bits(only_e.hidden[1]) == hidden[1]).all()
    stream = client.fetch_segment_layers(SPEC, tokens, layers=(1, 0))
    assert stream.token_count == count
    for (layer, (k, v)), expected in zip(stream, (1, 0), strict=True):
        assert layer == expected
        assert (bits(k) == kv[layer][0]).all()
        assert (bits(v) == kv[layer][1]).all()


def test_every_kind_of_layer(client: Client) -> None:
    for mla in (False, True):
        spec = odd_spec("float16", 2, 8, 24, 16, mla=mla)
        tokens, kv = tokens_of(40, 3), random_cache(spec, 40, 3)
        client.store_segment(spec, tokens, kv).wait(10.0)
        assert_same(client.fetch_segment(spec, tokens), [kv[layer] for layer in spec.slab_layers], 40)


def test_a_prompt_of_documents_in_another_order(client: Client) -> None:
    one, one_kv = store(client, 20, 1)
    two, two_kv = store(client, 33, 2)
    unknown = tokens_of(18, 3)
    prompt = joined(tokens_of(5, 4), two, unknown, one, tokens_of(7, 5))
    runs = [(5, 38), (38, 56), range(56, 76)]
    match = client.lookup(SPEC, prompt, segments=runs)
    assert match.prefix_token_count == 0
    assert [(each.token_start, each.token_stop) for each in match.segments] == [(5, 38), (38, 56), (56, 76)]
    assert [each.standalone_token_count for each in match.segments] == [33, 0, 20]
    assert [each.in_context_token_count for each in match.segments] == [0, 0, 0]
    assert [each.is_whole for each in match.segments] == [True, False, True]
    assert [(each.token_start, each.token_stop, each.state) for each in match.segments[0].chunks] == [
        (5, 21, ChunkState.HIT), (21, 37, ChunkState.HIT), (37, 38, ChunkState.HIT),
    ]  # fmt: skip
    assert {each.reason for each in match.segments[1].chunks} == {MissReason.COLD}
    assert_same(client.fetch_segment(SPEC, prompt[5:38]), two_kv, 33)
    assert_same(client.fetch_segment(SPEC, prompt[56:76]), one_kv, 20)


def test_standalone_and_in_context_are_kept_apart(client: Client) -> None:
    """The same tokens from position 0 on: neither serves the other's calls."""
    alone, _ = store(client, 32, 11)
    assert client.lookup(SPEC, alone).prefix_token_count == 0
    assert client.fetch(SPEC, alone).token_count == 0
    tokens, kv = tokens_of(48, 12), random_cache(SPEC, 48, 12)
    client.store(SPEC, tokens, kv).wait(10.0)
    assert client.fetch_segment(SPEC, tokens).token_count == 0
    match = client.lookup(SPEC, joined(tokens, [1, 2]), segments=[(0, 32), (40, 50)])
    assert match.prefix_token_count == 48
    assert [(each.standalone_token_count, each.in_context_token_count) for each in match.segments] == [(0, 32), (0, 8)]


def test_many_short_documents_stay(client: Client) -> None:
    """A document is as long as it is, and in nobody's way."""
    documents = [store(client, 3 + seed % 13, 100 + seed) for seed in range(30)]
    store(client, 16, 99)
    for tokens, kv in documents:
        assert_same(client.fetch_segment(SPEC, tokens), kv, len(tokens))


def test_a_document_goes_on_where_another_ends(client: Client) -> None:
    """Chunks that two documents share are stored once; what differs is told apart from there on."""
    long, kv = store(client, 48, 21)
    found = client.fetch_segment(SPEC, joined(long[:40], [5, 5, 5]))
    assert_same(found, kv, 32)
    assert found.reason is MissReason.COLD
    assert client.fetch_segment(SPEC, long[:10]).token_count == 0, "a chunk that was cut elsewhere"
    assert client.fetch_segment(SPEC, long[16:]).token_count == 0, "the same text after other text"


def test_derived_segments_never_come_as_exact(client: Client) -> None:
    tokens, _ = store(client, 20, 31, exactness=Exactness.DERIVED)
    assert client.fetch_segment(SPEC, tokens).token_count == 0
    assert client.fetch_segment(SPEC, tokens, exactness=Exactness.DERIVED).token_count == 20
    assert not client.lookup(SPEC, tokens, segments=[(0, 20)]).segments[0].is_whole


def test_extras_and_salts(client: Client) -> None:
    image, salt = Extra(4, b"image"), Extra(0, b"salt")
    tokens, _ = store(client, 20, 41, extras=[image])
    prompt = joined([9, 9], tokens)
    assert not client.lookup(SPEC, prompt, segments=[(2, 22)]).segments[0].is_whole
    assert client.lookup(SPEC, prompt, segments=[(2, 22)], extras=[Extra(6, b"image")]).segments[0].is_whole
    assert not client.lookup(SPEC, prompt, segments=[(2, 22)], extras=[Extra(5, b"image")]).segments[0].is_whole
    salted, _ = store(client, 20, 42, extras=[salt])
    prompt = joined([9, 9], salted)
    assert not client.lookup(SPEC, prompt, segments=[(2, 22)]).segments[0].is_whole
    assert client.lookup(SPEC, prompt, segments=[(2, 22)], extras=[salt]).segments[0].is_whole
    assert client.find_segments(SPEC, prompt) == []


def test_documents_are_found_in_text_that_nobody_cut(sidecar: Sidecar, client: Client) -> None:
    one, _ = store(client, 40, 51)
    two, _ = store(client, 100, 52)
    prompt = joined(tokens_of(3, 53), two, tokens_of(6, 54), one)
    assert client.find_segments(SPEC, prompt) == [range(3, 103), range(109, 149)]
    match = client.lookup(SPEC, prompt, segments=client.find_segments(SPEC, prompt))
    assert all(each.is_whole for each in match.segments)
    with connect(sidecar.address) as other:  # which learns what it looked up, or fetched, and found
        assert other.find_segments(SPEC, prompt) == []
        other.lookup(SPEC, prompt, segments=[(3, 103), (103, 149)])
        assert other.find_segments(SPEC, prompt) == [range(3, 103)]
        other.fetch_segment(SPEC, one)
        assert other.find_segments(SPEC, prompt) == [range(3, 103), range(109, 149)]


@pytest.mark.parametrize("way", ["fetch_segment", "fetch_segment_layers", "start_fetch_segment"])
def test_a_client_learns_a_document_whichever_way_it_fetches_it(sidecar: Sidecar, client: Client, way: str) -> None:
    whole, _ = store(client, 40, 61)
    longer = joined(whole, tokens_of(60, 62))
    with connect(sidecar.address) as other:
        getattr(other, way)(SPEC, longer)  # of which only the beginning is stored
        assert other.find_segments(SPEC, joined([1], longer)) == []
        found = getattr(other, way)(SPEC, whole)
        assert found.token_count == len(whole)
        assert other.find_segments(SPEC, joined([1], longer)) == [range(1, 41)]


@pytest.mark.parametrize(
    ("segments", "named"),
    [
        ([(0, 5), (4, 8)], r"segments\[1\]"),
        ([(0, 5), (10, 10)], r"segments\[1\]"),
        ([(5, 3)], r"segments\[0\]"),
        ([(0, 21)], r"segments\[0\] \(0, 21\) must be a run of the prompt's 20 tokens"),
        ([(-3, 4)], r"segments\[0\]"),
        ([(0, 5), (8, 10), (6, 7)], r"segments\[2\]"),
        ([(0, 1.5)], r"segments\[0\]"),
        ([(0, 1, 2)], r"segments\[0\]"),
        ([range(0, 4, 2)], r"segments\[0\]"),
        ([3], r"segments\[0\]"),
        ("all", "segments must be a list"),
    ],
)
def test_segments_that_do_not_add_up_are_refused_by_name(client: Client, segments: Any, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        client.lookup(SPEC, tokens_of(20), segments=segments)


def test_what_else_is_refused(client: Client) -> None:
    hashes = PageHashes("test", 16, [b"h" * 32])
    for call in (
        lambda: client.lookup(SPEC, hashes, segments=[(0, 16)]),
        lambda: client.fetch_segment(SPEC, hashes),
        lambda: client.find_segments(SPEC, hashes),
        lambda: client.store_segment(SPEC, hashes, random_cache(SPEC, 16)),
        lambda: client.store_segment(SPEC, [], []),
    ):
        with pytest.raises(InvalidRequest):
            call()
    assert client.fetch_segment(SPEC, []).token_count == 0
    assert client.lookup(SPEC, tokens_of(5), segments=[]).segments == ()


async def test_asyncio(sidecar: Sidecar) -> None:
    tokens, kv = tokens_of(40, 61), random_cache(SPEC, 40, 61)
    async with await connect_async(sidecar.address) as client:
        assert await client.wait(await client.store_segment(SPEC, tokens, kv), 10.0) is Durability.MEMORY
        assert_same(await client.fetch_segment(SPEC, tokens), kv, 40)
        assert await client.find_segments(SPEC, joined([1], tokens)) == [range(1, 41)]


def test_without_the_sidecar_segments_miss(own_sidecar: Sidecar) -> None:
    with connect(own_sidecar.address) as client:
        tokens, kv = store(client, 40, 71)
        own_sidecar.stop(kill=True)
        match = client.lookup(SPEC, tokens, segments=[(0, 40)])
        assert match.segments[0].standalone_token_count == 0
        assert {each.reason for each in match.segments[0].chunks} == {MissReason.UNAVAILABLE}
        assert client.fetch_segment(SPEC, tokens).reason is MissReason.UNAVAILABLE
        stream = client.fetch_segment_layers(SPEC, tokens)
        assert (stream.token_count, stream.reason, list(stream)) == (0, MissReason.UNAVAILABLE, [])
        assert client.store_segment(SPEC, tokens, kv).wait(1.0) is Durability.NONE


def test_documents_survive_on_the_device() -> None:
    documents = [(tokens_of(count, 80 + count), random_cache(SPEC, count, 80 + count)) for count in (3, 5, 9, 16, 20)]
    with Sidecar("--capacity", "32 MiB", nvme="64 MiB") as sidecar:
        with connect(sidecar.address) as client:
            for tokens, kv in documents:
                assert client.store_segment(SPEC, tokens, kv).wait(10.0) is Durability.LOCAL
        sidecar.stop(kill=True)
        sidecar.start()
        with connect(sidecar.address) as client:
            prompt = joined(*(tokens for tokens, _ in documents))
            stops = np.cumsum([len(tokens) for tokens, _ in documents]).tolist()
            match = client.lookup(SPEC, prompt, segments=list(zip([0, *stops[:-1]], stops, strict=True)))
            assert all(each.is_whole for each in match.segments)
            assert {chunk.tier for each in match.segments for chunk in each.chunks} == {Tier.NVME}
            for tokens, kv in documents:
                assert_same(client.fetch_segment(SPEC, tokens, verify=True), kv, len(tokens))


def test_segments_count_against_the_limit_of_a_request() -> None:
    environment = {**os.environ, "KVSTORE__LIMITS__TOKEN_COUNT_MAX": "64"}
    with Sidecar("--capacity", "32 MiB", environment=environment) as sidecar, connect(sidecar.address) as client:
        tokens = tokens_of(140)
        with pytest.raises(Exhausted, match="token_count_max"):
            client.lookup(SPEC, tokens[:70], segments=[(0, 70)])
            client.lookup(SPEC, tokens[:100], segments=[(0, 50), (50, 100)])


PREAMBLE = tokens_of(9, 7000)


def test_what_was_computed_behind_a_preamble_is_found_behind_it_alone(client: Client) -> None:
    tokens, kv = store(client, 50, 7001, preamble=PREAMBLE)
    assert_same(client.fetch_segment(SPEC, tokens, preamble=PREAMBLE, verify=True), kv, 50)
    assert [layer for layer, _ in client.fetch_segment_layers(SPEC, tokens, preamble=PREAMBLE)] == [0, 1]
    prompt, runs = joined(PREAMBLE, tokens_of(3, 7002), tokens), [(12, 62)]
    assert client.lookup(SPEC, prompt, segments=runs, preamble=PREAMBLE).segments[0].is_whole
    for other in ((), PREAMBLE[:8]):
        assert client.lookup(SPEC, prompt, segments=runs, preamble=other).segments[0].standalone_token_count == 0
        assert client.fetch_segment(SPEC, tokens, preamble=other).token_count == 0
        assert client.find_segments(SPEC, prompt, preamble=other) == []
    assert client.find_segments(SPEC, prompt, preamble=PREAMBLE) == [range(12, 62)]
    again, other_kv = store(client, 50, 7001)  # the same text alone, beside it
    assert_same(client.fetch_segment(SPEC, again), other_kv, 50)
    assert client.find_segments(SPEC, prompt) == [range(12, 62)]


def test_another_client_learns_documents_behind_a_preamble_by_looking_them_up(sidecar: Sidecar, client: Client) -> None:
    tokens, _ = store(client, 40, 7003, preamble=PREAMBLE)
    prompt = joined(PREAMBLE, tokens)
    with connect(sidecar.address) as other:
        assert other.find_segments(SPEC, prompt, preamble=PREAMBLE) == []
        assert other.lookup(SPEC, prompt, segments=[(9, 49)], preamble=PREAMBLE).segments[0].is_whole
        assert other.find_segments(SPEC, prompt, preamble=PREAMBLE) == [range(9, 49)]
        assert other.find_segments(SPEC, prompt) == []


def test_a_prompt_that_begins_otherwise_is_refused(client: Client) -> None:
    prompt = joined([5], PREAMBLE, tokens_of(40, 7004))
    with pytest.raises(InvalidRequest, match="does not begin with its 9 tokens"):
        client.lookup(SPEC, prompt, segments=[(10, 50)], preamble=PREAMBLE)
    with pytest.raises(InvalidRequest, match="does not begin with its 9 tokens"):
        client.find_segments(SPEC, prompt, preamble=PREAMBLE)
    with pytest.raises(InvalidRequest, match="extras inside the preamble"):
        client.lookup(SPEC, prompt[1:], segments=[(9, 49)], preamble=PREAMBLE, extras=[Extra(3, b"image")])
