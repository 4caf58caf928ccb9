"""Moves out of memory: every chunk that is stored is written to the slower tiers, as their settings want it. ``settle``
waits for them and says what was reached."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from kvstore.arena import Placement
from kvstore.catalog import Catalog, MappedCopies
from kvstore.chunk import parse_header
from kvstore.errors import DataLoss, KVStoreError
from kvstore.movement.names import ChunkNames
from kvstore.movement.queue import MoveQueue, Priority
from kvstore.movement.removal import Removal
from kvstore.movement.targets import Target
from kvstore.seams import Clock, FaultPoints
from kvstore.spec import Durability
from kvstore.telemetry import Counters

LANE_COUNT = 8
"""Chunks on their way to a tier at once: enough to keep a device busy and to share its syncs."""
RETRY_S = 10.0
LEFT_BY_A_CRASH = "a crash left it, and it was not stored again since"
_log = logging.getLogger("kvstore.movement")


class Writes:
    """The chunks that one slower tier is to have, by priority and then by age."""

    def __init__(
        self, catalog: Catalog, memory: MappedCopies, target: Target, names: ChunkNames, removal: Removal, clock: Clock,
        faults: FaultPoints, counters: Counters,
    ) -> None:  # fmt: skip
        self.target = target
        self._catalog = catalog
        self._memory = memory
        self._names = names
        self._removal = removal
        self._clock = clock
        self._faults = faults
        self._counters = counters
        self._queue = MoveQueue(lambda row: int(catalog.worth(row)[0]))
        self._parked: dict[int, None] = {}
        self._waiters: dict[int, set[asyncio.Future[None]]] = {}
        self._progress = asyncio.Event()
        self._retry_at_s = 0.0
        self._lacks_some = False
        self.reason = ""
        """Why the tier lacks chunks; empty while it takes them."""

    @property
    def backlog_count(self) -> int:
        """Chunks that wait for the tier or are on their way to it."""
        return len(self._queue)

    @property
    def is_moving(self) -> bool:
        """Whether waiting for it makes room in memory sooner or later."""
        return len(self._queue) > 0 and not self.reason

    def add(self, row: int, priority: Priority = Priority.STANDARD) -> None:
        """A chunk was stored, or the tier lost its copy. One that finds the queue full is found again by ``retry``."""
        if not self.target.has(row) and self.target.admits(row) and not self._queue.add(row, priority):
            self._lacks_some = True

    async def run(self) -> None:
        """Write for ever."""
        async with asyncio.TaskGroup() as group:
            for _ in range(LANE_COUNT):
                group.create_task(self._lane())

    async def _lane(self) -> None:
        while True:
            row = await self._queue.take()
            try:
                if self._is_wanted(row):
                    self._catalog.table.hold(row)
                    try:
                        await self._write(row)
                    finally:
                        self._catalog.unhold(row)
            finally:
                self._queue.done(row)
                if row not in self._parked and self._is_wanted(row):
                    self.add(row)  # it was stored anew meanwhile
                self._settled(row)

    def _is_wanted(self, row: int) -> bool:
        """Whether memory has a chunk that the tier lacks. It may have gone while it waited."""
        return row in self._memory and not self.target.has(row) and self._catalog.is_visible(row)

    async def _write(self, row: int) -> None:
        placement = self._memory.placement(row)
        residency = self._memory.residency(row)
        try:
            await self._write_held(row, placement)
            if self.reason:
                _log.info("the tier takes chunks again", extra={"tier": self.target.name})
                self.reason = ""
        except DataLoss:
            if self._memory.holds(row, placement):  # else it went, and was perhaps stored anew, meanwhile
                await self._removal.quarantine(self._memory, row, residency)
        except KVStoreError as error:
            self._park(row, error.message)
        except Exception:  # noqa: BLE001 - the boundary: a bug of ours keeps this chunk in memory, not the service down
            _log.exception("a chunk could not be written", extra={"tier": self.target.name})
            self._park(row, "an error in the service: see its log")

    async def _write_held(self, row: int, placement: Placement) -> None:
        layout = self._names.of(row).layout
        header = parse_header(placement.pieces[0], layout)
        residency = await self.target.write(header, layout, placement.pieces)
        self._faults.reach(f"{self.target.name}.acknowledge")
        if not self._memory.holds(row, placement) or self.target.has(row):
            self.target.discard(row, residency)
            return
        self.target.keep(row, residency)
        self._counters.add_of(self.target.name, "written_chunks")
        self._counters.add_of(self.target.name, "written_bytes", placement.byte_count)

    def _park(self, row: int, reason: str) -> None:
        """The tier did not take it: it stays what it is, in memory, and is tried again later."""
        self._counters.add_of(self.target.name, "refused_chunks")
        self._parked[row] = None
        self._retry_at_s = self._clock.monotonic() + RETRY_S
        if reason != self.reason:
            _log.error("a tier takes no chunks for now", extra={"tier": self.target.name, "reason": reason})
            self.reason = reason

    def retry(self) -> None:
        """Queue again what the tier refused, once it had some time, and what found the queue full."""
        if self._parked and self._clock.monotonic() >= self._retry_at_s:
            parked, self._parked = self._parked, {}
            for row in parked:
                if row in self._memory:
                    self.add(row)
        if self._lacks_some and not len(self._queue):
            self._lacks_some = False
            for row in self._memory.order():
                self.add(row, Priority.BATCH)

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
        """The level that all of these chunks have reached once the tier is through with them, at most ``timeout_s``
        seconds from now; why it is no higher; and whether the tier is through."""
        table = self._catalog.table
        digests = [table.digests[row] for row in rows]
        waiting: dict[asyncio.Future[None], int] = {}
        for row in rows:
            if row in self._memory and row not in self._parked:
                self.add(row, Priority.INTERACTIVE)  # also where the tier had to give up its copy meanwhile
            if row in self._queue:
                future = asyncio.get_running_loop().create_future()
                self._waiters.setdefault(row, set()).add(future)
                waiting[future] = row
        try:
            late = (await asyncio.wait(waiting, timeout=timeout_s))[1] if waiting else set()
        finally:
            self._gone(waiting)
        return *self._level(rows, digests), not late

    def _gone(self, waiting: Mapping[asyncio.Future[None], int]) -> None:
        """Nobody waits any more: a tier that stalls would keep these for ever."""
        for future, row in waiting.items():
            others = self._waiters.get(row)
            if others is not None:
                others.discard(future)
                if not others:
                    del self._waiters[row]

    def _level(self, rows: Sequence[int], digests: list[bytes]) -> tuple[Durability, str]:
        table = self._catalog.table
        level, reason = self.target.durability, ""
        for row, digest in zip(rows, digests, strict=True):
            if table.digests[row] != digest or not self._catalog.is_visible(row):
                return Durability.NONE, "evicted before it was written: raise arena.capacity_bytes"
            if not self.target.is_proven(row):
                missing = LEFT_BY_A_CRASH if self.target.has(row) else f"{self.target.name} has not taken it yet"
                level, reason = Durability.MEMORY, self.reason or missing
        return level, reason
