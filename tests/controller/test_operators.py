"""What operators are told, on simulated parts: large catalogs, several parts of a chunk, and whose turn it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.controller.operators import ChangeNews, ListPage, Operators, Selection
from kvstore.controller.operators.selection import BLOCK_ROWS, NAMED_COUNT_MAX
from kvstore.controller.operators.turns import REST, STEP_S, Turns
from kvstore.errors import InvalidRequest
from kvstore.movement import Fate, Meant
from kvstore.spec import MissReason
from tests.controller.service import Service
from tests.simulated import ManualClock
from tests.specs import small_spec


async def listed(operators: Operators, limit: int = 1 << 20, **wanted: Any) -> tuple[list[bytes], int]:
    """The digests that a listing tells, and the count of its totals."""
    pages: list[ListPage] = [page async for page in operators.chunks(Selection(**wanted), limit)]
    assert [page.is_last for page in pages] == [False] * (len(pages) - 1) + [True]
    told = [chunk.digest for page in pages for chunk in page.chunks]
    return told, sum(total.chunk_count for total in pages[-1].totals)


class Held:
    """A service with some chains in memory."""

    def __init__(self, *paths: tuple[int, ...], **options: Any) -> None:
        self.service = Service(**options)
        self.operators = Operators(self.service.parts, self.service.controller)
        self._paths = paths

    async def __aenter__(self) -> Held:
        session = self.service.controller.open_session()
        for path in self._paths:
            await self.service.store(session, *path)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.service.controller.close_sessions()


async def pause() -> None:
    """Nothing happens meanwhile."""


def meant_rows(service: Service, *rows: int) -> Meant:
    """These rows, as they are now."""
    table = service.parts.catalog.table
    spaces = np.array([table.identity(row)[0] for row in rows], np.int64)
    return Meant(np.array(rows, np.int64), spaces, [table.digests[row] for row in rows])


async def test_a_catalog_of_several_blocks_is_told_whole() -> None:
    """Chunks lie at both ends of each block, with rows between them that no tier has."""
    async with Held((1, 2), chunks=8) as held:
        table, space = held.service.parts.catalog.table, held.service.parts.catalog.spaces.numbered[0]
        for _ in range(2 * BLOCK_ROWS):
            table.add(space.number, b"", -1, 16)
        await held.service.store(held.service.controller.open_session(), 3, 4)
        assert len(table.digests) > 2 * BLOCK_ROWS
        digests = {*held.service.query(1, 2).digests, *held.service.query(3, 4).digests}
        told, count = await listed(held.operators)
        assert (set(told), len(told), count) == (digests, 4, 4)
        assert await listed(held.operators, limit=3) == (told[:3], 4)


async def test_what_was_here_before_the_start_is_as_old_as_the_service_is_up() -> None:
    async with Held((1, 2), chunks=4) as held:
        table, clock = held.service.parts.catalog.table, held.service.clock
        clock.advance(50)
        (row,) = [row for row in table.rows() if table.child_counts[row]]
        table.stored_s[row] = 0  # as a start finds it
        assert await listed(held.operators, older_than_s=40) == (held.service.query(1, 2).digests, 2)
        clock.advance(1000)
        await held.service.store(held.service.controller.open_session(), 9)
        assert (await listed(held.operators, older_than_s=1000))[1] == 2
        assert (await listed(held.operators, older_than_s=1100))[1] == 0


async def test_an_ambiguous_beginning_names_some_and_shows_none() -> None:
    async with Held(*((number,) for number in range(600)), chunks=600) as held:
        digests = sorted(held.service.query(number).digests[0].hex() for number in range(600))
        begins = next(one[:2] for one, other in zip(digests, digests[1:], strict=False) if one[:2] == other[:2])
        with pytest.raises(InvalidRequest, match="4 digits"):
            await held.operators.chunk(begins, None)
        table = held.service.parts.catalog.table
        for row in list(table.rows())[:2]:  # two that begin alike, as no hash will find
            space = held.service.parts.catalog.space_of(row)
            del space.index[table.digests[row]]
            table.digests[row] = b"\xab" * 8 + table.digests[row][8:]
            space.index[table.digests[row]] = row
        with pytest.raises(InvalidRequest, match="several chunks begin so"):
            await held.operators.chunk("ab" * 8, None)
        shown = await held.operators.chunk(table.digests[0].hex()[:20], None)
        assert [part.chunk.digest for part in shown.parts] == [table.digests[0]]


@pytest.mark.parametrize("count", [1, 2])
async def test_rows_of_chunks_that_went_hide_none_that_begins_alike(count: int) -> None:
    """A large catalog has many of them for four digits."""
    async with Held((1,), chunks=4) as held:
        table, catalog = held.service.parts.catalog.table, held.service.parts.catalog
        space = catalog.spaces.numbered[0]
        for number in range(NAMED_COUNT_MAX + 1):
            table.add(space.number, b"\xab\xcd" + bytes([number]) * 30, -1, 16)
        for _ in range(BLOCK_ROWS):
            table.add(space.number, b"", -1, 16)
        for number in range(2, 2 + count):
            await held.service.store(held.service.controller.open_session(), number)
            (row,) = [row for row in table.rows() if table.digests[row] == held.service.query(number).digests[0]]
            del space.index[table.digests[row]]
            table.digests[row] = b"\xab\xcd" + table.digests[row][2:]
            space.index[table.digests[row]] = row
        if count > 1:
            with pytest.raises(InvalidRequest, match="several chunks begin so"):
                await held.operators.chunk("abcd", None)
        else:
            shown = await held.operators.chunk("abcd", None)
            assert [part.chunk.digest for part in shown.parts] == [table.digests[row]]


async def test_a_chunk_that_went_is_told_with_the_reason() -> None:
    async with Held((1,), (2,), (3,), chunks=2) as held:
        shown = await held.operators.chunk(held.service.query(1).digests[0].hex(), None)
        assert shown.parts == ()
        assert shown.reason is MissReason.EVICTED


async def test_looking_at_a_chunk_holds_it_no_longer_than_that() -> None:
    async with Held((1, 2), chunks=4) as held:
        table = held.service.parts.catalog.table
        shown = await held.operators.chunk(held.service.query(1).digests[0].hex(), None)
        assert shown.parts[0].hold_count == 0
        assert shown.parts[0].children == (held.service.query(1, 2).digests[1],)
        assert not any(table.is_held(row) for row in table.rows())


async def test_a_model_is_named_by_one_name_only() -> None:
    async with Held((1,), chunks=4) as held:
        controller = held.service.controller
        controller.register_model(small_spec(model_id="org/one"))
        controller.register_model(small_spec(model_id="org/one", weights_digest="ef" * 32))
        with pytest.raises(InvalidRequest, match="several models"):
            await listed(held.operators, model="one")
        with pytest.raises(InvalidRequest, match="several models"):
            await listed(held.operators, model="org/one")
        assert (await listed(held.operators, model=held.service.model.hex()[:12]))[1] == 1
        assert (await listed(held.operators, model="test"))[1] == 1


# ---------------------------------------------------------------- what they change


async def words_of(changes: AsyncIterator[ChangeNews]) -> dict[str, int]:
    """What became of everything."""
    return [news async for news in changes][-1].tally.counts


CHAINS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=6)


@given(CHAINS, st.lists(st.integers(0, 20), max_size=3), st.lists(st.integers(0, 20), min_size=1, max_size=4))
def test_an_eviction_leaves_nothing_that_cannot_be_found_and_takes_nothing_that_is_held(
    paths: list[list[int]], held: list[int], evicted: list[int]
) -> None:
    async def check() -> None:
        async with Held(*map(tuple, paths), chunks=40) as that:
            service, operators = that.service, that.operators
            table, controller = service.parts.catalog.table, service.controller
            for number in held:
                controller.lookups.lookup(service.query(*paths[number % len(paths)]), readers=1)
            holding = [row for row in table.rows() if table.is_held(row)]
            there = sorted(digest for digest in table.digests if digest)
            chain = tuple(there[number % len(there)] for number in evicted)
            before = list(table.digests)
            said = await words_of(operators.evict(Selection(chain=chain), dry_run=True))
            assert table.digests == before
            assert await words_of(operators.evict(Selection(chain=chain), dry_run=False)) == said
            assert all(table.is_resident(row) for row in holding)
            for row in table.rows():
                assert table.is_resident(row)
                assert table.parents[row] == -1 or table.is_resident(table.parents[row])
            gone = said.get("removed", 0) + said.get("removed with what it hung on", 0)
            assert len(list(table.rows())) == len(there) - gone
            assert said.get("removed", 0) or holding

    asyncio.run(check())


async def test_what_is_held_after_the_plan_was_made_stays_with_its_chain() -> None:
    async with Held((1, 2, 3), (1, 2, 4), chunks=8) as held:
        service, parts = held.service, held.service.parts
        clearing, table = parts.movement.clearing, parts.catalog.table

        rows = list(table.rows())
        plan = await clearing.plan(meant_rows(service, *rows), None, pause)
        assert {Fate(fate) for fate in plan.fates} == {Fate.REMOVED}
        service.controller.lookups.lookup(service.query(1, 2, 3), readers=1)
        session = service.controller.open_session()
        assert [clearing.do(plan, place)[0] for place in range(len(plan))].count(Fate.HELD) == 3
        assert service.check(session, 1, 2, 3) == 3
        assert service.check(session, 1, 2, 4) == 2


async def test_a_chunk_that_came_under_one_after_the_plan_keeps_it() -> None:
    async with Held((1,), chunks=8) as held:
        service = held.service
        clearing = service.parts.movement.clearing

        plan = await clearing.plan(meant_rows(service, 0), None, pause)
        session = service.controller.open_session()
        await service.store(session, 1, 2)
        assert clearing.do(plan, 0) == (Fate.KEPT, False)
        assert service.check(session, 1, 2) == 2


async def test_a_row_that_is_another_chunks_by_now_is_left_alone() -> None:
    async with Held((1,), chunks=8) as held:
        service, table = held.service, held.service.parts.catalog.table

        plan = await service.parts.movement.clearing.plan(meant_rows(service, 0), None, pause)
        service.parts.movement.removal.remove(0, MissReason.EVICTED)
        session = service.controller.open_session()
        await service.store(session, 2)
        assert table.digests[0] == service.query(2).digests[0]
        assert service.parts.movement.clearing.do(plan, 0) == (Fate.GONE, False)
        assert service.check(session, 2) == 1


async def test_pins_hold_what_they_hang_on_and_are_counted_once() -> None:
    async with Held((1, 2, 3), (1, 2, 4), chunks=8) as held:
        service, table, pins = held.service, held.service.parts.catalog.table, held.service.parts.pins
        size = service.layout.total_bytes
        rows = {digest: row for row, digest in enumerate(table.digests)}
        first, other = (rows[service.query(*path).digests[2]] for path in ((1, 2, 3), (1, 2, 4)))
        pins.pin(first, 0)
        assert pins.byte_count == 3 * size
        pins.pin(other, 10)
        assert pins.byte_count == 4 * size
        assert pins.unpin(first)
        assert not pins.unpin(first)
        assert pins.byte_count == 3 * size
        service.clock.advance(11)
        pins.expire()
        assert (pins.byte_count, len(pins)) == (0, 0)
        assert not table.held()


async def test_a_pinned_chunk_is_not_evicted_for_room() -> None:
    async with Held((1, 2), chunks=4) as held:
        service = held.service
        assert await words_of(held.operators.pin(Selection(), 0, dry_run=False)) == {"pinned": 2}
        session = service.controller.open_session()
        for number in range(5, 10):
            await service.store(session, number)
        assert service.check(session, 1, 2) == 2


async def test_one_step_a_round_however_many_ask() -> None:
    """Ten questions at once: in each round of the loop one has a step, in the order in which they came."""
    clock = ManualClock()
    turns, steps, rounds = Turns(clock), [], 0

    async def question(number: int) -> None:
        turn = turns.begin()
        for _ in range(3):
            await turn.next()
            steps.append((rounds, number))

    async def count() -> None:
        nonlocal rounds
        while len(steps) < 30:
            rounds += 1
            await asyncio.sleep(0)

    await asyncio.gather(*map(question, range(10)), count())
    assert len({at for at, _ in steps}) == len(steps)
    assert [number for _, number in steps] == list(range(10)) * 3


async def test_after_a_step_the_loop_is_left_to_others_for_longer() -> None:
    clock = ManualClock()
    turns = Turns(clock)
    one, other = turns.begin(), turns.begin()
    await one.next()
    clock.advance(0.001)
    one.end()
    clock.advance(5.0)  # what it waits for now is not its work
    before_s = clock.monotonic()
    await other.next()
    assert clock.monotonic() - before_s == pytest.approx(0.001 * REST)
    await other.next()
    assert clock.monotonic() - before_s == pytest.approx(0.001 * REST)


async def test_a_step_that_had_its_time_waits_for_another() -> None:
    clock = ManualClock()
    turn = Turns(clock).begin()
    await turn.next()
    others = 0

    async def other() -> None:
        nonlocal others
        others += 1

    tasks = [asyncio.get_running_loop().create_task(other())]
    await turn.between()
    assert others == 0  # it goes on
    clock.advance(STEP_S)
    await turn.between()
    assert others == 1
    await asyncio.gather(*tasks)
