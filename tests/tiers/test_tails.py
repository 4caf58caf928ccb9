"""Prompts of any length against a dict: stores, lookups, evictions and restarts. What was acknowledged and not evicted
is found, and of it the longest that a prompt begins with. Client's and service's parts are the real ones."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from kvstore_client.lookup.tails import longest_tail, superseded
from kvstore_client.prompt import Prompt

from kvstore.catalog import Event
from kvstore.chunk import layout_of, parse_header
from kvstore.controller import ChainQuery, Fill, ReserveRequest
from kvstore.controller.fetches import namespaces_of
from kvstore.errors import InvalidRequest
from kvstore.server.render import render_lookup, render_store
from kvstore.spec import Durability, EventKind, Exactness, LayerSpec, MissReason, StoreState
from tests.scenario import scenario
from tests.specs import small_spec
from tests.tiers.service import KIB, DeviceService

STEP = 16
SEEDS = 40 if os.environ.get("KVSTORE_TEST_SCALE") == "full" else 2
Tokens = tuple[int, ...]


class Book:
    """What is stored, by all tokens up to a chunk's end: what stores were told, less what was told as evicted."""

    def __init__(self) -> None:
        self.stops: dict[bytes, Tokens] = {}
        self.kept: set[Tokens] = set()
        self.safe: set[Tokens] = set()
        """Acknowledged as LOCAL."""
        self.evicted = 0

    def note(self, event: Event) -> None:
        tokens = self.stops[event.digest]
        if event.kind is EventKind.STORED:
            self.kept.add(tokens)
        elif event.kind is EventKind.REMOVED:
            assert event.reason is MissReason.EVICTED
            self.kept.discard(tokens)
            self.safe.discard(tokens)
            self.evicted += 1

    def longest(self, tokens: Tokens) -> int:
        start = 0
        while start + STEP <= len(tokens) and tokens[: start + STEP] in self.kept:
            start += STEP
        stops = range(min(len(tokens), start + STEP - 1), start, -1)
        return next((stop for stop in stops if tokens[:stop] in self.kept), start)


