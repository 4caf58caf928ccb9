"""What operators change while others use the same chunks: nothing goes that was not named, and nothing stays held."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvstore.controller.operators import Operators, Selection
from kvstore.controller.operators.changes import UNDONE_AT_ONCE
from kvstore.controller.operators.looks import LOOK_S_MAX, Looks
from kvstore.controller.operators.selection import Chosen
from kvstore.errors import Exhausted, InvalidRequest
from kvstore.movement import Fate
from kvstore.movement.clearing import ClearingPlan
from kvstore.spec import LayerSpec, MissReason
from kvstore.tiers import WritePolicy
from tests.controller.service import Service, soon
from tests.controller.test_operators import Held, meant_rows, pause, words_of
from tests.fakes import ObjectSettings, ObjectTier
from tests.scenario import scenario
from tests.simulated import InlineWorkers
from tests.specs import small_spec
from tests.tiers.service import DeviceService
from tests.tiers.shared.world import Node, run


def done(service: Service, plan: ClearingPlan) -> list[tuple[Fate, bool]]:
    """What becomes of everything now."""
    return [service.parts.movement.clearing.do(plan, place) for place in range(len(plan))]


@scenario(lambda: DeviceService())
async def test_a_word_about_memory_takes_nothing_that_the_device_acknowledged_meanwhile(service: DeviceService) -> None:
    await service.store(service.session, 1, 2)
    table = service.parts.catalog.table
    rows = list(table.rows())
    plan = await service.parts.movement.clearing.plan(meant_rows(service, *rows), table.copies[0], pause)
    assert [Fate(fate) for fate in plan.fates] == [Fate.REMOVED] * 2  # no other tier has them yet
    await service.settled(1, 2)
    assert done(service, plan) == [(Fate.COPY_REMOVED, False)] * 2
    assert await service.fetch(1, 2) == (2, MissReason.NONE)


@scenario(lambda: DeviceService())
async def test_what_hangs_on_a_chunk_that_another_tier_has_by_now_stays(service: DeviceService) -> None:
    await service.keep(1, 2)
    table, movement = service.parts.catalog.table, service.parts.movement
    (parent,) = [row for row in table.rows() if table.child_counts[row]]
    movement.removal.drop(table.copies[1], parent, MissReason.EVICTED)
    plan = await movement.clearing.plan(meant_rows(service, parent), table.copies[0], pause)
    assert [Fate(fate) for fate in plan.fates] == [Fate.WITH_PARENT, Fate.REMOVED]
    await service.settled(1, 2)
    assert parent in table.copies[1]
    assert done(service, plan) == [(Fate.SPARED, False), (Fate.COPY_REMOVED, False)]
    assert await service.fetch(1, 2) == (2, MissReason.NONE)


@pytest.mark.parametrize("change", ["evict", "pin", "verify", "move"])
async def test_a_row_that_becomes_another_chunks_while_others_are_picked_is_not_meant(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Held((1,), chunks=8) as held:
        service, operators = held.service, held.operators
        table, session = service.parts.catalog.table, service.controller.open_session()
        blocks, meant_digest = Chosen.blocks, service.query(1).digests[0].hex()

        async def slowly(self: Chosen, turn: Any) -> AsyncIterator[Any]:
            async for rows in blocks(self, turn):
                yield rows
            service.parts.movement.removal.remove(0, MissReason.EVICTED)
            await service.store(session, 2)

        monkeypatch.setattr(Chosen, "blocks", slowly)
        selection = Selection(digest=meant_digest)
        changes = {
            "evict": lambda: operators.evict(selection, dry_run=False),
            "pin": lambda: operators.pin(selection, 0, dry_run=False),
            "verify": lambda: operators.verify(selection, dry_run=False),
            "move": lambda: operators.move(selection, "memory", keep=False, dry_run=False),
        }
        words = await words_of(changes[change]())
        assert table.digests[0] == service.query(2).digests[0]
        assert words == ({} if change == "evict" else {"gone meanwhile": 1})
        assert service.check(session, 2) == 1
        assert not table.held()


async def test_the_pin_of_a_chunk_that_failed_its_check_can_be_ended() -> None:
    async with Held((1, 2), chunks=8) as held:
        service, operators = held.service, held.operators
        movement, pins = service.parts.movement, service.parts.pins
        assert await words_of(operators.pin(Selection(), 0, dry_run=False)) == {"pinned": 2}
        for row in list(service.parts.catalog.table.rows()):
            await movement.removal.quarantine(movement.memory, row, movement.memory.residency(row))
        assert service.check(service.controller.open_session(), 1, 2) == 0
        assert pins.byte_count
        with pytest.raises(InvalidRequest, match="no tier"):
            operators.unpin(Selection(tier="dram"), dry_run=False)
        assert await words_of(operators.unpin(Selection(), dry_run=True)) == {"unpinned": 2}
        digest = service.query(1, 2).digests[1].hex()
        assert await words_of(operators.unpin(Selection(digest=digest), dry_run=False)) == {"unpinned": 1}
        assert await words_of(operators.unpin(Selection(model="test"), dry_run=False)) == {"unpinned": 1}
        assert (pins.byte_count, len(pins)) == (0, 0)
        assert not service.parts.catalog.table.held()


async def test_a_pin_that_fails_half_way_leaves_earlier_ones_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Held((1,), (2,), (3,), chunks=8) as held:
        service, pins = held.service, held.service.parts.pins
        pins.pin(0, 0)
        pins.pin(1, 100)
        before = {row: pins.until_s(row) for row in range(3)}
        pin, count = pins.pin, iter(range(10))

        def full(row: int, seconds: float) -> None:
            if next(count) == 2:
                raise Exhausted("another operator pinned meanwhile")
            pin(row, seconds)

        monkeypatch.setattr(pins, "pin", full)
        with pytest.raises(Exhausted):
            await words_of(held.operators.pin(Selection(), 5, dry_run=False))
        assert {row: pins.until_s(row) for row in range(3)} == before
        service.clock.advance(50)
        pins.expire()
        assert len(pins) == 2


@pytest.mark.parametrize("count", [1, UNDONE_AT_ONCE + 1])
async def test_what_one_operator_pins_stays_when_another_one_gives_a_pin_of_it_up(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``count``: the chunks that the other one has pinned by then, this one among them."""
    monkeypatch.setattr("kvstore.controller.operators.turns.STEP_S", 0.0)
    chunks = count + 100
    async with Held(*((number,) for number in range(chunks)), chunks=chunks) as held:
        pins, digest = held.service.parts.pins, held.service.query(0).digests[0].hex()
        other = asyncio.ensure_future(words_of(held.operators.pin(Selection(), 0, dry_run=False)))
        await soon(lambda: len(pins) >= count)
        one = asyncio.ensure_future(words_of(held.operators.pin(Selection(digest=digest), 0, dry_run=False)))
        for _ in range(50):
            await asyncio.sleep(0)
        assert not other.done()
        other.cancel()
        assert await one == {"pinned": 1}
        for _ in range(10):
            await asyncio.sleep(0)
        assert pins.rows() == [0]


