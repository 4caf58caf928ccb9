"""What was fetched once is fetched without a call, as long as memory has it: the right bytes, or a call, or a miss."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kvstore_client import Client, MissReason, Paged, PageHashes, connect
from kvstore_client.fetch.paged import PagedTarget
from kvstore_client.planes.shared_memory import known as known_chunks
from kvstore_client.planes.shared_memory import warm
from kvstore_ops.sidecar import Sidecar

from kvstore.catalog import ROOT_ROW
from kvstore.controller.fetches import fetch as fetches
from kvstore.keys import chain_digests
from kvstore.spec import LayerSpec, ModelSpec, Tier
from tests.server.raw import eventually
from tests.specs import random_cache, same, small_spec, tokens_of

SPEC = small_spec()
COUNT = 48
TOLD_S = 1.1
"""Longer than a client waits before it tells the sidecar what it did without a call."""
SHAPES = {
    "one head": (LayerSpec(kv_heads=1, k_dim=8, v_dim=8),) * 3,
    "other widths": (LayerSpec(kv_heads=2, k_dim=24, v_dim=8),) * 3,
    "layers unlike": (LayerSpec(kv_heads=2, k_dim=8, v_dim=8), LayerSpec(kv_heads=4, k_dim=8, v_dim=8)) * 2,
}


@pytest.fixture(scope="module")
def small() -> Iterator[Sidecar]:
    with Sidecar("--capacity", "8 MiB") as running:
        yield running


@contextmanager
def connected_to(sidecar: Sidecar) -> Iterator[Client]:
    with connect(sidecar.address, timeout_s=5.0) as connected:
        connected.lookup(SPEC, tokens_of(16, 1))
        eventually(lambda: connected.connect_now().presence.is_there)
        yield connected


@pytest.fixture
def client(small: Sidecar) -> Iterator[Client]:
    with connected_to(small) as connected:
        yield connected


def stored(client: Client, seed: int, spec: ModelSpec = SPEC, count: int = COUNT) -> tuple[np.ndarray, list]:
    tokens, cache = tokens_of(count, seed), random_cache(spec, count, seed)
    client.store(spec, tokens, cache).wait(10)
    return tokens, cache


def fill(small: Sidecar, seed: int, count: int = 700 * 16) -> None:
    """Another client stores as much as memory has room for."""
    with connect(small.address) as other:
        other.store(SPEC, tokens_of(count, seed), random_cache(SPEC, count, seed)).wait(20)


def pages_of(spec: ModelSpec, count: int, size: int, skipped: int = 0) -> Paged:
    """Poisoned pages in random order; the first ``skipped`` tokens have no slot."""
    layer, page_count = spec.layers[0], count // size
    shape = (2, page_count, size, layer.kv_heads, layer.k_dim)
    order = np.random.default_rng(3).permutation(page_count)
    slots = (order[:, None] * size + np.arange(size)).reshape(-1)
    slots[:skipped] = -1
    return Paged([np.full(shape, 0xDBDB, np.uint16) for _ in spec.layers], slots)


def without_the_sidecar(small: Sidecar, call: Callable[[], object]) -> object:
    os.kill(small.pid, signal.SIGSTOP)
    try:
        return call()
    finally:
        os.kill(small.pid, signal.SIGCONT)


@pytest.mark.parametrize("shape", [None, *SHAPES])
@pytest.mark.parametrize("into", [False, True])
def test_a_second_fetch_needs_no_sidecar(small: Sidecar, client: Client, shape: str | None, into: bool) -> None:
    spec = small_spec(layers=SHAPES[shape], model_id=shape) if shape else SPEC
    tokens, cache = stored(client, 1, spec)
    assert client.fetch(spec, tokens).token_count == COUNT
    target = [
        tuple(torch.zeros(plane.shape[0], 72, plane.shape[2], dtype=torch.bfloat16)[:, 8:] for plane in layer)
        for layer in cache
    ]
    found = without_the_sidecar(small, lambda: client.fetch(spec, tokens, into=target if into else None))
    assert (found.token_count, found.reason) == (COUNT, MissReason.NONE)
    given = [tuple(plane[:, :COUNT] for plane in layer) for layer in target] if into else found
    assert same(given, cache)
    if into:
        assert not any(plane[:, COUNT:].any() for layer in target for plane in layer)


def test_a_prompt_that_goes_on_behind_a_partial_chunk_needs_no_sidecar_either(small: Sidecar, client: Client) -> None:
    tokens, cache = stored(client, 21, count=40)
    longer = np.concatenate((tokens, tokens_of(30, 22)))
    before = client.stats().counters["fetch_calls"]
    assert client.fetch(SPEC, longer).token_count == 40
    assert client.stats().counters["fetch_calls"] == before + 1, "shared memory shows which partial chunk it is"
    found = without_the_sidecar(small, lambda: client.fetch(SPEC, longer))
    assert found.token_count == 40
    assert same(found, cache)


def test_a_partial_chunk_of_other_tokens_is_not_taken(small: Sidecar, client: Client) -> None:
    tokens, cache = stored(client, 23, count=40)
    other = np.concatenate((tokens[:36], tokens_of(30, 24)))
    assert client.fetch(SPEC, other).token_count == 32
    found = without_the_sidecar(small, lambda: client.fetch(SPEC, other))
    assert (found.token_count, found.reason) == (32, MissReason.COLD)
    assert same(found, [tuple(plane[:, :32] for plane in layer) for layer in cache])


def test_what_is_stored_behind_a_partial_chunk_is_found_the_next_time(client: Client) -> None:
    tokens, first = stored(client, 25, count=40)
    longer = np.concatenate((tokens, tokens_of(30, 26)))
    assert [client.fetch(SPEC, longer).token_count for _ in range(2)] == [40, 40]
    cache = random_cache(SPEC, 70, 27)
    client.store(SPEC, longer, cache).wait(10)
    found = client.fetch(SPEC, longer)
    assert found.token_count == 70
    for start, stop, wanted in ((0, 32, first), (32, 70, cache)):  # the two whole chunks were there before
        cut = [[tuple(plane[:, start:stop] for plane in layer) for layer in kv] for kv in (found, wanted)]
        assert same(*cut)


@pytest.mark.parametrize("skipped", [0, 8, 16, 24, 40])
@pytest.mark.parametrize("heads", [None, (1, 2)])
@pytest.mark.parametrize("size", [4, 8, 16])
def test_pages_are_filled_in_one_pass_without_the_sidecar(
    small: Sidecar, client: Client, monkeypatch: pytest.MonkeyPatch, size: int, heads: tuple[int, int] | None,
    skipped: int,
) -> None:  # fmt: skip
    """A pass over all layers: none of them is copied by itself, but where tokens fill a part of a page."""
    tokens, cache = stored(client, 30)
    client.fetch(SPEC, tokens)
    spec = SPEC if heads is None else small_spec(layers=(LayerSpec(kv_heads=1, k_dim=8, v_dim=8),) * len(SPEC.layers))
    into = pages_of(spec, COUNT, size, skipped)
    if skipped % size == 0:
        monkeypatch.delattr(PagedTarget, "copy_layer")
    found = without_the_sidecar(small, lambda: client.fetch(SPEC, tokens, into=into, heads=heads))
    assert found.token_count == COUNT
    slots = into.slots[into.slots >= 0]
    for pages, planes in zip(into.layers, cache, strict=True):
        for which, plane in enumerate(planes):
            flat = pages[which].reshape(COUNT, -1, 8)
            assert (flat[slots] == plane[slice(*(heads or (0, 2)))].transpose(1, 0, 2)[into.slots >= 0]).all()
            assert (flat[np.setdiff1d(np.arange(COUNT), slots)] == 0xDBDB).all()


def test_tokens_before_the_first_page_are_not_taken_for_a_page(small: Sidecar, client: Client) -> None:
    """Pages begin in the middle of a chunk's pages, because the tokens before them have no slot."""
    tokens, cache = stored(client, 31)
    client.fetch(SPEC, tokens)
    into = pages_of(SPEC, COUNT, 8)
    into.slots[:] = [-1] * 3 + list(range(COUNT - 8)) + [-1] * 5
    assert client.fetch(SPEC, tokens, into=into).token_count == COUNT
    for pages, planes in zip(into.layers, cache, strict=True):
        for which, plane in enumerate(planes):
            flat = pages[which].reshape(COUNT, -1, 8)
            assert (flat[: COUNT - 8] == plane.transpose(1, 0, 2)[3 : COUNT - 5]).all()
            assert (flat[COUNT - 8 :] == 0xDBDB).all()


