"""What shared tiers are told of uses on a node: in batches, rarely of one chunk, and without anybody waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.movement import uses
from kvstore.spec import MissReason
from tests.fakes import Switch
from tests.scenario import scenario
from tests.tiers.shared.world import PATH, Wide, World, run


def test_what_every_node_has_itself_stays_in_the_engine(tmp_path: Path) -> None:
    """A prompt's beginning that nobody reads there any more, among chunks that come and go."""
    wide = Wide(tmp_path, capacity_bytes=6 * 20_000)
    node, other = wide.node(s3="never", arena_chunks=64), wide.node(s3="never", arena_chunks=64)

    async def scenario() -> None:
        await node.give(*PATH)
        for token in range(10, 30):
            await asyncio.sleep(uses.TOUCH_AGAIN_S + 1.0)
            assert await node.fetch(*PATH) == (3, MissReason.NONE)
            await asyncio.sleep(2 * uses.TOUCH_INTERVAL_S)
            await other.give(token)
        assert all(wide.in_redis(node, *PATH))
        assert node.counters()["redis_touched_chunks"] > 0

    run([node, other], scenario)


@scenario()
async def test_an_engine_is_told_of_one_chunk_once_a_minute(world: World) -> None:
    node = world.one
    await node.give(*PATH)
    for _ in range(50):
        await node.lookup(*PATH)
        await node.fetch(*PATH)
        await asyncio.sleep(0.5)
    assert set(world.engine.touches) == {node.key(*PATH[:count]) for count in (1, 2, 3)}
    assert set(world.engine.touches.values()) == {1}
    await asyncio.sleep(uses.TOUCH_AGAIN_S)
    await node.lookup(*PATH)
    await asyncio.sleep(2 * uses.TOUCH_INTERVAL_S)
    assert set(world.engine.touches.values()) == {2}


def test_an_engine_is_told_only_of_what_it_is_said_to_have(tmp_path: Path) -> None:
    wide = Wide(tmp_path)
    node = wide.node(redis="never", s3="never")

    async def scenario() -> None:
        await node.give(*PATH)
        await node.fetch(*PATH)
        await asyncio.sleep(5.0)
        assert not wide.engine.touches

    run([node], scenario)


@scenario()
async def test_nobody_waits_for_an_engine_that_is_told(world: World) -> None:
    node, loop = world.one, asyncio.get_running_loop()
    told: list[int] = []

    async def touch(keys: Sequence[bytes]) -> None:
        told.append(len(keys))
        await asyncio.sleep(1e6)

    node.shared[0].touch = touch
    await node.give(*PATH)
    await asyncio.sleep(3.0)
    assert told == [3]
    began_s = loop.time()
    assert await node.fetch(*PATH) == (3, MissReason.NONE)
    await node.keep(9)
    assert loop.time() - began_s < 1.0
    world.switches.turn_on(Switch.AWAY)
    await asyncio.sleep(uses.TOUCH_AGAIN_S)
    await node.fetch(*PATH)
    await asyncio.sleep(3.0)
    assert await node.fetch(*PATH) == (3, MissReason.NONE)


def test_what_is_kept_of_uses_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uses, "TOUCH_COUNT_MAX", 2)

    async def scenario() -> None:
        node = world.one
        counted = node.controller.parts.movement.uses
        for token in range(1, 9):
            await node.keep(token)
        assert len(counted._touched) <= 3

    world.run(scenario)
