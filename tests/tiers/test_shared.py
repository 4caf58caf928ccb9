"""Shared tiers in the service: what one node stored another one gets, right to the bit or not at all, and no node
waits for an engine that does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.controller import LookupResult
from kvstore.errors import DataLoss
from kvstore.presence import PARTIAL, STATE_MASK
from kvstore.simulated import InlineWorkers, SimulatedDisk, simulate
from kvstore.spec import ChunkState, Durability, MissReason, StoreState, Tier
from kvstore.tiers import SharedTier
from tests.fakes import EngineSettings, EngineTier, ObjectSettings, ObjectTier, Switch
from tests.fakes.engine import ENGINES, Engine
from tests.tiers.service import SEED, DeviceService
from tests.tiers.values import ValueService

LOOKUP_S = 0.05
PATH = (1, 2, 3)


class Node(DeviceService):
    """One of the nodes that share these tiers."""

    def __init__(self, *makers: Callable[[], SharedTier], **options: Any) -> None:
        super().__init__(disk=SimulatedDisk(SEED), **options)
        self.makers = makers
        self.shared: list[Any] = []

    async def attach(self) -> None:
        await super().attach()
        self.shared = [make() for make in self.makers]
        for tier in self.shared:
            self.controller.attach_shared(tier, LOOKUP_S)

    async def lookup(self, *path: int, readers: int = 0) -> LookupResult:
        return await self.controller.lookup_wide(self.query(*path), readers)

    async def give(self, *path: int) -> None:
        """Store, and wait until every tier has it that takes it."""
        await self.keep(*path)
        await self.quiet()

    async def quiet(self) -> None:
        while self.controller.stats().backlog_count:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.01)

    async def fetch(self, *path: int) -> tuple[int, MissReason]:
        """As a ``DeviceService``'s; and what came is entered."""
        found = await super().fetch(*path)
        for _ in range(100):
            if self.controller.stats().loading_bytes:
                await asyncio.sleep(0.001)
        return found

    def row(self, *path: int) -> int:
        """The row of the last chunk of a path."""
        query = self.query(*path)
        return self.controller.parts.catalog.model(self.model).seen(None, query.exactness).index[query.digests[-1]]

    def ghosts(self) -> list[bytes]:
        """Digests of chunks that no tier holds and something still refers to."""
        return [digest for space in self.controller.parts.catalog.spaces.numbered for digest in space.ghosts]

    def key(self, *path: int) -> bytes:
        """The storage key of the last chunk of a path."""
        parts, query = self.controller.parts, self.query(*path)
        return parts.storage_key(parts.catalog.model(self.model).seen(None, query.exactness), query.digests[-1])

    def is_empty(self) -> None:
        """Nothing is left of what did not come."""
        stats = self.controller.stats()
        assert (stats.chunk_count, stats.used_bytes, stats.lease_count, stats.loading_bytes) == (0, 0, 0, 0)
        assert not self.ghosts()


def spoil(engine: Engine, node: Node, *path: int) -> None:
    """A bit of the first strip of the path's last chunk flips in the engine."""
    key = node.key(*path)
    value = bytearray(engine.values[key])
    value[node.layout.header_bytes] ^= 1
    engine.values[key] = bytes(value)


class World:
    """Two nodes and the engine between them. ``switches`` are those of both nodes' ways to it."""

    def __init__(self, directory: Path, **engine: Any) -> None:
        self.settings = EngineSettings(engine=str(directory), switches=directory / "switches", **engine)
        self.switches = EngineTier(self.settings).switches
        self.one, self.other = (Node(lambda: EngineTier(self.settings)) for _ in range(2))

    @property
    def engine(self) -> Engine:
        return ENGINES[self.settings.engine]

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        run([self.one, self.other], scenario)