@pytest.mark.parametrize("rooms", [(16, 20), (20, 16), (16, 16)])
@pytest.mark.parametrize("count", [16, 13])
@pytest.mark.parametrize("cut_from", [0, 24])
def test_layers_have_room_of_their_own(client: Client, rooms: tuple[int, int], count: int, cut_from: int) -> None:
    """A chunk may fill one layer's tensors and not another's. Those cut from larger ones have the same strides."""
    tokens, cache = stored(client, 10 + count, count=count)
    for _ in range(2):
        into = [
            tuple(
                torch.zeros(plane.shape[0], cut_from or room, plane.shape[2], dtype=torch.bfloat16)[:, :room]
                for plane in layer
            )
            for layer, room in zip(cache, rooms, strict=True)
        ]
        assert client.fetch(SPEC, tokens, into=into).token_count == count
        assert same([tuple(plane[:, :count] for plane in layer) for layer in into], cache)
        assert not any(plane[:, count:].any() for layer in into for plane in layer)


def test_some_layers_some_heads_and_a_shorter_prompt(small: Sidecar, client: Client) -> None:
    tokens, cache = stored(client, 2)
    client.fetch(SPEC, tokens)
    part = without_the_sidecar(small, lambda: client.fetch(SPEC, tokens[:32], layers=[1], heads=range(1, 2)))
    assert part.token_count == 32
    assert same(part, [tuple(plane[1:2, :32] for plane in cache[1])])
    checked = without_the_sidecar(small, lambda: client.fetch(SPEC, tokens, verify=True))
    assert checked.token_count == COUNT
    assert same(checked, cache)