class Life:
    """Clients of one service. Texts begin alike, so that they meet."""

    def __init__(self, service: DeviceService, seed: int) -> None:
        self.service, self.book = service, Book()
        self.chance = np.random.default_rng(seed)
        self.watch()

    def watch(self) -> None:
        self.watcher = self.service.controller.parts.catalog.spaces.events.watch(1 << 16, 64)

    async def hear(self) -> None:
        while self.watcher._queue:
            news = await self.watcher.take(1 << 16)
            assert news is not None
            assert not news.lost_count
            for event in news.events:
                self.book.note(event)

    def text(self) -> Tokens:
        known = sorted(self.book.stops.values())
        base: Tokens = known[self.chance.integers(len(known))] if known and self.chance.random() < 0.8 else ()
        base = base[: int(self.chance.integers(len(base) + 1))] if self.chance.random() < 0.5 else base
        more = self.chance.integers(0, 3, int(self.chance.integers(1, 2 * STEP)))
        return (*base, *map(int, more))[: 4 * STEP]

    def prompt(self, tokens: Tokens) -> Prompt:
        return Prompt.of(self.service.spec, list(tokens), (), Exactness.EXACT)

    async def store(self, tokens: Tokens = (), also: Sequence[bytes] = ()) -> None:
        """``also``: more digests that the store says it supersedes."""
        service, session, tokens = self.service, self.service.session, tokens or self.text()
        prompt, controller = self.prompt(tokens), self.service.controller
        query = ChainQuery(service.model, prompt.digests)
        for number, digest in enumerate(prompt.digests, 1):
            self.book.stops[digest] = tokens[: number * STEP]
        request = ReserveRequest(query, prompt.token_digests(), len(tokens) % STEP)
        told = await controller.reserve(session, request)
        fills, stagings = [], []
        for index, state in enumerate(told.states):
            if state is StoreState.WANTED:
                layout = self.layout(min(STEP, len(tokens) - index * STEP))
                staging = controller.create_staging(session, -(-layout.body_bytes // 4096) * 4096)
                staging.mapping.bytes[: layout.body_bytes] = self.body(layout, prompt.digests[index])
                fills.append(Fill(index, 0, layout.strip_count, staging.staging_id, 0))
                stagings.append(staging.staging_id)
        names = superseded(prompt, render_store(told).tails)
        supersedes = [*(names[place : place + 32] for place in range(0, len(names), 32)), *also]
        done = await controller.commit(session, told.reservation_id, fills, 0, supersedes)
        for staging_id in stagings:
            controller.close_staging(session, staging_id)
        await self.hear()
        committed = [tokens[: number * STEP] for number in range(1, done.committed_count + 1)]
        assert self.book.kept.issuperset(committed), "what a store was told is there was told as stored"
        settled = await controller.settle(query, 60.0)
        await self.hear()
        if settled.durability is Durability.LOCAL:
            self.book.safe |= self.book.kept.intersection(committed[: settled.chunk_count])

    def layout(self, count: int) -> Any:
        return layout_of(self.service.spec, self.service.spec.kind, count)

    def body(self, layout: Any, digest: bytes) -> Any:
        body = np.zeros(layout.body_bytes, np.uint8)
        for offset, length in zip(layout.strip_offsets.tolist(), layout.strip_lengths.tolist(), strict=True):
            body[offset : offset + length] = np.frombuffer(digest, np.uint8)[offset % 31]
        return body

    async def look(self, tokens: Tokens) -> None:
        """What a client finds, and every byte of it."""
        prompt, controller = self.prompt(tokens), self.service.controller
        query = ChainQuery(self.service.model, prompt.digests)
        said = render_lookup(controller.lookups.lookup(query))
        prefix = min(said.hit_count * STEP, len(tokens))
        parts = namespaces_of(controller.parts.catalog, query)
        tail = longest_tail(
            prompt, prefix, said.hit_count, said, lambda names: controller.parts.catalog.first_of(parts, names)
        )
        digests = [*prompt.digests[: said.hit_count], *([tail[1]] if tail else [])]
        found = prefix + (tail[0] if tail else 0)
        assert found == self.book.longest(tokens), tokens
        result = controller.fetches.fetch(self.service.session, ChainQuery(self.service.model, digests))
        async for arrivals in controller.arrivals(result, None):
            assert not any(each.lost for each in arrivals)
        assert result.hit_count == len(digests)
        for chunk in result.chunks:
            layout = self.layout(chunk.token_count)
            assert parse_header(chunk.placement.pieces[0], layout).chain_digest == digests[chunk.chain_index]
            body = np.concatenate(chunk.placement.pieces[1:])
            assert (body == self.body(layout, digests[chunk.chain_index])).all()
        controller.release(self.service.session, [result.lease_id])
        await self.hear()

    async def restart(self) -> None:
        """What was not yet LOCAL may be there after a kill, or not; so may what was evicted: an eviction writes
        nothing, and a name means the same bytes for ever."""
        table = self.service.controller.parts.catalog.table
        written = {self.book.stops[table.digests[row]] for row in self.service.device.rows()}
        gone = len(self.book.safe - written)
        assert gone <= self.service.counters()["nvme_evicted_chunks"], "memory has them still; the device gave them up"
        self.book.safe &= written
        await self.service.restart(kill=bool(self.chance.random() < 0.5))
        self.watch()
        index = self.service.controller.parts.catalog.model(self.service.model).seen(None, Exactness.EXACT).index
        here = {self.book.stops[digest] for digest in index}
        assert self.book.safe <= here, "nothing that was LOCAL and not evicted went"
        self.book.kept = here


@pytest.mark.parametrize("capacity_bytes", [8192 * KIB, 768 * KIB])
@pytest.mark.parametrize("seed", range(SEEDS))
@scenario(lambda capacity_bytes: DeviceService(arena_chunks=24, capacity_bytes=capacity_bytes))
async def test_the_longest_of_what_was_acknowledged_is_found(
    service: DeviceService, seed: int, capacity_bytes: int
) -> None:
    life = Life(service, seed)
    for step in range(120):
        await life.store()
        for _ in range(3):
            await life.look(life.text())
        if step % 30 == 29:
            await life.restart()
    for tokens in sorted(life.book.stops.values()):
        await life.look(tokens)
    assert life.book.kept
    if capacity_bytes > 1 << 20:
        assert life.book.kept == set(life.book.stops.values()), "there was room for all"
    else:
        assert life.book.evicted > 0


def test_a_full_device_takes_prompts_whose_ends_are_partial() -> None:
    """Twice as many as it has room for. It has little room for ends, so that most of them are in memory alone: chunks
    that nobody uses any more would stay on the device for them."""
    spec = small_spec(layers=(LayerSpec(kv_heads=2, k_dim=64, v_dim=64),) * 3)  # ends take other slots than full chunks
    service = DeviceService(arena_chunks=20, capacity_bytes=640 * KIB, region_bytes=120 * KIB, spec=spec)

    async def scenario() -> None:
        life = Life(service, 0)

        async def use(count: int) -> None:
            for _ in range(count):
                number, depth = (int(life.chance.integers(*bounds)) for bounds in ((4, 24), (1, 4)))
                tokens = (number,) * (STEP * depth + int(life.chance.choice([0, 0, 5, 9])))
                await life.store(tokens)
                await life.look(tokens)

        await use(60)
        files = service.region_files()
        await use(60)
        counters = service.counters()
        assert counters["nvme_evicted_chunks"] > 100
        assert counters["nvme_refused_chunks"] == 0
        assert service.region_files() == files, "no file was removed and made anew"

    service.run(scenario)


@scenario(lambda: DeviceService())
async def test_what_a_store_names_and_does_not_begin_with_stays_where_it_is(service: DeviceService) -> None:
    """Only a shorter partial chunk beside the store's own may be put behind others, by whom it belongs to; and not even
    that is dropped. A list that is too long is refused before anything is stored."""
    beside, longer, full = (1,) * 5, (2,) * 9, (*range(3, 19),)
    below = (*full, 7, 7, 7)
    life = Life(service, 0)
    for tokens in (beside, longer, full, below):
        await life.store(tokens)
    known = [life.prompt(tokens).digests[-1] for tokens in (beside, longer, full, below)]
    await life.store((5,) * 8, also=[*known, bytes(32), b"?" * 32])
    assert service.counters()["superseded_chunks"] == 1, "of five tokens beside one of eight"
    with pytest.raises(InvalidRequest, match="supersedes"):
        await life.store((6,) * 8, also=[b"?" * 32] * 4097)
    for reservation in service.controller.reservations.of(service.session):
        await service.controller.abort(service.session, reservation.reservation_id)
    for tokens in (beside, longer, full, below, (5,) * 8, (6,) * 8):
        await life.look(tokens)
        await life.look((*tokens, 0, 0))
    assert service.counters()["evicted_chunks"] == 0


@scenario(lambda: DeviceService(arena_chunks=6, capacity_bytes=0))
async def test_what_a_longer_chunk_begins_with_goes_first(service: DeviceService) -> None:
    """And what is used again is as good as any other."""
    old, grown, used = (1,) * 10, (2,) * 8, (3,) * 8
    life = Life(service, 0)
    for tokens in (old, grown, (*grown, 2), used, (*used, 3)):
        await life.store(tokens)
    await life.look(used)
    seen: list[Tokens] = []
    for number in range(4, 12):
        before = set(life.book.kept)
        await life.store((number,) * STEP)
        seen += sorted(before - life.book.kept)
    assert seen[:2] == [grown, old], "it was stored after the other one, and went before it"
    assert seen.index(used) > 1