async def test_pins_that_are_set_anew_end_when_the_last_word_says() -> None:
    async with Held((1,), chunks=8) as held:
        clock, pins = held.service.clock, held.service.parts.pins
        for seconds in (5, 100, 20):
            pins.pin(0, seconds)
        clock.advance(10)
        pins.expire()
        assert 0 in pins
        clock.advance(11)
        pins.expire()
        assert 0 not in pins
        for _ in range(5000):
            pins.pin(0, 100)
        assert len(pins._ends) < 2000


async def test_a_command_that_is_cancelled_half_way_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 2 * UNDONE_AT_ONCE + 1
    async with Held(*((number,) for number in range(count)), chunks=count) as held:
        service, table = held.service, held.service.parts.catalog.table
        for row in range(3):
            service.parts.movement.removal.remove(row, MissReason.EVICTED)

        async def stands_still(*_: Any) -> None:
            await asyncio.Event().wait()

        relocation = service.parts.movement.relocation
        monkeypatch.setattr(relocation, "bring", stands_still)
        monkeypatch.setattr(relocation, "can_come", lambda row: row == count - 1)
        memory = service.parts.movement.memory
        monkeypatch.setattr(type(memory), "__contains__", lambda self, row: row != count - 1 and row >= 3)
        change = asyncio.ensure_future(words_of(held.operators.move(Selection(), "memory", keep=False, dry_run=False)))
        while not table.held():  # noqa: ASYNC110 - the loop is let run, not the clock
            await asyncio.sleep(0)
        change.cancel()
        with suppress(asyncio.CancelledError):
            await change
        for _ in range(10):
            await asyncio.sleep(0)
        assert not table.held()
        monkeypatch.undo()


