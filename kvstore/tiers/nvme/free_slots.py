"""Makes room for chunks: in a new file; else where a chunk leaves; else in a file that takes the place of others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from kvstore.errors import Exhausted
from kvstore.seams import FaultPoints
from kvstore.spec import Encoding
from kvstore.tiers.contract import Evictor, Residency
from kvstore.tiers.nvme.erasures import Erasures
from kvstore.tiers.nvme.regions import Regions


class FreeSlots:
    """Hands out slots. ``run`` calls a blocking function on a byte mover. ``evictor`` says what may leave; without one
    nothing does."""

    def __init__(
        self, regions: Regions, erasures: Erasures, run: Callable[..., Awaitable[Any]], faults: FaultPoints
    ) -> None:
        self.evictor: Evictor | None = None
        self._regions = regions
        self._erasures = erasures
        self._run = run
        self._faults = faults
        self._growing = asyncio.Lock()
        self._sought_bytes = 0
        """The size of the slot that is being made free: who needs one like it waits, and does not take it from who
        frees it."""

    async def take(self, slot_bytes: int, encoding: Encoding, *, sealed: bool = False) -> Residency:
        """Return a free slot of that size. Raises Exhausted where no chunk may leave for it, or the file system is
        full; Unavailable."""
        while True:
            if self._sought_bytes != slot_bytes:
                residency = self._regions.take(slot_bytes, encoding, sealed=sealed)
                if residency is not None:
                    return residency
            async with self._growing:
                if not self._regions.free_count(slot_bytes):
                    self._sought_bytes = slot_bytes
                    try:
                        await self._find_room(slot_bytes)
                    finally:
                        self._sought_bytes = 0

    async def _find_room(self, slot_bytes: int) -> None:
        """Make a free slot: in a new file; else by evicting a chunk; else in a file that takes the place of others."""
        refusal = None
        if self._regions.has_budget(slot_bytes):
            try:
                await self._run(self._regions.create, slot_bytes)
                return
            except Exhausted as error:
                refusal = error
        if self._regions.could_hold(slot_bytes):
            is_evicted = self._evict(slot_bytes)
            await self._erasures.erase_doomed()
        else:
            is_evicted = True  # eviction would not help
        while not self._regions.free_count(slot_bytes):
            idle = self._regions.idle_region(slot_bytes)
            if idle is None and not is_evicted and self._empty_a_region(slot_bytes):
                await self._erasures.erase_doomed()
                idle = self._regions.idle_region(slot_bytes)
            if idle is None:
                raise refusal or self._regions.full()
            self._regions.retire(idle)
            self._faults.reach("nvme.region.retired")
            await self._run(self._regions.remove_file, idle)
            if self._regions.has_budget(slot_bytes):
                await self._run(self._regions.create, slot_bytes)

    def _evict(self, slot_bytes: int) -> bool:
        """Evict chunks until there is a slot of that size. Slots that are yet to be erased count."""
        if self.evictor is None:
            return False

        def helps(residency: Residency) -> bool:
            return self._regions.slot_bytes_at(residency) == slot_bytes

        def enough() -> bool:
            return self._regions.free_count(slot_bytes) > 0 or any(map(helps, self._erasures.doomed))

        return self.evictor.evict(helps, enough, among=self._regions.of_size(slot_bytes))

    def _empty_a_region(self, slot_bytes: int) -> bool:
        """Give up all chunks of one region, because all files are cut for other sizes: the one that holds the least, of
        those where no chunk is held and none is being written."""
        if self.evictor is None:
            return False
        doomed = set(self._erasures.doomed)
        return any(
            self.evictor.evict_all([each for each in region.used_slots() if each not in doomed])
            for region in self._regions.in_the_way(slot_bytes)
        )
