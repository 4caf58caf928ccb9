"""Watchers: in order, bounded, and what is lost is counted to the last event."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.catalog import NOWHERE, Watcher
from kvstore.errors import Exhausted
from kvstore.keys import ROOT_DIGEST
from kvstore.spec import EventKind, Exactness, MissReason, Tier
from tests.catalog.shelves import put, shelved_catalog
from tests.specs import small_spec


class Shelf:
    """A catalog whose chunks lie on a device that takes everything."""

    def __init__(self) -> None:
        self.catalog = shelved_catalog()
        self.events = self.catalog.spaces.events
        self.space = self.catalog.register(small_spec()).namespace(None, Exactness.EXACT)

    def store(self, number: int, parent: bytes = ROOT_DIGEST) -> int:
        row = self.catalog.row_of(self.space, bytes([number]) * 32, parent, 16)
        put(self.catalog, row, number)
        self.catalog.publish(row)
        return row

    def remove(self, row: int) -> None:
        put(self.catalog, row, NOWHERE)
        self.catalog.withdraw(row, MissReason.EVICTED, Tier.NVME)


async def test_a_watcher_is_told_what_came_moved_and_went() -> None:
    shelf = Shelf()
    shelf.store(9)
    watcher = shelf.events.watch(10, 10)
    row = shelf.store(1)
    shelf.store(2, parent=bytes([1]) * 32)
    shelf.catalog.moved(row, Tier.DRAM)
    shelf.remove(shelf.store(3))
    news = await watcher.take(10)
    assert news is not None
    assert [(each.sequence, each.kind, each.digest[0]) for each in news.events] == [
        (2, EventKind.STORED, 1), (3, EventKind.STORED, 2), (4, EventKind.MOVED, 1), (5, EventKind.STORED, 3),
        (6, EventKind.REMOVED, 3),
    ]  # fmt: skip
    assert news.events[0].parent == ROOT_DIGEST
    assert news.events[1].parent == bytes([1]) * 32
    assert (news.events[2].tier, news.events[4].tier) == (Tier.DRAM, Tier.NVME)
    assert news.events[4].reason is MissReason.EVICTED
    assert news.lost_count == 0


@given(steps=st.lists(st.integers(0, 6), max_size=40), most=st.integers(1, 5), batch=st.integers(1, 4))
def test_every_event_is_told_or_counted_in_its_place(steps: list[int], most: int, batch: int) -> None:
    """Stores and reads in any order: what was taken and what was lost add up without a hole."""

    async def run() -> None:
        shelf = Shelf()
        watcher = shelf.events.watch(most, 1)
        known = number = 0

        async def read() -> int:
            news = await watcher.take(batch)
            assert news is not None
            assert len(news.events) <= batch
            assert [each.sequence for each in news.events] == list(range(known + 1, known + 1 + len(news.events)))
            if news.lost_count:
                assert news.sequence == known + len(news.events) + news.lost_count
            return known + len(news.events) + news.lost_count

        for step in steps:
            if step:
                for _ in range(step):
                    number += 1
                    shelf.store(number)
            elif known < number:
                known = await read()
        while known < number:
            known = await read()
        assert shelf.events.sequence == number == known

    asyncio.run(run())


async def test_closing_wakes_who_waits_and_frees_the_place() -> None:
    shelf = Shelf()
    watcher = shelf.events.watch(10, 1)
    with pytest.raises(Exhausted, match=r"limits\.watcher_count_max"):
        shelf.events.watch(10, 1)
    waiting = asyncio.ensure_future(watcher.take(1))
    await asyncio.sleep(0)
    watcher.close()
    watcher.close()
    assert await asyncio.wait_for(waiting, 5) is None
    assert shelf.events.watchers == []
    shelf.store(1)
    assert isinstance(shelf.events.watch(10, 1), Watcher)
