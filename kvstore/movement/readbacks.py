"""Reads back chunks that memory gave up before a slower tier took them, so that they can be written from memory; then
memory gives them up again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from kvstore.catalog import Catalog, MappedCopies, RowIdentity
from kvstore.movement.loading import Loading
from kvstore.movement.loads import Loads
from kvstore.movement.removal import Removal
from kvstore.spec import MissReason
from kvstore.telemetry import Counters
from kvstore.tiers.pace import limit_s

READ_BACK_S_MAX = 30.0
"""A chunk that takes more seconds than this plus the time for its bytes (``limit_s``) to come back is written later."""


class ReadBacks:
    """Lends memory's room to chunks that are on their way from one slower tier to another."""

    def __init__(
        self, catalog: Catalog, memory: MappedCopies, loads: Loads, removal: Removal, counters: Counters
    ) -> None:
        self._table = catalog.table
        self._memory = memory
        self._loads = loads
        self._removal = removal
        self._counters = counters
        self._lent: dict[int, RowIdentity] = {}
        """Rows that came only for a move, and the chunk that each had then."""

    async def bring(self, row: int, *, is_urgent: bool) -> bool:
        """Bring a chunk, which the caller holds, into memory; ``give_back`` ends its stay. False where it does not come
        now. Unless it ``is_urgent``, chunks that no slower tier has do not make way for it."""
        if row in self._memory:
            return True
        is_for_readers = row in self._loads
        found, _ = self._loads.begin([row], frozenset([row]), evict_unwritten=is_urgent)
        loading = found[0] if found else None  # None: there is no room
        if loading is not None:
            if not is_for_readers:
                self._counters.add("read_back_chunks")
                self._lent[row] = self._table.identity(row)
            with suppress(TimeoutError):
                async with asyncio.timeout(limit_s(READ_BACK_S_MAX, loading.layout.total_bytes)):
                    await loading_ended(loading)
        return row in self._memory

    def used(self, chain: Sequence[int]) -> None:
        """Record that requests use these chunks: those that came for a move stay like any others."""
        if self._lent:
            for row in chain:
                self._lent.pop(row, None)

    def give_back(self, row: int) -> None:
        """Remove a chunk from memory that came only for a move, once it is not held. A chunk that has the row of such a
        one by now stays."""
        if row not in self._lent or self._table.is_held(row):
            return
        is_it = self._lent.pop(row) == self._table.identity(row)
        if is_it and row in self._memory and any(row in copies for copies in self._table.copies[1:]):
            self._removal.drop(self._memory, row, MissReason.EVICTED)


async def loading_ended(loading: Loading) -> None:
    """Wait until a chunk is in memory, or lost."""
    news = asyncio.Event()
    loading.listeners[news] = None
    try:
        while not (loading.is_done or loading.lost):
            news.clear()
            await news.wait()
    finally:
        del loading.listeners[news]
