"""Counts uses of chunks on this node for shared tiers: a chunk that comes back may be written to them, and an engine is
to keep the chunks that are in use."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from kvstore.catalog import USE_COUNT_MAX, ChunkTable
from kvstore.movement.levels import SharedWrites
from kvstore.movement.names import ChunkNames
from kvstore.movement.shared import REUSED, SharedCopies
from kvstore.seams import Clock
from kvstore.telemetry import Counters

TOUCH_INTERVAL_S = 1.0
TOUCH_AGAIN_S = 60.0
"""An engine is told of one chunk at most once in so many seconds."""
TOUCH_COUNT_MAX = 65_536
"""Chunks of which engines are told in that time; further chunks have to wait."""
TOUCHES_AT_ONCE = 1024
TOUCH_S_MAX = 5.0
"""Seconds that an engine may take to be told."""
_log = logging.getLogger("kvstore.movement")


class Uses:
    """Counts uses, and tells shared tiers of them. Tiers whose settings wait for a chunk's second use get the chunk
    then. Tiers that have a chunk are touched, in batches and in the background, because they would drop a chunk that is
    not read there."""

    def __init__(
        self, table: ChunkTable, names: ChunkNames, clock: Clock, counters: Counters, shared: Sequence[SharedWrites]
    ) -> None:
        self._table = table
        self._names = names
        self._clock = clock
        self._counters = counters
        self._shared = shared
        self._touched: set[int] = set()
        self._waiting: set[int] = set()
        self._since_s = clock.monotonic()

    def count(self, chain: Sequence[int]) -> None:
        """Count one use of these chunks by a store, a lookup or a fetch. Cost: nothing without shared tiers, else some
        50 ns a chunk."""
        if not self._shared:
            return
        if self._clock.monotonic() - self._since_s >= TOUCH_AGAIN_S:
            self._touched.clear()
            self._since_s = self._clock.monotonic()
        if len(self._touched) < TOUCH_COUNT_MAX:
            fresh = set(chain) - self._touched
            self._touched |= fresh
            self._waiting |= fresh
        uses = self._table.uses
        for row in chain:
            if uses[row] < USE_COUNT_MAX:
                uses[row] += 1
                if uses[row] == REUSED:
                    for shared in self._shared:
                        shared.writes.offer(row)

    async def run(self) -> None:
        """Tell engines which chunks were used, for ever."""
        while True:
            await self._clock.sleep(TOUCH_INTERVAL_S)
            waiting, self._waiting = sorted(self._waiting), set()
            async with asyncio.TaskGroup() as group:
                for shared in self._shared:
                    group.create_task(self._tell(shared.copies, waiting))

    async def _tell(self, shared: SharedCopies, rows: Sequence[int]) -> None:
        """Tell a tier which of its chunks were used. A tier that does not answer is told nothing until it does."""
        for start in range(0, len(rows), TOUCHES_AT_ONCE):
            part = [row for row in rows[start : start + TOUCHES_AT_ONCE] if row in shared and self._table.digests[row]]
            if not shared.is_asked:
                return
            if part:
                await self._touch(shared, [self._names.of(row).storage_key for row in part])
            await self._clock.sleep(0)

    async def _touch(self, shared: SharedCopies, keys: Sequence[bytes]) -> None:
        try:
            async with asyncio.timeout(TOUCH_S_MAX):
                await shared.tier.touch(keys)
        except Exception as error:  # noqa: BLE001 - the boundary: what an engine does to a hint is nobody's failure
            _log.warning("a tier was not told of uses", extra={"tier": shared.tier.name, "reason": repr(error)})
            shared.breaker.failed(repr(error))
            return
        self._counters.add_of(shared.tier.name, "touched_chunks", len(keys))
