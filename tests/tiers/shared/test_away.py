"""Chunks that wait for a tier which is away: they cost little, and go once it is back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.chunk import ChunkHeader, ChunkLayout
from kvstore.errors import Exhausted, KVStoreError, PermissionDenied
from kvstore.movement.parked import RETRY_S
from kvstore.movement.refusals import TOLD_S
from kvstore.tiers import Buffer
from tests.fakes import EngineTier, Switch
from tests.scenario import scenario
from tests.tiers.shared.world import Node, World, run

COUNT = 1500
TURN_COUNT_MAX = 100_000
ALL = tuple(1 + number % 900 for number in range(COUNT))


@pytest.fixture
def roomy_world(tmp_path: Path) -> World:
    return World(tmp_path, capacity_bytes=64 << 20)


def roomy(world: World) -> Node:
    """A node with room for many chunks."""
    return Node(
        lambda: EngineTier(world.settings), arena_chunks=2 * COUNT, capacity_bytes=64 << 20, region_bytes=4 << 20
    )


@scenario(lambda roomy_world: roomy(roomy_world))
async def test_chunks_that_wait_for_a_tier_are_not_all_tried_while_it_is_away(node: Node, roomy_world: World) -> None:
    def refused() -> int:
        return node.controller.stats().counters["redis_refused_chunks"]

    roomy_world.switches.turn_on(Switch.AWAY)
    await node.keep(*ALL)
    await node.quiet()
    before = refused()
    assert before >= COUNT
    await asyncio.sleep(10 * RETRY_S)
    assert 5 <= refused() - before <= 15, "one is tried for all"
    roomy_world.switches.turn_off()
    await asyncio.sleep(RETRY_S + 5.0)
    await node.quiet()
    assert len(roomy_world.engine.values) == COUNT, "all of them went once it took one"


def test_a_tier_that_has_the_chunk_that_is_tried_is_back(roomy_world: World) -> None:
    """Another node wrote it meanwhile."""
    node, other = roomy(roomy_world), roomy_world.other

    async def scenario() -> None:
        roomy_world.switches.turn_on(Switch.AWAY)
        await node.keep(1, 2, 3, 4)
        await node.quiet()
        roomy_world.switches.turn_off()
        await other.give(1, 2)
        await asyncio.sleep(RETRY_S + 5.0)
        await node.quiet()
        assert len(roomy_world.engine.values) == 4

    run([node, other], scenario)


@scenario(lambda roomy_world: roomy(roomy_world))
async def test_others_are_answered_while_a_tier_refuses_thousands_of_chunks(node: Node, roomy_world: World) -> None:
    def refused() -> int:
        return node.controller.parts.counters.snapshot()["redis_refused_chunks"]

    roomy_world.switches.turn_on(Switch.AWAY)
    await node.keep(*range(901, 905))
    await node.quiet()
    assert not node.controller.parts.movement.shared_tiers.tiers[0].is_asked, "it refuses at once"
    most, seen, stop = 0, refused(), refused() + COUNT
    storing = asyncio.ensure_future(node.store(node.session, *ALL))
    for _ in range(TURN_COUNT_MAX):
        if seen >= stop:
            break
        await asyncio.sleep(0)
        now = refused()
        most, seen = max(most, now - seen), now
    await storing
    assert seen >= stop
    assert most <= COUNT // 2, "refused in one turn of the loop"


@pytest.mark.parametrize(
    "refusal", [PermissionDenied("the bucket does not take writes from this node"), Exhausted("full", is_full=True)]
)
def test_a_tier_that_takes_nothing_from_this_node_is_sent_one_chunk_for_all(
    roomy_world: World, refusal: KVStoreError
) -> None:
    """Each is sent whole before it is refused, and in a bucket each is billed. The right, or room, may be given
    later."""
    sent, may_write = 0, False

    class ReadOnly(EngineTier):
        async def write(self, header: ChunkHeader, layout: ChunkLayout, pieces: Sequence[Buffer]) -> None:
            nonlocal sent
            sent += 1
            if not may_write:
                raise refusal
            await super().write(header, layout, pieces)

    node = Node(lambda: ReadOnly(roomy_world.settings), arena_chunks=400, capacity_bytes=64 << 20, region_bytes=4 << 20)

    async def scenario() -> None:
        nonlocal sent, may_write
        await node.keep(*range(1, 101))
        await node.quiet()
        assert sent == 100, "each was new"
        sent = 0
        await asyncio.sleep(10 * RETRY_S)
        assert 5 <= sent <= 15, "one is sent for all"
        may_write = True
        await asyncio.sleep(RETRY_S + 5.0)
        await node.quiet()
        assert len(roomy_world.engine.values) == 100, "all of them went once it took one"

    run([node], scenario)


@pytest.mark.parametrize("bad_count", [1, 40])
def test_chunks_that_are_always_refused_hold_up_no_others(roomy_world: World, bad_count: int) -> None:
    """They were parked before those that an outage parks, and no chunk comes after these."""
    bad: set[bytes] = set()
    is_marking = True

    class Picky(EngineTier):
        async def write(self, header: ChunkHeader, layout: ChunkLayout, pieces: Sequence[Buffer]) -> None:
            if is_marking:
                bad.add(header.storage_key)
            if header.storage_key in bad:
                raise Exhausted("too large for this tier")
            await super().write(header, layout, pieces)

    node = Node(lambda: Picky(roomy_world.settings), arena_chunks=400, capacity_bytes=64 << 20, region_bytes=4 << 20)

    async def scenario() -> None:
        nonlocal is_marking
        await node.keep(*range(1, 1 + bad_count))
        await node.quiet()
        is_marking = False
        roomy_world.switches.turn_on(Switch.AWAY)
        await node.keep(500, 501, 502)
        await node.quiet()
        roomy_world.switches.turn_off()
        await asyncio.sleep(3 * RETRY_S)
        await node.quiet()
        assert len(roomy_world.engine.values) == 3

    run([node], scenario)


def test_an_engine_that_takes_some_and_refuses_others_is_told_once_in_a_while(
    roomy_world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """It drops chunks while they are written."""
    count = 0

    class Full(EngineTier):
        async def write(self, header: ChunkHeader, layout: ChunkLayout, pieces: Sequence[Buffer]) -> None:
            nonlocal count
            count += 1
            if count % 2:
                raise Exhausted("it drops chunks while they are written")
            await super().write(header, layout, pieces)

    node = Node(lambda: Full(roomy_world.settings), arena_chunks=400, capacity_bytes=64 << 20, region_bytes=4 << 20)

    def told() -> list[str]:
        return [each.message for each in caplog.records if "takes" in each.message]

    async def scenario() -> None:
        await node.keep(*range(1, 100))
        await node.quiet()
        assert told() == ["a tier takes no chunks for now", "the tier takes chunks again"]
        await asyncio.sleep(TOLD_S)
        await node.keep(*range(100, 200))
        await node.quiet()
        assert len(told()) == 4, "it still does"

    with caplog.at_level(logging.INFO):
        run([node], scenario)


def test_an_engine_that_goes_away_again_soon_is_told_in_the_end(
    roomy_world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """It came back for a moment, and the log must not end with that."""
    is_full = True

    class Full(EngineTier):
        async def write(self, header: ChunkHeader, layout: ChunkLayout, pieces: Sequence[Buffer]) -> None:
            if is_full:
                raise Exhausted("it has no room")
            await super().write(header, layout, pieces)

    node = Node(lambda: Full(roomy_world.settings), arena_chunks=400, capacity_bytes=64 << 20, region_bytes=4 << 20)

    def told() -> list[str]:
        return [each.message for each in caplog.records if "takes" in each.message]

    async def scenario() -> None:
        nonlocal is_full
        await node.keep(1)
        await node.quiet()
        is_full = False
        await node.keep(2)
        await node.quiet()
        is_full = True
        await node.keep(3)
        await node.quiet()
        assert told() == ["a tier takes no chunks for now", "the tier takes chunks again"]
        await asyncio.sleep(TOLD_S + 2 * RETRY_S)
        assert told()[2:] == ["a tier takes no chunks for now"], "once, and it is the last word"

    with caplog.at_level(logging.INFO):
        run([node], scenario)
