"""Moves to slower tiers. Every stored chunk is written to them, as their settings say; a demanded chunk is written at
once. Chunks come from memory; a chunk that memory gave up before is read back for the write."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping
from itertools import count

from kvstore.arena import Placement
from kvstore.catalog import Catalog, MappedCopies, RowIdentity
from kvstore.errors import DataLoss, DeadlineExceeded, KVStoreError, PermissionDenied, Unavailable
from kvstore.movement.demands import Demands
from kvstore.movement.left import LeftChunks
from kvstore.movement.names import ChunkNames
from kvstore.movement.parked import ParkedChunks
from kvstore.movement.queue import MoveQueue, Priority, Waiting
from kvstore.movement.readbacks import ReadBacks
from kvstore.movement.refusals import RefusalLog
from kvstore.movement.removal import Removal
from kvstore.movement.targets import MoveTarget
from kvstore.seams import Clock, FaultPoints
from kvstore.spec import Durability
from kvstore.telemetry import Counters
from kvstore.tiers import IS_FULL, PART, Residency, UploadState

LANE_COUNT = 8
"""Chunks on their way to a tier at once: enough to keep a device busy and to share its syncs."""
BATCH_LANE_COUNT = 2
"""Further lanes, for chunks that no request waits for: they delay no other chunk, and are read back two at a time."""
ROWS_AT_ONCE = 256
LANE_AT_ONCE = 64
"""Chunks of a lane between two pauses: a tier that is away refuses each at once, and other requests would wait."""
AWAY = (DeadlineExceeded, PermissionDenied, Unavailable)
"""Errors of a tier that does not answer, or that this node may not write to; a full engine is away, too. Any other one
refuses a chunk, perhaps that one alone."""
DRAINING = "an operator drains it (kvstore drain --tier NAME --end has it take chunks again)"
NO_ROOM = "memory has no room to read it back: raise arena.capacity_bytes"
GONE = "a part of it is gone again: evicted (raise arena.capacity_bytes), replaced or removed"
LEFT_BY_A_CRASH = "a crash left it, and it was not stored again since"
_log = logging.getLogger("kvstore.movement")


class Writes:
    """The chunks that one slower tier is to have, by priority and then by age. One move per chunk at a time, however
    many requests ask for it."""

    def __init__(
        self, catalog: Catalog, memory: MappedCopies, target: MoveTarget, names: ChunkNames, removal: Removal,
        readbacks: ReadBacks, clock: Clock, faults: FaultPoints, counters: Counters,
    ) -> None:  # fmt: skip
        self.target = target
        self._catalog = catalog
        self._memory = memory
        self._names = names
        self._removal = removal
        self._readbacks = readbacks
        self._clock = clock
        self._faults = faults
        self._counters = counters
        self._queue = MoveQueue(lambda row: int(catalog.worth(row)[0]), catalog.table.identity)
        self._demands = Demands(catalog.table)
        self.parked = ParkedChunks(clock, catalog.table)
        """Chunks that were refused lately, by the tier or by memory, into which they would have to be read back."""
        self._left = LeftChunks(clock, catalog.table)
        self._waiters: dict[int, set[asyncio.Future[None]]] = {}
        self._progress = asyncio.Event()
        self._lacks_some = False
        self._refusals = RefusalLog(target.name, clock)
        self.reason = ""
        """The reason why the tier lacks chunks; empty while it takes them."""
        self.is_draining = False
        """True when an operator said that the tier takes no more chunks."""

    @property
    def backlog_count(self) -> int:
        """Chunks that wait for the tier or are on their way to it."""
        return len(self._queue)

    @property
    def waiting(self) -> Waiting:
        """The chunks of the backlog, by priority."""
        return self._queue.counts()

    def drain(self) -> None:
        """Take no chunk until ``resume``; chunks on their way still arrive."""
        self.is_draining, self.reason = True, DRAINING

    def resume(self) -> None:
        """Take chunks again, also those that came meanwhile."""
        self.is_draining, self.reason, self._lacks_some = False, "", True

    def takes(self, row: int) -> bool:
        """Return True when the chunk may be written there now."""
        return not self.is_draining and self.target.admits(row)

    @property
    def is_moving(self) -> bool:
        """True when waiting for these writes makes room in memory sooner or later."""
        return len(self._queue) > 0 and not self.reason

    def __contains__(self, row: int) -> bool:
        return row in self._queue

    def offer(self, row: int) -> None:
        """Queue a chunk that was stored or used, if the tier's settings want it there now."""
        if self.target.wants(row):
            self.add(row, self._class_of(row))

    def add(self, row: int, priority: Priority = Priority.STANDARD) -> None:
        """Queue a chunk for the tier. ``retry`` finds a chunk again that found the queue full."""
        if not self.target.has(row) and self.takes(row) and not self._queue.add(row, priority):
            self._lacks_some = True

    def demand(self, row: int, *, is_once: bool = False) -> None:
        """Queue a chunk that a request wants there: it goes at once, whatever the settings say, also if it was refused
        just now. ``is_once``: if the tier does not take it, it is tried again only where settings or others want it."""
        is_once = is_once and not self.parked.waits(row) and (row not in self._queue or row in self._demands)
        if self.takes(row) and not self.target.is_proven(row) and self._queue.add(row, Priority.INTERACTIVE):
            if row in self._left and row not in self._demands:
                self._left.hurry(row)
                self._queue.resume([row])
            self._demands.add(row, is_once=is_once)
            self.parked.forget(row)

    def insist(self, rows: Iterable[int]) -> None:
        """Stop leaving these chunks to other nodes: the request that waits for them has little time left."""
        for row in rows:
            if row in self._queue:
                self._left.insist(row)
                self._queue.resume([row])

    def ahead(self, row: int) -> bool:
        """Queue a chunk that no request waits for, unless the tier refused it lately. Returns True when it waits
        now."""
        if row not in self.parked:
            self.add(row, Priority.BATCH)
        return row in self._queue

    async def run(self) -> None:
        """Write for ever."""
        async with asyncio.TaskGroup() as group:
            for _ in range(LANE_COUNT):
                group.create_task(self._lane((Priority.INTERACTIVE, Priority.STANDARD)))
            for _ in range(BATCH_LANE_COUNT):
                group.create_task(self._lane((Priority.BATCH,)))
            group.create_task(self._look_again())

    async def _lane(self, classes: Collection[Priority]) -> None:
        for number in count(1):
            if self.parked.is_back and not self.is_draining:
                await self._queue_again(self.parked.take_all(), any_of=True)
            if number % LANE_AT_ONCE == 0 and self.parked:
                await self._clock.sleep(0)
            row = await self._queue.take(classes)
            is_same, is_left = row in self._queue, False
            try:
                if is_same and self._is_wanted(row) and self._is_for(classes, row):
                    self._catalog.table.hold(row)
                    try:
                        is_left = not await self._move(row)
                    finally:
                        self._catalog.unhold(row)
                        self._readbacks.give_back(row)
            finally:
                self._ended(row, is_left=is_left)
                if row not in self._queue:
                    self._demands.forget(row)
                if is_same and row not in self.parked and self._is_wanted(row):
                    self.add(row, self._class_of(row))  # the chunk was stored anew, or left memory, meanwhile
                self._settled(row)

    def _ended(self, row: int, *, is_left: bool) -> None:
        if not is_left:
            self._left.forget(row)
            self._queue.done(row)
            return
        self._queue.set_aside(row, Priority.INTERACTIVE if row in self._demands else self._class_of(row))
        self._left.look_later(row)

    def _is_wanted(self, row: int) -> bool:
        """Return True when the tier lacks the chunk, and another tier has it or a request demands it. The chunk may
        have left while it waited."""
        if not self._catalog.table.digests[row] or not self._lacks(row) or not self.takes(row):
            return False
        return row in self._demands or (self._catalog.is_visible(row) and self._catalog.table.is_resident(row))

    def _lacks(self, row: int) -> bool:
        return not (self.target.is_proven(row) if row in self._demands else self.target.has(row))

    def _is_for(self, classes: Collection[Priority], row: int) -> bool:
        """Return True when these lanes may move the chunk. A chunk that has to be read back first must not delay chunks
        in memory, unless it is demanded."""
        return self._class_of(row) in classes or row in self._demands

    def _class_of(self, row: int) -> Priority:
        """Return the priority of a chunk that no request waits for. Chunks in memory go first: they leave it sooner or
        later."""
        return Priority.STANDARD if row in self._memory else Priority.BATCH

    async def _move(self, row: int) -> bool:
        """Move a chunk. False: it is left to another node for now."""
        try:
            state = await self.target.finds(row, self._queue.waiting(), is_proof=row in self._demands)
            if state is UploadState.TAKEN and self._may_be_left(row):
                return False
            if state is UploadState.THERE:
                self.parked.has_taken(row)
            else:
                await self._write(row)
        except KVStoreError as error:
            is_part = PART in error.fields  # a part of an engine is away: others of its chunks are taken meanwhile
            self._park(row, error.message, is_told=not is_part)
            self.parked.is_away = (isinstance(error, AWAY) or IS_FULL in error.fields) and not is_part
        except Exception:  # noqa: BLE001 - the boundary: a bug of ours keeps this chunk where it is, not the service down
            _log.exception("a chunk could not be written", extra={"tier": self.target.name})
            self._park(row, "an error in the service: see its log")
        return True

    def _may_be_left(self, row: int) -> bool:
        """Return True while another node that says it writes the chunk is still believed."""
        if row not in self._left:
            self._left.add(row)
            self._counters.add_of(self.target.name, "left_chunks")
        return self._left.may_wait(row)

    async def _look_again(self) -> None:
        """Take up chunks that were left to other nodes, for ever: they are there by now, or no node writes them any
        more."""
        while True:
            self._queue.resume(await self._left.due())

    async def _write(self, row: int) -> None:
        """Write from memory, into which the chunk is read back if necessary. Raises KVStoreError when the tier refuses
        it."""
        if not self._catalog.is_visible(row) or not self._catalog.table.is_resident(row):
            return
        if await self._readbacks.bring(row, is_urgent=row in self._demands):
            await self._write_from_memory(row)
        else:
            self._try_again(row, NO_ROOM)

    async def _write_from_memory(self, row: int) -> None:
        placement = self._memory.placement(row)
        residency = self._memory.residency(row)
        try:
            await self._write_held(row, placement, residency)
            self.parked.has_taken(row)
            if not self.is_draining:
                self._refusals.taken(placement.byte_count)
                self.reason = ""
        except DataLoss:
            if self._memory.holds(row, placement):  # else the chunk left memory meanwhile, and was perhaps stored anew
                await self._removal.quarantine(self._memory, row, residency)

    async def _write_held(self, row: int, placement: Placement, residency: Residency) -> None:
        """Write memory's copy, opened: should it fail a check meanwhile, its room takes another chunk only once nothing
        reads it. A value's bytes in a slot that nobody knows of would come back after a newer value."""
        name = self._names.of(row)
        opened = await self._memory.tier.open(name, residency)
        try:
            written = await self.target.write(opened.header, name.layout, placement.pieces)
        finally:
            opened.close()
        self._faults.reach(f"{self.target.name}.acknowledge")
        if not self._memory.holds(row, placement) or not self._lacks(row):
            self.target.discard(row, written)
            return
        self.target.keep(row, written)
        self._counters.add_of(self.target.name, "written_chunks")
        self._counters.add_of(self.target.name, "written_bytes", placement.byte_count)

    def _park(self, row: int, reason: str, *, is_told: bool = True) -> None:
        """Record that the tier did not take the chunk: its copies stay, and it is tried again later. ``is_told``: the
        reason is one for which the tier lacks other chunks, too."""
        self._counters.add_of(self.target.name, "refused_chunks")
        self._try_again(row, reason)
        if is_told and not self.is_draining:
            self._refusals.refused(reason, self._memory.placement(row).byte_count if row in self._memory else 0)
            self.reason = reason

    def _try_again(self, row: int, reason: str) -> None:
        self.parked.put(row, reason, is_once=self._demands.are_once(row) and not self.target.wants(row))

    async def retry(self) -> None:
        """Queue again chunks that the tier refused, once it had some time, and chunks that found the queue full: one
        while the tier is away. Yields to other requests in between."""
        if self.parked.are_due and not self.is_draining:
            if self.parked.is_away:
                await self._queue_again(self.parked.probes(), any_of=True, count_max=1)
            else:
                await self._queue_again(self.parked.take_all(), any_of=True)
        elif not (self.parked or len(self._queue) or self.is_draining):
            self._refusals.ended()  # what it refused is nowhere any more, or came to be there otherwise
            self.reason = ""
        if self._lacks_some and not len(self._queue) and not (self.parked and self.parked.is_away):
            self._lacks_some = False
            await self._queue_again(range(len(self._catalog.table.digests)), any_of=False)

    async def _queue_again(self, rows: Iterable[int], *, any_of: bool, count_max: int | None = None) -> None:
        """Queue the chunks that another tier has and this one lacks, at most ``count_max``; without ``any_of`` only
        those that the settings want."""
        queued = 0
        for number, row in enumerate(rows):
            if number % ROWS_AT_ONCE == ROWS_AT_ONCE - 1:
                await self._clock.sleep(0)
            if self._is_wanted(row) and (any_of or self.target.wants(row)):
                self.add(row, self._class_of(row))
                queued += 1
                if queued == count_max:
                    break

    def _settled(self, row: int) -> None:
        """Tell the callers that wait for a chunk. A chunk that was demanded while it was on its way goes again, and
        they go on waiting."""
        is_through = row not in self._queue or not (row in self._demands or self._queue.is_aside(row))
        for waiter in self._waiters.pop(row, ()) if is_through else ():
            if not waiter.done():
                waiter.set_result(None)
        self._progress.set()
        self._progress = asyncio.Event()

    # ------------------------------------------------------------ waiting

    async def progress(self, timeout_s: float) -> None:
        """Wait until some chunk's move has ended, well or not, at most ``timeout_s`` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._progress.wait()
        except TimeoutError:
            return

    async def settle(self, chunks: Mapping[int, RowIdentity], timeout_s: float) -> tuple[Durability, str, bool]:
        """Return the level that all of these chunks have reached once the tier is through with them, at most
        ``timeout_s`` seconds from now; the reason why it is no higher; and whether the tier is through."""
        for row in chunks:
            if row in self._memory and row not in self.parked:
                self.add(row, Priority.INTERACTIVE)  # also where the tier had to give up its copy meanwhile
        is_through = await self.through(chunks, timeout_s)
        return *self.level(chunks), is_through

    async def through(self, rows: Iterable[int], timeout_s: float) -> bool:
        """Wait until those of these chunks that wait, or are on their way, are there or refused, at most ``timeout_s``
        seconds. Returns True when all of them are."""
        waiting: dict[asyncio.Future[None], int] = {}
        for row in rows:
            if row in self._queue:
                future = asyncio.get_running_loop().create_future()
                self._waiters.setdefault(row, set()).add(future)
                waiting[future] = row
        try:
            return not (await asyncio.wait(waiting, timeout=timeout_s))[1] if waiting else True
        finally:
            self._gone(waiting)

    def _gone(self, waiting: Mapping[asyncio.Future[None], int]) -> None:
        """Remove the waiters of a caller that waits no more: a tier that stalls would keep them for ever."""
        for future, row in waiting.items():
            others = self._waiters.get(row)
            if others is not None:
                others.discard(future)
                if not others:
                    del self._waiters[row]

    def level(self, chunks: Mapping[int, RowIdentity]) -> tuple[Durability, str]:
        """Return the level that these chunks have reached now, and the reason why it is no higher."""
        level, reason = self.target.durability, ""
        for row, identity in chunks.items():
            if not self._catalog.is_here(row, identity):
                return Durability.NONE, GONE
            if not self.target.is_proven(row):
                missing = LEFT_BY_A_CRASH if self.target.has(row) else f"{self.target.name} has not taken it yet"
                level, reason = Durability.MEMORY, self.reason or missing
        return level, reason
