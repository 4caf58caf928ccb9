"""Memory to device. Every committed chunk is written as soon as the device takes it; whoever wants to know waits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from kvstore.arena import Placement
from kvstore.catalog import NOWHERE, Catalog
from kvstore.chunk import parse_header
from kvstore.errors import DataLoss, KVStoreError
from kvstore.movement.residency import Residency
from kvstore.seams import Clock, FaultPoints
from kvstore.spec import Durability
from kvstore.telemetry import Counters

LANE_COUNT = 8
"""Chunks on their way at once: enough to keep the device busy and to share its syncs."""
RETRY_S = 10.0
LEFT_BY_A_CRASH = "a crash left it, and it was not stored again since"
_log = logging.getLogger("kvstore.writeback")


class Writeback:
    """The chunks that memory alone holds, in the order they came."""

    def __init__(
        self, catalog: Catalog, residency: Residency, clock: Clock, faults: FaultPoints, counters: Counters
    ) -> None:
        self._catalog = catalog
        self._residency = residency
        self._clock = clock
        self._faults = faults
        self._counters = counters
        self._queue: dict[int, None] = {}
        self._writing: set[int] = set()
        self._parked: dict[int, None] = {}
        self._waiters: dict[int, list[asyncio.Future[None]]] = {}
        self._wake = asyncio.Event()
        self._progress = asyncio.Event()
        self._retry_at_s = 0.0
        self.reason = ""
        """Why chunks stay in memory only; empty while the device takes them."""

    @property
    def backlog(self) -> int:
        """Chunks that wait for the device or are on their way to it."""
        return len(self._queue) + len(self._writing)

    @property
    def is_moving(self) -> bool:
        """Whether waiting for it makes room sooner or later."""
        return self._residency.nvme is not None and self.backlog > 0 and not self.reason

    def add(self, row: int) -> None:
        """A chunk was committed, or lost its copy on the device."""
        if self._residency.nvme is not None and self._residency.table.residencies[row] == NOWHERE:
            self._queue[row] = None
            self._wake.set()

    async def run(self) -> None:
        """Write for ever."""
        async with asyncio.TaskGroup() as group:
            for _ in range(LANE_COUNT):
                group.create_task(self._lane())

    async def _lane(self) -> None:
        while True:
            while not self._queue:
                self._wake.clear()
                await self._wake.wait()
            row = next(iter(self._queue))
            del self._queue[row]
            if row not in self._writing:
                await self._write(row)

    async def _write(self, row: int) -> None:
        table = self._residency.table
        if row not in table.arena or table.residencies[row] != NOWHERE or not self._catalog.is_visible(row):
            self._settled(row)
            return
        table.hold(row)
        self._writing.add(row)
        placement = table.arena[row]
        try:
            await self._write_held(row, placement)
            if self.reason:
                _log.info("the device takes chunks again")
                self.reason = ""
        except DataLoss:
            if table.arena.get(row) is placement:  # else it went, and was perhaps stored anew, meanwhile
                self._residency.quarantine_arena(row)
        except KVStoreError as error:
            self._park(row, error.message)
        except Exception:  # noqa: BLE001 - the boundary: a bug of ours keeps this chunk in memory, not the service down
            _log.exception("write-back failed")
            self._park(row, "an error in the service: see its log")
        finally:
            self._writing.discard(row)
            if row in table.arena and row not in self._parked:
                self.add(row)  # it was stored anew meanwhile
            self._settled(row)
            self._catalog.unhold(row)

    async def _write_held(self, row: int, placement: Placement) -> None:
        nvme, table = self._residency.nvme, self._residency.table
        assert nvme is not None
        layout = self._residency.name(row).layout
        header = parse_header(placement.pieces[0], layout)
        residency = await nvme.write(header, layout, placement.pieces)
        self._faults.reach("nvme.acknowledge")
        if table.arena.get(row) is not placement or table.residencies[row] != NOWHERE:
            # It was removed or replaced meanwhile: what may be replaced must not be found in its slot later.
            nvme.forget(residency, erase=self._catalog.space_of(row).may_be_replaced)
            return
        table.residencies[row] = residency
        self._residency.was_written(row)
        self._counters.add("nvme_written_chunks")
        self._counters.add("nvme_written_bytes", placement.byte_count)

    def _park(self, row: int, reason: str) -> None:
        """The device did not take it: it stays what it is, in memory, and is tried again later."""
        self._counters.add("nvme_refused_chunks")
        self._parked[row] = None
        self._retry_at_s = self._clock.monotonic() + RETRY_S
        if reason != self.reason:
            _log.error("chunks stay in memory only", extra={"reason": reason})
            self.reason = reason

    def retry(self) -> None:
        """Queue again what the device refused, once it had some time."""
        if self._parked and self._clock.monotonic() >= self._retry_at_s:
            parked, self._parked = self._parked, {}
            for row in parked:
                if self._catalog.table.digests[row]:
                    self.add(row)

    def _settled(self, row: int) -> None:
        for waiter in self._waiters.pop(row, ()):
            if not waiter.done():
                waiter.set_result(None)
        self._progress.set()
        self._progress = asyncio.Event()

    # ------------------------------------------------------------ waiting

    async def progress(self, timeout_s: float) -> None:
        """Wait until some chunk is through, one way or the other, at most so long."""
        try:
            await asyncio.wait_for(self._progress.wait(), timeout_s)
        except TimeoutError:
            return

    async def settle(self, rows: Sequence[int], timeout_s: float) -> tuple[Durability, str, bool]:
        """The level that all of these chunks have reached once the device is through with them, at most ``timeout_s``
        seconds from now; why it is no higher; and whether the device is through."""
        if self._residency.nvme is None:
            return Durability.MEMORY, "no lower tier is configured", True
        table = self._catalog.table
        digests = [table.digests[row] for row in rows]
        futures: list[asyncio.Future[None]] = []
        for row in rows:
            if row in table.arena and row not in self._parked:
                self.add(row)  # where the device had to give up its copy meanwhile
            if row in self._queue or row in self._writing:
                future = asyncio.get_running_loop().create_future()
                self._waiters.setdefault(row, []).append(future)
                futures.append(future)
        late = (await asyncio.wait(futures, timeout=timeout_s))[1] if futures else set()
        return *self._level(rows, digests), not late

    def _level(self, rows: Sequence[int], digests: list[bytes]) -> tuple[Durability, str]:
        table = self._catalog.table
        level, reason = Durability.LOCAL, ""
        for row, digest in zip(rows, digests, strict=True):
            if table.digests[row] != digest or not self._catalog.is_visible(row):
                return Durability.NONE, "evicted before it was written: raise arena.capacity_bytes"
            if not table.is_proven(row):
                found = table.residencies[row] != NOWHERE
                missing = LEFT_BY_A_CRASH if found else "the device has not taken it yet"
                level, reason = Durability.MEMORY, self.reason or missing
        return level, reason