def run(nodes: list[Node], scenario: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        try:
            for node in nodes:
                await node.start()
            await scenario()
        finally:
            for node in nodes:
                await node.stop(kill=True)

    simulate(whole(), seed=SEED)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def tiers_of(found: LookupResult) -> list[tuple[Tier, int]]:
    return [(run.tier, run.chunk_count) for run in found.runs if run.state is ChunkState.HIT]


def test_what_one_node_stores_another_gets_and_keeps(world: World) -> None:
    async def scenario() -> None:
        await world.one.give(*PATH)
        other = world.other
        found = await other.lookup(*PATH, 4)
        assert (found.hit_count, tiers_of(found), found.runs[-1].state) == (3, [(Tier.REDIS, 3)], ChunkState.MISS)
        result = await other.controller.fetch_wide(other.session, other.query(*PATH))
        assert (result.hit_count, result.tier, result.reason) == (3, Tier.REDIS, MissReason.NONE)
        other.controller.release(other.session, [result.lease_id])
        assert await other.fetch(*PATH) == (3, MissReason.NONE)
        assert (await other.settled(*PATH)).durability is Durability.LOCAL
        world.engine.values.clear()
        await other.restart()
        assert await other.fetch(*PATH) == (3, MissReason.NONE)

    world.run(scenario)


def test_a_chain_goes_on_where_the_node_ends(world: World) -> None:
    async def scenario() -> None:
        await world.one.give(*PATH)
        await world.other.keep(1)
        found = await world.other.lookup(*PATH)
        assert tiers_of(found) == [(Tier.DRAM, 1), (Tier.REDIS, 2)]
        assert await world.other.fetch(*PATH) == (3, MissReason.NONE)

    world.run(scenario)


def test_a_gap_in_what_the_node_has_is_filled(world: World) -> None:
    """A chunk in the middle went; what comes after it is here still."""

    async def scenario() -> None:
        one = world.one
        await one.give(*PATH)
        row = one.row(1, 2)
        one.controller.parts.movement.remove(row, MissReason.CORRUPT)
        found = await one.lookup(*PATH)
        assert tiers_of(found) == [(Tier.DRAM, 1), (Tier.REDIS, 1), (Tier.DRAM, 1)]
        assert await one.fetch(*PATH) == (3, MissReason.NONE)
        assert not one.ghosts()

    world.run(scenario)


def test_rows_that_cannot_be_had_leave_no_hold(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        await world.one.give(*PATH)
        other, made = world.other, []
        catalog = other.controller.parts.catalog
        known_row = catalog.known_row

        def failing(*arguments: Any) -> int:
            made.append(arguments)
            if len(made) == 2:
                raise MemoryError
            return known_row(*arguments)

        monkeypatch.setattr(catalog, "known_row", failing)
        with pytest.raises(MemoryError):
            await other.fetch(*PATH)
        other.is_empty()
        assert await other.fetch(*PATH) == (3, MissReason.NONE)

    world.run(scenario)


def test_what_left_the_node_comes_back(world: World) -> None:
    async def scenario() -> None:
        one = world.one
        await one.give(*PATH)
        for row in reversed([*one.mapped.rows()]):
            one.controller.parts.movement.remove(row, MissReason.EVICTED)
        one.is_empty()
        assert await one.fetch(*PATH) == (3, MissReason.NONE)

    world.run(scenario)


def test_what_was_nowhere_a_moment_ago_comes_back_once_it_was_stored(world: World) -> None:
    async def scenario() -> None:
        one = world.one
        assert (await one.lookup(*PATH)).hit_count == 0
        await one.give(*PATH)
        for row in reversed([*one.mapped.rows()]):
            one.controller.parts.movement.remove(row, MissReason.EVICTED)
        assert await one.fetch(*PATH) == (3, MissReason.NONE)

    world.run(scenario)


@pytest.mark.parametrize("switch", [Switch.CORRUPT, Switch.GARBLED])
def test_what_fails_its_check_is_a_miss_and_is_written_anew_with_the_next_store(world: World, switch: Switch) -> None:
    async def scenario() -> None:
        await world.one.give(*PATH)
        other = world.other
        world.switches.turn_on(switch)
        assert await other.fetch(*PATH) == (0, MissReason.CORRUPT)
        other.is_empty()
        world.switches.turn_off()
        spoil(world.engine, world.one, 1)
        await other.give(*PATH)
        third = Node(lambda: EngineTier(world.settings))
        await third.start()
        assert await third.fetch(*PATH) == (3, MissReason.NONE)
        await third.stop(kill=True)

    world.run(scenario)


def test_a_hint_that_lies_costs_a_read(world: World) -> None:
    async def scenario() -> None:
        other = world.other
        world.switches.turn_on(Switch.LYING)
        assert (await other.lookup(*PATH)).hit_count == 3
        assert await other.fetch(*PATH) == (0, MissReason.EVICTED)
        other.is_empty()
        assert (await other.lookup(*PATH)).hit_count == 0, "it was not there: that is known for a while"

    world.run(scenario)


def test_what_is_dropped_after_it_was_found_is_a_miss(world: World) -> None:
    async def scenario() -> None:
        await world.one.give(*PATH)
        found = await world.other.lookup(*PATH, readers=1)
        assert found.hit_count == 3
        world.engine.drop(1)
        with pytest.raises(DataLoss):
            await redeemed(world.other, found.ticket)
        assert (await world.other.fetch(*PATH))[0] == 0
        world.other.is_empty()

    world.run(scenario)


async def redeemed(node: Node, ticket: bytes) -> int:
    """How many chunks came by a ticket."""
    result = await node.controller.redeem(node.session, ticket)
    lost = [each async for news in node.controller.arrivals(result) for each in news if each.lost]
    node.controller.release(node.session, [result.lease_id])
    if lost:
        raise DataLoss(f"{len(lost)} chunks were lost on their way")
    return result.hit_count


def test_a_ticket_brings_what_was_found(world: World) -> None:
    async def scenario() -> None:
        await world.one.give(*PATH)
        await world.other.keep(1)
        found = await world.other.lookup(*PATH, readers=1)
        assert await redeemed(world.other, found.ticket) == 3

    world.run(scenario)


def test_nobody_waits_for_an_engine_that_stalls(world: World) -> None:
    async def scenario() -> None:
        await world.one.give(*PATH)
        other, loop = world.other, asyncio.get_running_loop()
        world.switches.turn_on(Switch.STALLED)
        began_s = loop.time()
        assert (await other.lookup(*PATH)).hit_count == 0
        assert loop.time() - began_s < 2 * LOOKUP_S
        assert other.controller.stats().counters["redis_late_answers"] == 1
        assert (await other.keep(7)).committed_count == 1, "a store is the node's, whatever engines do"
        world.switches.turn_off()
        assert (await other.lookup(*PATH)).hit_count == 3
        world.switches.turn_on(Switch.STALLED)
        began_s = loop.time()
        assert await other.fetch(*PATH) == (0, MissReason.UNAVAILABLE)
        assert loop.time() - began_s < 3.0, "readers are told before their own deadline"
        assert other.controller.stats().loading_bytes > 0, "bytes may still come: the room is not used again"
        world.switches.turn_off()
        await asyncio.sleep(6.0)
        assert other.controller.stats().loading_bytes == 0
        assert await other.fetch(*PATH) == (3, MissReason.NONE)

    world.run(scenario)


def test_a_caller_in_a_hurry_is_told_what_the_node_has(world: World) -> None:
    async def scenario() -> None:
        other, loop, hurry_s = world.other, asyncio.get_running_loop(), LOOKUP_S / 2
        await other.give(1)
        world.switches.turn_on(Switch.STALLED)
        began_s = loop.time()
        found = await other.controller.lookup_wide(other.query(*PATH), deadline=other.controller.deadline(hurry_s))
        assert found.hit_count == 1
        assert loop.time() - began_s < hurry_s

    world.run(scenario)


def test_an_outage_is_gone_without_and_ends_by_itself(world: World) -> None:
    async def scenario() -> None:
        await world.one.give(*PATH)
        other = world.other
        world.switches.turn_on(Switch.AWAY)
        for token in range(10, 14):
            assert (await other.lookup(token)).hit_count == 0
        asked = other.controller.stats().counters["redis_asked_chunks"]
        assert (await other.lookup(*PATH)).hit_count == 0
        assert other.controller.stats().counters["redis_asked_chunks"] == asked, "it is left alone"
        await other.keep(7, 8)
        assert "tiers.redis" in other.controller.parts.movement.problems[0]
        world.switches.turn_off()
        await asyncio.sleep(10.0)
        assert await other.fetch(*PATH) == (3, MissReason.NONE)
        other.controller.parts.movement.retry()
        await other.quiet()
        assert await world.one.fetch(7, 8) == (2, MissReason.NONE), "what was stored meanwhile went there"

    world.run(scenario)


def test_a_full_engine_keeps_what_it_has(tmp_path: Path) -> None:
    world = World(tmp_path, capacity_bytes=20_000, evicts=False)
    assert world.one.layout.total_bytes < 20_000 < 2 * world.one.layout.total_bytes

    async def scenario() -> None:
        await world.one.give(1)
        await world.one.keep(2, 3)
        await world.one.quiet()
        counters = world.one.controller.stats().counters
        assert (counters["redis_written_chunks"], counters["redis_refused_chunks"] >= 1) == (1, True)
        assert await world.other.fetch(1) == (1, MissReason.NONE)

    world.run(scenario)


def test_the_fastest_tier_that_has_a_chunk_is_read(tmp_path: Path) -> None:
    """Two shared tiers: the engine dropped what the objects have."""
    engine = EngineSettings(engine=str(tmp_path), switches=tmp_path / "switches")
    objects = ObjectSettings(directory=tmp_path / "objects")
    makers = [lambda: EngineTier(engine), lambda: ObjectTier(objects, InlineWorkers())]
    one, other = (Node(*makers) for _ in range(2))

    async def scenario() -> None:
        await one.give(*PATH)
        held = ENGINES[str(tmp_path)].values
        for key in list(held)[2:]:
            del held[key]
        found = await other.lookup(*PATH)
        assert tiers_of(found) == [(Tier.REDIS, 2), (Tier.S3, 1)]
        other.shared[0].switches.turn_on(Switch.AWAY)
        assert await other.fetch(*PATH) == (0, MissReason.UNAVAILABLE), "hints are not asked for again at once"
        await asyncio.sleep(10.0)
        for _ in range(3):
            await other.lookup(9)
            await asyncio.sleep(5.0)
        assert await other.fetch(*PATH) == (3, MissReason.NONE), "the objects have all of it"

    run([one, other], scenario)


def test_a_tier_that_was_wrong_hides_no_slower_one_and_is_mended(tmp_path: Path) -> None:
    """The engine has a damaged chunk, lacks one although it says so, and gets both from the objects."""
    settings = EngineSettings(engine=str(tmp_path))
    objects = ObjectSettings(directory=tmp_path / "objects")
    makers = [lambda: EngineTier(settings), lambda: ObjectTier(objects, InlineWorkers())]
    one, other = (Node(*makers) for _ in range(2))

    async def scenario() -> None:
        await one.give(*PATH)
        engine = ENGINES[str(tmp_path)]
        spoil(engine, one, 1)
        assert tiers_of(await other.lookup(*PATH)) == [(Tier.REDIS, 3)]
        del engine.values[one.key(*PATH)]
        assert await other.fetch(*PATH) == (0, MissReason.CORRUPT)
        assert tiers_of(await other.lookup(1)) == [(Tier.S3, 1)]
        assert await other.fetch(*PATH) == (3, MissReason.NONE)
        await other.quiet()
        assert len(engine.values) == 3
        third = Node(makers[0])
        await third.start()
        assert await third.fetch(*PATH) == (3, MissReason.NONE)
        await third.stop(kill=True)

    run([one, other], scenario)


def test_a_store_meanwhile_wins(world: World) -> None:
    """The same chunk is on its way in while somebody stores it."""

    async def scenario() -> None:
        await world.one.give(1)
        other = world.other
        assert (await other.lookup(1)).hit_count == 1
        world.switches.turn_on(Switch.STALLED)
        coming = asyncio.ensure_future(other.fetch(1))
        await asyncio.sleep(0.1)
        done = await other.store(other.session, 1)
        assert done.states == (StoreState.COMMITTED,)
        world.switches.turn_off()
        await coming
        assert await other.fetch(1) == (1, MissReason.NONE)
        stats = other.controller.stats()
        assert stats.used_bytes == other.layout.total_bytes

    world.run(scenario)


def test_a_load_that_hangs_keeps_nobody_from_what_is_here_by_now(world: World) -> None:
    """All three chunks hang; then they are stored, and one is on the device alone."""

    async def scenario() -> None:
        await world.one.give(*PATH)
        other = world.other
        assert (await other.lookup(*PATH)).hit_count == 3
        world.switches.turn_on(Switch.STALLED)
        assert await other.fetch(*PATH) == (0, MissReason.UNAVAILABLE)
        assert (await other.keep(*PATH)).committed_count == 3
        other.drop(other.row(*PATH))
        assert await other.fetch(*PATH) == (3, MissReason.NONE)
        assert await other.fetch(*PATH) == (3, MissReason.NONE)
        world.switches.turn_off()
        await asyncio.sleep(6.0)
        stats = other.controller.stats()
        assert (stats.used_bytes, stats.loading_bytes) == (3 * other.layout.total_bytes, 0)
        assert await other.fetch(*PATH) == (3, MissReason.NONE)

    world.run(scenario)


def test_a_load_that_hangs_keeps_nobody_from_a_slower_tier(tmp_path: Path) -> None:
    engine = EngineSettings(engine=str(tmp_path), switches=tmp_path / "switches")
    objects = ObjectSettings(directory=tmp_path / "objects")
    makers = [lambda: EngineTier(engine), lambda: ObjectTier(objects, InlineWorkers())]
    one, other = (Node(*makers) for _ in range(2))

    async def scenario() -> None:
        await one.give(*PATH)
        assert tiers_of(await other.lookup(*PATH)) == [(Tier.REDIS, 3)]
        other.shared[0].switches.turn_on(Switch.STALLED)
        assert await other.fetch(*PATH) == (0, MissReason.UNAVAILABLE)
        await asyncio.sleep(5.0)
        assert await other.fetch(*PATH) == (3, MissReason.NONE)
        other.shared[0].switches.turn_off()
        await asyncio.sleep(1.0)
        assert other.controller.stats().loading_bytes == 0

    run([one, other], scenario)


def test_a_load_that_ends_while_a_store_is_in_flight_leaves_it_alone(world: World) -> None:
    async def scenario() -> None:
        await world.one.give(1)
        other = world.other
        assert (await other.lookup(1)).hit_count == 1
        world.switches.turn_on(Switch.STALLED)
        coming = asyncio.ensure_future(other.fetch(1))
        await asyncio.sleep(0.1)
        result = await other.reserve(other.session, 1)
        fills = other.stage(other.session, result, 1)
        world.switches.turn_off()
        await coming
        done = await other.controller.commit(other.session, result.reservation_id, fills)
        assert done.states == (StoreState.COMMITTED,)
        assert await other.fetch(1) == (1, MissReason.NONE)

    world.run(scenario)


def test_a_fetch_that_is_cancelled_leaves_nothing(world: World) -> None:
    async def scenario() -> None:
        await world.one.give(*PATH)
        other = world.other
        world.switches.turn_on(Switch.STALLED)
        asked = asyncio.ensure_future(other.controller.fetch_wide(other.session, other.query(*PATH)))
        await asyncio.sleep(LOOKUP_S / 2)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        other.is_empty()
        world.switches.turn_off()
        assert await other.fetch(*PATH) == (3, MissReason.NONE)

    world.run(scenario)


def test_no_room_in_memory_is_a_shorter_prefix(tmp_path: Path) -> None:
    world = World(tmp_path)
    small = Node(lambda: EngineTier(world.settings), arena_chunks=2)

    async def scenario() -> None:
        await world.one.give(*PATH)
        assert await small.fetch(*PATH) == (2, MissReason.OVERLOADED)
        assert not small.ghosts()

    run([world.one, world.other, small], scenario)


def test_partial_chunks_stay_on_their_node(world: World) -> None:
    """They are of little use to others."""

    async def scenario() -> None:
        one = world.one
        await one.give(1)
        target = one.controller.parts.movement.shared_writes[0].target
        (row,) = one.mapped.rows()
        assert (target.has(row), target.admits(row)) == (True, True)
        one.controller.parts.catalog.table.token_counts[row] = 4
        assert not target.admits(row)

    world.run(scenario)


class ValueNode(ValueService):
    """A node whose values an engine could have, too."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__()
        self._settings = settings

    async def attach(self) -> None:
        await super().attach()
        self.controller.attach_shared(EngineTier(self._settings), LOOKUP_S)


def test_values_that_may_be_replaced_stay_on_their_node(world: World) -> None:
    """Another node would find the old one."""
    node = ValueNode(world.settings)

    async def scenario() -> None:
        assert await node.put(7) is Durability.LOCAL
        await asyncio.sleep(1.0)
        assert not world.engine.values
        world.switches.turn_on(Switch.LYING)
        absent = await node.controller.fetch_wide(node.session, node.of_key("another"))
        counters = node.controller.stats().counters
        assert (absent.hit_count, counters["redis_asked_chunks"]) == (0, 0)

    node.run(scenario)


def test_a_chunk_that_the_chain_lost_meanwhile_is_not_entered_alone(world: World) -> None:
    """Its first chunk fails its check: what follows would hang on nothing."""

    async def scenario() -> None:
        await world.one.give(*PATH)
        spoil(world.engine, world.one, 1)
        assert await world.other.fetch(*PATH) == (0, MissReason.CORRUPT)
        world.other.is_empty()

    world.run(scenario)


def test_clients_see_that_what_is_not_here_may_be_elsewhere(world: World) -> None:
    """What left is no miss: they call."""

    async def scenario() -> None:
        one = world.one
        await one.give(1)
        presence = one.controller.parts.catalog.presence
        words = presence.mapping.bytes.view(np.uint64)
        assert int(words[0]) & PARTIAL
        one.controller.parts.movement.remove(next(one.mapped.rows()), MissReason.EVICTED)
        assert not (presence.known() & np.uint64(STATE_MASK)).any()

    world.run(scenario)


def test_what_the_node_stored_meanwhile_is_not_taken_for_what_was_read(world: World) -> None:
    """A chunk that was stored, and went to the device alone, while it was on its way in from elsewhere: two writes of
    the same bytes, of which the node knows its own."""

    async def scenario() -> None:
        await world.one.give(1)
        other = world.other
        assert (await other.lookup(1)).hit_count == 1
        world.switches.turn_on(Switch.STALLED)
        coming = asyncio.ensure_future(other.fetch(1))
        await asyncio.sleep(0.1)
        await other.keep(1)
        (row,) = other.mapped.rows()
        other.drop(row)
        world.switches.turn_off()
        await coming
        await asyncio.sleep(6.0)
        assert row not in other.mapped, "it was read under another write"
        assert await other.fetch(1) == (1, MissReason.NONE)

    world.run(scenario)


def test_an_engine_that_stalls_is_not_asked_on(world: World) -> None:
    async def scenario() -> None:
        await world.one.give(1)
        other = world.other
        assert (await other.lookup(1)).hit_count == 1
        world.switches.turn_on(Switch.STALLED)
        assert await other.fetch(1) == (0, MissReason.UNAVAILABLE)
        asked = other.controller.stats().counters["redis_asked_chunks"]
        assert (await other.lookup(2)).hit_count == 0
        assert other.controller.stats().counters["redis_asked_chunks"] == asked
        assert "failing" in [each.state for each in other.controller.parts.movement.statistics()]

    world.run(scenario)


def test_a_row_that_is_used_again_has_no_hints(world: World) -> None:
    async def scenario() -> None:
        one = world.one
        await one.give(1)
        (row,) = one.mapped.rows()
        one.controller.parts.movement.remove(row, MissReason.EVICTED)
        await one.give(2)
        assert one.mapped.rows().__next__() == row
        assert await world.other.fetch(2) == (1, MissReason.NONE)

    world.run(scenario)
