"""One sync for all callers that wait for one.

A sync that failed is never retried into a success: the writes that it covered fail, and its region takes no more
writes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from kvstore.errors import Unavailable
from kvstore.seams import Disk, FaultPoints
from kvstore.seams.jobs import NotBegun
from kvstore.tiers.nvme.slots import RegionFile

_log = logging.getLogger("kvstore.nvme")


@dataclass(eq=False)
class _Batch:
    """Writes that one sync makes durable. ``synced``: the regions whose sync succeeded. ``refusal``: why no sync was
    begun."""

    regions: dict[int, RegionFile] = field(default_factory=dict)
    synced: set[int] = field(default_factory=set)
    is_done: bool = False
    refusal: NotBegun | None = None


class GroupSync:
    """``run`` calls a blocking function on one of the device's byte movers."""

    def __init__(self, disk: Disk, faults: FaultPoints, run: Callable[[Callable[[], None]], Awaitable[None]]) -> None:
        self._disk = disk
        self._faults = faults
        self._run = run
        self._batch = _Batch()
        self._syncing = asyncio.Lock()

    async def wait(self, region: RegionFile, failures: int) -> None:
        """Return when all bytes that were written to the region are durable. A caller that comes while a sync runs
        shares the next one. A sync that failed since the write began (``failures`` counts those before) may have
        dropped its bytes: no later sync makes up for that. Raises Unavailable; for all callers its subclass NotBegun
        where no byte mover took the sync, which says nothing of the device."""
        batch = self._batch
        batch.regions[region.number] = region
        async with self._syncing:
            if not batch.is_done:
                self._batch = _Batch()
                try:
                    await self._run(lambda: self._sync_all(batch))
                    self._faults.reach("nvme.synced")
                except NotBegun as error:
                    batch.refusal = error
                finally:
                    batch.is_done = True
        if batch.refusal is not None:
            raise NotBegun(batch.refusal.message) from batch.refusal
        if region.number not in batch.synced or region.sync_failures != failures:
            raise Unavailable("the NVMe device could not sync")

    def _sync_all(self, batch: _Batch) -> None:
        for number, region in batch.regions.items():
            if region.descriptor < 0:
                continue  # its callers gave up, and it was removed meanwhile
            try:
                self._disk.sync(region.descriptor)
                batch.synced.add(number)
            except OSError as error:
                region.sync_failures += 1
                region.is_read_only = True
                _log.error("a region file could not be synced", extra={"file": region.path.name, "reason": str(error)})
