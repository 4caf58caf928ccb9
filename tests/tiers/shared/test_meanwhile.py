"""What changes while a chunk is on its way from another node."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvstore.movement.sources import STALL_S, LocalSource
from kvstore.movement.writes import LANE_COUNT
from kvstore.spec import MissReason, StoreState, Tier
from tests.fakes import EngineSettings, EngineTier, ObjectSettings, ObjectTier, Switch
from tests.scenario import scenario
from tests.simulated import InlineWorkers
from tests.specs import small_spec
from tests.tiers.shared.world import LOOKUP_S, PATH, Node, World, run, tiers_of


async def on_its_way(world: World) -> tuple[Node, asyncio.Future[tuple[int, MissReason]]]:
    """Return another node, and its fetch of the first node's chunk, from a tier that stands still."""
    await world.one.give(1)
    other = world.other
    assert (await other.lookup(1)).hit_count == 1
    world.switches.turn_on(Switch.STALLED)
    coming = asyncio.ensure_future(other.fetch(1))
    await asyncio.sleep(0.1)
    return other, coming


@scenario()
async def test_a_store_meanwhile_wins(world: World) -> None:
    """The same chunk is on its way in while somebody stores it."""
    other, coming = await on_its_way(world)
    done = await other.store(other.session, 1)
    assert done.states == (StoreState.COMMITTED,)
    world.switches.turn_off()
    await coming
    assert await other.fetch(1) == (1, MissReason.NONE)
    stats = other.controller.stats()
    assert stats.used_bytes == other.layout.total_bytes


@scenario()
async def test_a_load_that_hangs_keeps_nobody_from_what_is_here_by_now(world: World) -> None:
    """All three chunks hang; then they are stored, and one is on the device alone."""
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


@scenario()
async def test_a_load_that_ends_while_a_store_is_in_flight_leaves_it_alone(world: World) -> None:
    other, coming = await on_its_way(world)
    result = await other.reserve(other.session, 1)
    fills = other.stage(other.session, result, 1)
    world.switches.turn_off()
    await coming
    done = await other.controller.commit(other.session, result.reservation_id, fills)
    assert done.states == (StoreState.COMMITTED,)
    assert await other.fetch(1) == (1, MissReason.NONE)


@scenario()
async def test_a_fetch_that_is_cancelled_leaves_nothing(world: World) -> None:
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


@scenario()
async def test_what_the_node_stored_meanwhile_is_not_taken_for_what_was_read(world: World) -> None:
    """A chunk that was stored, and went to the device alone, while it was on its way in from elsewhere: two writes of
    the same bytes, of which the node knows its own."""
    other, coming = await on_its_way(world)
    await other.keep(1)
    (row,) = other.mapped.rows()
    other.drop(row)
    world.switches.turn_off()
    await coming
    await asyncio.sleep(6.0)
    assert row not in other.mapped, "it was read under another write"
    assert await other.fetch(1) == (1, MissReason.NONE)