def test_what_is_not_there_any_more_is_a_miss(small: Sidecar, client: Client) -> None:
    tokens, _ = stored(client, 3)
    assert client.fetch(SPEC, tokens).token_count == COUNT
    fill(small, 4)
    fill(small, 104)  # the use that the client tells in a while may keep a chunk once
    found = client.fetch(SPEC, tokens)
    assert (found.token_count, found.reason) == (0, MissReason.EVICTED)


@pytest.mark.parametrize("in_pages", [False, True])
def test_what_leaves_under_the_copy_is_asked_for_and_a_miss(small: Sidecar, client: Client, in_pages: bool) -> None:
    """The bytes that were copied are another chunk's by then."""
    tokens, _ = stored(client, 5)
    assert client.fetch(SPEC, tokens).token_count == COUNT
    filled: list[int] = []

    def leave() -> None:
        if not filled:
            filled.append(1)
            fill(small, 6)
            fill(small, 16)

    client.faults.arm("fetch.copy.middle", leave)
    found = client.fetch(SPEC, tokens, into=pages_of(SPEC, COUNT, 8) if in_pages else None)
    assert filled
    assert (found.token_count, found.reason) == (0, MissReason.EVICTED)


def test_bytes_that_are_asked_for_again_count_once(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, _ = stored(client, 20)
    client.fetch(SPEC, tokens)
    before = client.statistics()["fetched_bytes"]
    monkeypatch.setattr(warm.WarmPrefix, "settle", lambda self, bad: 16)
    found = client.fetch(SPEC, tokens)
    assert found.token_count == COUNT
    assert client.statistics()["fetched_bytes"] - before == found.byte_count


def test_what_left_memory_under_the_copy_comes_from_the_device() -> None:
    with Sidecar("--capacity", "8 MiB", nvme="64 MiB") as own, connect(own.address) as mine:
        tokens, cache = stored(mine, 12)
        assert mine.fetch(SPEC, tokens).token_count == COUNT
        eventually(lambda: mine.connect_now().presence.is_there)
        filled: list[int] = []

        def has_left() -> bool:
            """Fill once more: what the device has not written yet finds no room, and so may most of it."""
            filled.append(13 + len(filled))
            fill(own, filled[-1], 400 * 16)
            return mine.lookup(SPEC, tokens).chunks[0].tier is Tier.NVME

        def leave() -> None:
            if not filled:
                eventually(has_left)

        mine.faults.arm("fetch.copy.middle", leave)
        found = mine.fetch(SPEC, tokens)
        assert filled
        assert (found.token_count, found.tier) == (COUNT, Tier.NVME)
        assert same(found, cache)


def test_what_is_stored_again_elsewhere_is_found_there(small: Sidecar, client: Client) -> None:
    tokens, cache = stored(client, 7)
    client.fetch(SPEC, tokens)
    fill(small, 8)
    stored(client, 7)
    for _ in range(2):
        found = client.fetch(SPEC, tokens)
        assert found.token_count == COUNT
        assert same(found, cache)


def test_what_is_used_without_a_call_stays() -> None:
    """Of two that were stored one is used, and then there is no room for both."""
    with Sidecar("--capacity", "2 MiB") as tiny, connected_to(tiny) as client:
        _a_use_without_a_call_counts(tiny, client)


def _a_use_without_a_call_counts(small: Sidecar, client: Client) -> None:
    (used, cache), (unused, _) = stored(client, 9), stored(client, 10)
    before = client.stats().counters
    client.fetch(SPEC, used)
    client.fetch(SPEC, unused)
    time.sleep(TOLD_S)
    found = without_the_sidecar(small, lambda: client.fetch(SPEC, used))
    assert same(found, cache)
    eventually(lambda: client.stats().counters["fetch_hit_chunks"] - before["fetch_hit_chunks"] == 9)
    after = client.stats().counters
    assert after["fetch_calls"] - before["fetch_calls"] == 3
    assert after["fetch_bytes"] - before["fetch_bytes"] == 9 * 12288
    room, filler = client.stats().arena, 0
    while client.lookup(SPEC, unused).prefix_token_count:
        filler += 1
        assert filler < 2 * room.capacity_bytes // 12288
        stored(client, 1000 + filler, count=16)
    assert client.lookup(SPEC, used).prefix_token_count == COUNT


def test_a_chunk_that_hashes_name_elsewhere_is_asked_for(client: Client) -> None:
    """No honest engine has such hashes. What lay in the target before is not taken for the cache all the same."""
    tokens, cache = tokens_of(COUNT, 15), random_cache(SPEC, COUNT, 15)
    hashes = [bytes([number]) * 32 for number in (1, 2, 3)]
    client.store(SPEC, PageHashes("odd", 16, hashes, tokens), cache).wait(10)
    assert client.fetch(SPEC, PageHashes("odd", 16, hashes)).token_count == COUNT
    found = client.fetch(SPEC, PageHashes("odd", 16, hashes[2:]))
    assert found.token_count == 16
    assert same(found, [tuple(plane[:, 32:48] for plane in layer) for layer in cache])


def test_what_was_used_longest_ago_is_forgotten_first(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for the headers of two prompts, and of the three the second one was used longest ago."""
    prompts = [stored(client, seed)[0] for seed in (17, 18, 19)]
    known = client.connect_now().warm
    known._known.clear()
    known._header_bytes = 0
    client.fetch(SPEC, prompts[0])
    monkeypatch.setattr(known_chunks, "HEADER_BYTES_MAX", 2 * known._header_bytes)
    for number in (1, 0, 2):
        client.fetch(SPEC, prompts[number])
    digests = [chain_digests(tokens, SPEC.chunk_tokens) for tokens in prompts]
    assert [{digest for _, digest in known._known}.issuperset(each) for each in digests] == [True, False, True]
    assert known._header_bytes == sum(each.chunk.layout.header_bytes for each in known._known.values())


def test_a_session_that_ended_knows_no_chunks(client: Client) -> None:
    tokens, _ = stored(client, 16)
    session = client.connect_now()
    note = session.warm.note

    def late(*seen: object) -> None:
        session.close()
        note(*seen)

    session.warm.note = late
    client.fetch(SPEC, tokens)
    assert not session.warm._known


def test_what_one_packet_tells_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of chains that are too long the last ones count, and the walk ends."""
    monkeypatch.setattr(fetches, "TOLD_CHUNKS_MAX", 10)
    parents = [ROOT_ROW, 0, 1, 2, 3, ROOT_ROW, 5, 6, 7, 8]  # two chains of five, and what asks for them
    walked, told = [], []

    class Parents:
        def __getitem__(self, row: int) -> int:
            walked.append(row)
            return parents[row]

    index = {b"one": 4, b"two": 9}
    catalog = SimpleNamespace(table=SimpleNamespace(parents=Parents()))
    nobody = SimpleNamespace(add=lambda *_: None, add_of=lambda *_: None)
    movement = SimpleNamespace(used=told.append, memory=SimpleNamespace(tier=SimpleNamespace(name="memory")))
    parts = SimpleNamespace(catalog=catalog, movement=movement, heat=nobody, served=nobody, counters=nobody)
    space = SimpleNamespace(index=index, spec=SPEC, kind=SPEC.kind)
    monkeypatch.setattr(fetches, "namespaces_of", lambda *_: [space])
    queries = [SimpleNamespace(digests=[name]) for name in (b"one", b"gone", b"one", b"two")]
    asked = [SimpleNamespace(query=query, fetch_count=1, token_count=1) for query in queries]
    fetches.Fetches(parts, None).used(asked)
    assert told == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    told.clear()
    walked.clear()
    monkeypatch.setattr(fetches, "TOLD_CHUNKS_MAX", 7)
    fetches.Fetches(parts, None).used(asked)
    assert told == [[5, 6, 7, 8, 9]]
    assert len(walked) == 7


def test_a_restarted_sidecar_is_asked(client: Client) -> None:
    with Sidecar("--capacity", "8 MiB") as own, connect(own.address) as mine:
        tokens, cache = stored(mine, 11)
        assert mine.fetch(SPEC, tokens).token_count == COUNT
        assert same(mine.fetch(SPEC, tokens), cache)
        own.stop(kill=True)
        assert mine.fetch(SPEC, tokens).token_count == 0
        own.start()
        eventually(lambda: mine.lookup(SPEC, tokens).prefix_token_count == 0)
        assert mine.fetch(SPEC, tokens).token_count == 0