def test_a_dry_run_of_a_prefetch_counts_no_use_and_sends_nothing(tmp_path: Path) -> None:
    """A tier that takes chunks at their second use takes none because somebody asked what a prefetch would do."""
    objects = ObjectSettings(directory=tmp_path / "objects")
    node = Node(lambda: ObjectTier(objects, InlineWorkers()), write={"s3": WritePolicy.REUSE})

    async def scenario() -> None:
        await node.keep(1, 2, 3)
        operators = Operators(node.parts, node.controller)
        row = node.row(1, 2, 3)
        table = node.parts.catalog.table
        node.parts.movement.removal.drop(node.parts.movement.memory, row, MissReason.EVICTED)
        before, counters = bytes(table.uses), node.parts.counters.snapshot()
        for _ in range(3):
            words = await words_of(operators.prefetch(node.session, node.query(1, 2, 3, 4), dry_run=True))
            assert words == {"in memory already": 2, "brought into memory": 1, "not stored": 1}
        await node.quiet()
        assert bytes(table.uses) == before
        changed = {name for name, count in node.parts.counters.snapshot().items() if count != counters[name]}
        assert changed == {"s3_asked_chunks"}
        real = operators.prefetch(node.session, node.query(1, 2, 3, 4), dry_run=False)
        assert await words_of(real) == words

    run([node], scenario)


async def test_a_dry_run_of_a_prefetch_needs_no_shared_tier() -> None:
    async with Held((1, 2), chunks=8) as held:
        session, query = held.service.controller.open_session(), held.service.query(1, 2, 3)
        for dry_run in (True, False):
            words = await words_of(held.operators.prefetch(session, query, dry_run=dry_run))
            assert words == {"in memory already": 2, "not stored": 1}, dry_run


async def test_what_is_brought_ahead_spared_no_engine_a_prefill() -> None:
    async with Held((1, 2), chunks=8) as held:
        service, query = held.service, held.service.query(1, 2)
        session = service.controller.open_session()
        assert await words_of(held.operators.prefetch(session, query, dry_run=False)) == {"in memory already": 2}
        assert service.parts.served.of(service.model).total.token_count == 0
        assert service.parts.heat.hottest(9) == []
        result = await service.controller.fetch_wide(session, query)
        service.controller.release(session, [result.lease_id])
        assert service.parts.served.of(service.model).total.fetch_count == 1
        assert [hot.heat for hot in service.parts.heat.hottest(9)] == [1.0]


async def test_of_a_model_whose_chunks_are_too_large_a_prefetch_finds_nothing() -> None:
    layers = (LayerSpec(kv_heads=1024, k_dim=1, v_dim=1),) * 1024
    async with Held((1,), chunks=8) as held:
        name = held.service.parts.catalog.register(small_spec(model_id="large", layers=layers)).fingerprint
        session = held.service.controller.open_session()
        query = held.service.query(1, 2)._replace(fingerprint=name)
        for dry_run in (True, False):
            words = await words_of(held.operators.prefetch(session, query, dry_run=dry_run))
            assert words == {"not stored": 2}, dry_run


@scenario(lambda: DeviceService(arena_chunks=8))
async def test_stored_chunks_that_a_prefetch_finds_no_room_for_are_not_called_missing(service: DeviceService) -> None:
    await service.keep(1, 2, 3, 4, 5, 6)
    service.arena_bytes //= 2
    await service.restart()
    operators, query = Operators(service.parts, service.controller), service.query(1, 2, 3, 4, 5, 6, 7)
    for dry_run in (True, False):
        words = await words_of(operators.prefetch(service.session, query, dry_run=dry_run))
        assert words == {"brought into memory": 4, "no room": 2, "not stored": 1}, dry_run


async def test_a_tier_is_not_given_up_for_the_time_that_others_took() -> None:
    """A verification reads the chunks of one tier for long, and then meets another tier's copy again."""
    async with Held((1,), chunks=8) as held:
        looks = Looks(held.service.parts.catalog, held.service.clock)

        async def gives() -> bool:
            return True

        async def gives_nothing() -> None:
            held.service.clock.advance(LOOK_S_MAX / 2)

        for look, found in [(gives, True), (gives_nothing, None), (gives, True)]:
            assert await looks.look("nvme", 0, look) is found
            held.service.clock.advance(LOOK_S_MAX + 1)
        for found in (None, None, None):
            assert await looks.look("nvme", 0, gives_nothing) is found
        assert await looks.look("nvme", 0, gives) is None, "it gave nothing for so long: it is asked no more"