@scenario()
async def test_a_load_that_hangs_on_the_device_keeps_nobody_from_a_shared_tier(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device answers nobody for half a minute. Later it gives its copy, too: once is enough."""
    node = world.one
    await node.give(*PATH)
    node.forget_memory()
    with monkeypatch.context() as slow:
        slow.setattr(node.nvme._readers._chance, "uniform", lambda *_: 30.0)  # type: ignore[attr-defined]  # a twin's
        hanging = asyncio.ensure_future(node.fetch(*PATH))
        await asyncio.sleep(STALL_S + 0.5)
    began_s = node.clock.monotonic()
    assert await node.fetch(*PATH) == (3, MissReason.NONE)
    assert node.clock.monotonic() - began_s < 1.0
    assert (await hanging)[1] is MissReason.UNAVAILABLE
    await asyncio.sleep(60.0)
    stats = node.controller.stats()
    assert (stats.used_bytes, stats.loading_bytes) == (3 * node.layout.total_bytes, 0)


@scenario()
async def test_a_load_that_goes_on_beside_a_long_sync_is_not_begun_elsewhere(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is stalled as a whole, and gives what was asked for. The shared tier gives nothing: who asked it anew
    would lose what is on its way."""
    node = world.one
    await node.give(*PATH)
    node.forget_memory()
    with monkeypatch.context() as slow:
        slow.setattr(node.nvme._readers._chance, "uniform", lambda *_: 1.0)  # type: ignore[attr-defined]  # a twin's
        first = asyncio.ensure_future(node.fetch(*PATH))
        await asyncio.sleep(1.5)
        slow.setattr(node.nvme, "stalled_s", lambda: STALL_S + 1.0)
        world.switches.turn_on(Switch.STALLED)
        assert await node.fetch(*PATH) == await first == (3, MissReason.NONE)


@scenario()
async def test_who_joins_many_loads_asks_once_whether_their_tier_hangs(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer costs a pass over all calls of the tier, of which a long load has thousands."""
    node, asked = world.one, list[LocalSource]()
    await node.give(*PATH)
    node.forget_memory()
    first = asyncio.ensure_future(node.fetch(*PATH))
    while not node.controller.stats().loading_bytes:  # noqa: ASYNC110 - virtual time
        await asyncio.sleep(0)
    monkeypatch.setattr(LocalSource, "is_stalled", property(asked.append))
    assert await node.fetch(*PATH) == await first == (3, MissReason.NONE)
    assert len(asked) == 1


async def read_back(node: Node, world: World) -> int:
    """Memory gave a chunk up before the engine took it; it is back in memory for that, and the engine stalls. Returns
    its row."""
    world.switches.turn_on(Switch.AWAY)
    await node.keep(1)
    await asyncio.sleep(1.0)
    row = node.row(1)
    node.drop(row)
    world.switches.turn_off()
    world.switches.turn_on(Switch.STALLED)
    while row not in node.mapped:  # noqa: ASYNC110 - virtual time
        await asyncio.sleep(0.01)
    return row


@scenario()
async def test_a_row_that_was_read_back_for_a_move_is_lent_for_that_chunk_alone(world: World) -> None:
    """A ticket holds the chunk when its move ends, so memory keeps it; then it leaves, and its row is another
    chunk's."""
    node = world.one
    row = await read_back(node, world)
    ticket = node.controller.lookups.lookup(node.query(1), readers=1).ticket
    world.switches.turn_off()
    await node.quiet()
    assert node.counters()["read_back_chunks"] == 1
    node.controller.release_ticket(ticket)
    node.controller.parts.movement.removal.remove(row, MissReason.EVICTED)
    await node.give(2)
    assert node.row(2) == row
    assert row in node.mapped, "nothing needed its room"


@scenario()
async def test_a_chunk_that_was_used_while_it_was_read_back_for_a_move_stays_in_memory(world: World) -> None:
    node = world.one
    row = await read_back(node, world)
    assert await node.fetch(1) == (1, MissReason.NONE)
    world.switches.turn_off()
    await node.quiet()
    assert node.key(1) in world.engine.values
    assert row in node.mapped, "its reader may come again"


@scenario()
async def test_a_chunk_that_a_reader_kept_when_its_move_ended_stays_when_it_is_moved_again(world: World) -> None:
    """Its engine lost it, and a store has it written there anew."""
    node = world.one
    row = await read_back(node, world)
    lease = node.controller.fetches.fetch(node.session, node.query(1)).lease_id
    world.switches.turn_off()
    await node.quiet()
    node.controller.release(node.session, [lease])
    world.engine.values.clear()
    node.controller.parts.movement.shared_tiers.tiers[0].take(row)
    node.controller.parts.movement.write_down(row)
    await node.quiet()
    assert node.key(1) in world.engine.values
    assert row in node.mapped


@scenario()
async def test_a_chunk_that_a_move_finds_on_its_way_to_a_reader_stays_in_memory(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = world.one
    world.switches.turn_on(Switch.AWAY)
    await node.keep(1)
    await asyncio.sleep(1.0)
    row = node.row(1)
    node.drop(row)
    world.switches.turn_off()
    with monkeypatch.context() as slow:
        slow.setattr(node.nvme._readers._chance, "uniform", lambda *_: 0.5)  # type: ignore[attr-defined]  # a twin's
        coming = asyncio.ensure_future(node.fetch(1))
        await asyncio.sleep(0.1)
        node.controller.parts.movement.shared[0].writes.demand(row)
        assert await coming == (1, MissReason.NONE)
    await node.quiet()
    assert node.key(1) in world.engine.values
    assert row in node.mapped
    assert node.counters()["read_back_chunks"] == 0


@scenario()
async def test_a_chunk_that_waits_and_is_gone_keeps_no_other_from_a_tier(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One question asks for several waiting chunks. One of them left, its model was forgotten, and the number of its
    namespace is a model's of shorter chunks."""
    node = world.one
    write, goes_on = node.shared[0].write, asyncio.Event()

    async def held(*arguments: Any) -> None:
        await goes_on.wait()
        await write(*arguments)

    monkeypatch.setattr(node.shared[0], "write", held)
    for number in range(LANE_COUNT):
        await node.keep(number)
    await node.keep(100)
    forgotten = node.of(small_spec(model_id="forgotten"))
    for number in (1, 2):
        await forgotten.keep(number)
    for row in [forgotten.row(number) for number in (1, 2)]:
        node.controller.parts.movement.removal.remove(row, MissReason.EVICTED)
    catalog = node.controller.parts.catalog
    monkeypatch.setattr(catalog.registered, "_count_max", len(catalog.models))
    shorter = node.of(small_spec(model_id="shorter", chunk_tokens=4))
    assert forgotten.model not in catalog.models
    with monkeypatch.context() as short:
        short.setattr("tests.controller.service.CHUNK", 4)
        await shorter.store(shorter.session, 1)
    goes_on.set()
    await node.quiet()
    assert node.key(100) in world.engine.values
    assert node.counters()["redis_refused_chunks"] == 0
