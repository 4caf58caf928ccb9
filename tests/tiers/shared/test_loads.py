"""Shared tiers in the service: what one node stored another one gets, right to the bit or not at all."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.presence import PARTIAL, STATE_MASK
from kvstore.spec import ChunkState, Durability, MissReason, Tier
from tests.fakes import EngineSettings, EngineTier, ObjectSettings, ObjectTier, Switch
from tests.fakes.engine import ENGINES
from tests.scenario import scenario
from tests.simulated import InlineWorkers
from tests.tiers.shared.world import PATH, Node, World, redeemed, run, spoil, tiers_of


@scenario()
async def test_what_one_node_stores_another_gets_and_keeps(world: World) -> None:
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


@scenario()
async def test_a_chain_goes_on_where_the_node_ends(world: World) -> None:
    await world.one.give(*PATH)
    await world.other.keep(1)
    found = await world.other.lookup(*PATH)
    assert tiers_of(found) == [(Tier.DRAM, 1), (Tier.REDIS, 2)]
    assert await world.other.fetch(*PATH) == (3, MissReason.NONE)


@scenario()
async def test_a_gap_in_what_the_node_has_is_filled(world: World) -> None:
    """A chunk in the middle went; what comes after it is here still."""
    one = world.one
    await one.give(*PATH)
    row = one.row(1, 2)
    one.controller.parts.movement.removal.remove(row, MissReason.CORRUPT)
    found = await one.lookup(*PATH)
    assert tiers_of(found) == [(Tier.DRAM, 1), (Tier.REDIS, 1), (Tier.DRAM, 1)]
    assert await one.fetch(*PATH) == (3, MissReason.NONE)
    assert not one.ghosts()


@scenario()
async def test_rows_that_cannot_be_had_leave_no_hold(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
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


@scenario()
async def test_what_left_the_node_comes_back(world: World) -> None:
    one = world.one
    await one.give(*PATH)
    for row in reversed([*one.mapped.rows()]):
        one.controller.parts.movement.removal.remove(row, MissReason.EVICTED)
    one.is_empty()
    assert await one.fetch(*PATH) == (3, MissReason.NONE)


@scenario()
async def test_what_was_nowhere_a_moment_ago_comes_back_once_it_was_stored(world: World) -> None:
    one = world.one
    assert (await one.lookup(*PATH)).hit_count == 0
    await one.give(*PATH)
    for row in reversed([*one.mapped.rows()]):
        one.controller.parts.movement.removal.remove(row, MissReason.EVICTED)
    assert await one.fetch(*PATH) == (3, MissReason.NONE)


@scenario()
async def test_a_ticket_brings_what_was_found(world: World) -> None:
    await world.one.give(*PATH)
    await world.other.keep(1)
    found = await world.other.lookup(*PATH, readers=1)
    assert await redeemed(world.other, found.ticket) == 3


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


def test_no_room_in_memory_is_a_shorter_prefix(tmp_path: Path) -> None:
    world = World(tmp_path)
    small = Node(lambda: EngineTier(world.settings), arena_chunks=2)

    async def scenario() -> None:
        await world.one.give(*PATH)
        assert await small.fetch(*PATH) == (2, MissReason.OVERLOADED)
        assert not small.ghosts()

    run([world.one, world.other, small], scenario)


@scenario()
async def test_clients_see_that_what_is_not_here_may_be_elsewhere(world: World) -> None:
    """What left is no miss: they call."""
    one = world.one
    await one.give(1)
    presence = one.controller.parts.catalog.presence
    words = presence.mapping.bytes.view(np.uint64)
    assert int(words[0]) & PARTIAL
    one.controller.parts.movement.removal.remove(next(one.mapped.rows()), MissReason.EVICTED)
    assert not (presence.known() & np.uint64(STATE_MASK)).any()
