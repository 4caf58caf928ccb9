"""Moves into memory, on use. A chunk is read once however many requests ask for it; layers can be used as they land."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context as ContextVars
from contextvars import copy_context
from functools import partial
from typing import TypeVar

import numpy as np

from kvstore.arena import Arena, Placement
from kvstore.catalog import ROOT_ROW, Catalog, MappedCopies
from kvstore.chunk import ChunkHeader, StripMemory, pack_header, raw_header, slab_runs, write_mark
from kvstore.errors import DataLoss, KVStoreError, Unavailable
from kvstore.movement.loading import Loading
from kvstore.movement.meters import TierMeters
from kvstore.movement.names import ChunkNames
from kvstore.movement.pieces import later_pieces, piece_bytes_of, pieces_in_order
from kvstore.movement.removal import Removal
from kvstore.movement.room import Room
from kvstore.movement.shared_tiers import SharedTiers
from kvstore.movement.sources import STALL_S, WENT, ChunkSource, LocalSource
from kvstore.seams import FaultPoints, Workers
from kvstore.seams.jobs import done
from kvstore.seams.memory import Bytes
from kvstore.spec import MissReason
from kvstore.telemetry import NO_TRACING, Counters, Tracing
from kvstore.tiers import StoredChunk
from kvstore.tiers.pace import limit_s

ANSWER_S_MAX = 60.0
"""A shared tier's call that takes more seconds than this plus the time for its bytes (``limit_s``) has failed."""
LOAD_COUNT_MAX = 16_384
"""Chunks on their way into memory at once."""
CALLS_AT_ONCE = 64
"""Calls of a tier that are begun between two pauses: each takes the loop 0.1 ms, and a long load has thousands."""
_log = logging.getLogger("kvstore.movement")
Result = TypeVar("Result")
RoomFor = Callable[[tuple[int, ...]], Placement | None]


class Loads:
    """Chunks being read from slower tiers. ``entered``: called for each chunk that came whole from beyond the node."""

    def __init__(
        self, catalog: Catalog, memory: MappedCopies, room: Room, arena: Arena, names: ChunkNames, removal: Removal,
        shared_tiers: SharedTiers, entered: Callable[[int], None], workers: Workers, faults: FaultPoints,
        counters: Counters, meters: TierMeters, tracing: Tracing = NO_TRACING,
    ) -> None:  # fmt: skip
        self._catalog = catalog
        self._memory = memory
        self._room = room
        self._arena = arena
        self._names = names
        self._removal = removal
        self._shared_tiers = shared_tiers
        self._entered = entered
        self._workers = workers
        self._faults = faults
        self._counters = counters
        self._meters = meters
        self._loading: dict[int, Loading] = {}
        self._gave_s: dict[str, float] = {}
        """When each tier last gave a load something."""
        self._tracing = tracing
        self._queue: asyncio.Queue[tuple[list[Loading], ContextVars]] = asyncio.Queue(LOAD_COUNT_MAX)
        """Batches to be read, each with the trace and log context of its request."""
        self.loading_bytes = 0

    def __contains__(self, row: int) -> bool:
        """Return True while a chunk is on its way to memory."""
        return row in self._loading

    async def run(self) -> None:
        """Read the chunks that ``begin`` asks for, for ever."""
        async with asyncio.TaskGroup() as group:
            while True:
                batch, asked_by = await self._queue.get()
                group.create_task(self._load(batch), context=asked_by)

    def begin(
        self, rows: Sequence[int], keep: frozenset[int], layers: frozenset[int] = frozenset(), *,
        evict_unwritten: bool = True,
    ) -> tuple[list[Loading | None], MissReason]:  # fmt: skip
        """Have these chunks brought in, ``layers`` first; rows that are in memory give None. A chunk that was lost on
        its way from one tier, or hangs there, is read from another. The list ends early where there is no room
        (``Room.allocate``), or no tier that answers, and the reason says which. Raises the arena's errors."""
        fresh: list[Loading] = []
        room = partial(self._room.allocate, keep=keep, evict_unwritten=evict_unwritten)
        try:
            return self._begin(rows, room, layers, fresh)
        finally:  # loads that have begun go on, also when the next chunk's room was refused
            if fresh:
                self._queue.put_nowait((fresh, copy_context()))

    def _begin(
        self, rows: Sequence[int], room: RoomFor, layers: frozenset[int], fresh: list[Loading]
    ) -> tuple[list[Loading | None], MissReason]:
        found: list[Loading | None] = []
        stalled: dict[str, bool] = {}  # a tier goes through all its calls to say so, and a long load has thousands
        for row in rows:
            loading = None if row in self._memory else self._loading.get(row)
            if loading is not None and loading.source.name not in stalled:
                stalled[loading.source.name] = self._hangs(loading.source)
            if row not in self._memory and (loading is None or loading.lost or stalled[loading.source.name]):
                source = self._source(row)
                if source is not None and (loading is None or source.name != loading.source.name):
                    loading = self._start(row, source, room, layers)
                    if loading is None:
                        return found, MissReason.OVERLOADED
                    fresh.append(loading)
                elif loading is None or loading.lost:  # else it is waited for: nobody else has the chunk
                    return found, self._why_lost(row, loading)
            found.append(loading)
        return found, MissReason.NONE

    def _hangs(self, source: ChunkSource) -> bool:
        """Return True when a tier is stalled and gives its loads nothing. A device whose syncs take long may go on
        reading: what is on its way from there is waited for."""
        gave_s = self._gave_s.get(source.name, float("-inf"))
        return source.is_stalled and self._meters.clock.monotonic() - gave_s > STALL_S

    def _why_lost(self, row: int, loading: Loading | None) -> MissReason:
        """Return why a chunk cannot be had now. It is not evicted while a tier of the node that does not answer has
        it, whatever other tiers say."""
        if loading is None or (loading.lost is MissReason.EVICTED and self._catalog.table.is_resident(row)):
            return MissReason.UNAVAILABLE
        return loading.lost

    def _source(self, row: int) -> ChunkSource | None:
        """Return the fastest tier that has the chunk and answers; shared tiers come last."""
        for rank, copies in enumerate(self._catalog.table.copies):
            if row in copies and copies.tier.stalled_s() <= STALL_S:
                return LocalSource(copies, row, self._names.of(row), rank, self._removal)
        return self._shared_tiers.source(row)

    def has_source(self, row: int) -> bool:
        """Return True when a tier that answers has the chunk."""
        return self._source(row) is not None

    def _start(self, row: int, source: ChunkSource, room: RoomFor, layers: frozenset[int]) -> Loading | None:
        if len(self._loading) >= LOAD_COUNT_MAX:
            return None
        layout = self._names.of(row).layout
        placement = room(layout.piece_bytes)
        if placement is None:
            return None
        loading = Loading(row, source, layout, placement, first=layers)
        self._loading[row] = loading
        self._meters.began(source.name, source.kind, placement.byte_count)
        self.loading_bytes += placement.byte_count
        self._catalog.table.hold(row)
        return loading

    # ------------------------------------------------------------ reading

    async def _load(self, batch: list[Loading]) -> None:
        """Load one fetch's cold chunks, inside a span."""
        with self._tracing.span("kvstore.load", chunks=len(batch)) as span:
            await self._load_all(batch)
            if self._tracing.is_on:
                tiers = ",".join(dict.fromkeys(each.source.name for each in batch))
                byte_count = sum(each.placement.byte_count for each in batch)
                span.note(tier=tiers, bytes=byte_count, lost_chunks=sum(bool(each.lost) for each in batch))

    async def _load_all(self, batch: list[Loading]) -> None:
        """Load one fetch's cold chunks. Whatever happens, each of them ends."""
        chunks: list[tuple[Loading, StoredChunk]] = []

        async def begin(loading: Loading) -> None:
            stored = await self._open(loading)
            if stored is not None:
                chunks.append((loading, stored))  # from here on it is closed in any case
                if stored.header.encoding == "raw":
                    self._put_header(loading, pack_header(stored.header, loading.layout))
                group.create_task(self._read(loading, stored, loading.pieces[0]))  # while others are being opened

        try:
            self._cut(batch)
            async with asyncio.TaskGroup() as group:
                async with asyncio.TaskGroup() as tasks:  # when it ends no open is pending, in any case
                    for number, each in enumerate(batch, 1):
                        tasks.create_task(begin(each))
                        await self._pause(number)
                order = {each: number for number, each in enumerate(batch)}
                chunks.sort(key=lambda opened: order[opened[0]])
                for number, (position, slabs) in enumerate(later_pieces([each.pieces for each, _ in chunks]), 1):
                    group.create_task(self._read(*chunks[position], slabs))
                    await self._pause(number)
            for number, (each, stored) in enumerate(chunks, 1):
                if not each.lost:
                    try:
                        await self._finish(each, stored)
                    except KVStoreError as error:
                        await self._lose(each, error)
                await self._pause(number)
        except Exception:  # noqa: BLE001 - the boundary: a bug of ours loses this batch, not the service
            _log.exception("a batch of loads failed")
        finally:
            for _, stored in chunks:
                stored.close()
            for each in batch:
                self._end(each)

    async def _pause(self, number: int) -> None:
        """Let others run after every ``CALLS_AT_ONCE``th call."""
        if number % CALLS_AT_ONCE == 0:
            await self._meters.clock.sleep(0)

    def _cut(self, batch: list[Loading]) -> None:
        load_bytes = sum(each.placement.byte_count for each in batch)
        for each in batch:
            piece_bytes = piece_bytes_of(load_bytes, each.source.piece_bytes_max)
            each.pieces = pieces_in_order(each.layout, each.first, piece_bytes)

    async def _open(self, loading: Loading) -> StoredChunk | None:
        try:
            stored = await self._answer(loading, loading.source.open(_ahead(loading)))
        except KVStoreError as error:
            await self._lose(loading, error)
            return None
        if stored is None:
            self._lost(loading, MissReason.EVICTED, "it is gone")
            return None
        self._gave_s[loading.source.name] = self._meters.clock.monotonic()
        return stored

    async def _answer(self, loading: Loading, call: Awaitable[Result]) -> Result:
        """Await a tier's answer. Readers who have waited long enough are told that the chunk is lost for them. Its room
        stays in use until the call has ended, for until then bytes may come. An unexpected error of a shared tier loses
        only this chunk."""
        if loading.source.patience_s is None:
            return await call
        try:
            with self._patience(loading, loading.source.patience_s):
                async with asyncio.timeout(limit_s(ANSWER_S_MAX, loading.layout.total_bytes)):
                    return await call
        except KVStoreError:
            raise
        except Exception as error:
            raise Unavailable(f"tiers.{loading.source.name} failed: {error!r}") from error

    @contextmanager
    def _patience(self, loading: Loading, seconds: float) -> Iterator[None]:
        """Tell readers when a call takes too long."""
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle

        def late() -> None:
            nonlocal timer
            if loading.lost:
                return
            if more_s := loading.source.late():
                timer = loop.call_later(more_s, late)
            else:
                self._lost(loading, MissReason.UNAVAILABLE, f"no answer within {seconds} s")

        timer = loop.call_later(seconds, late)
        try:
            yield
        finally:
            timer.cancel()

    def _put_header(self, loading: Loading, packed: bytes) -> None:
        np.copyto(loading.placement.pieces[0], np.frombuffer(packed, np.uint8))

    async def _read(self, loading: Loading, stored: StoredChunk, slabs: range) -> None:
        if loading.lost:
            return
        try:
            await self._answer(loading, stored.read(slabs, loading.placement.pieces[1 + slabs.start : 1 + slabs.stop]))
        except KVStoreError as error:
            await self._lose(loading, error)
            return
        self._gave_s[loading.source.name] = self._meters.clock.monotonic()
        byte_count = sum(loading.layout.slabs[slab].byte_count for slab in slabs)
        self._counters.add_of(loading.source.name, "verified_bytes", byte_count)
        if stored.header.encoding == "raw" and not loading.lost:
            loading.slab_landed(slabs)

    async def _finish(self, loading: Loading, stored: StoredChunk) -> None:
        """Enter a whole chunk into memory."""
        layout, placement, header = loading.layout, loading.placement, stored.header
        if header.encoding != "raw":
            slabs = range(len(layout.slabs))
            runs = slab_runs(layout, header.storage_key, header.write_id, slabs, placement.pieces[1:])
            rows = await done(self._workers, _checksums, runs)
            self._put_header(loading, pack_header(raw_header(header, [rows]), layout))
            loading.slab_landed(range(len(layout.slabs)))
        self._faults.reach("load.finish")
        loading.source.worked()
        row = loading.row
        if row in self._memory:
            return
        if not loading.source.is_current(header) or not self._is_reached(row):
            loading.lost = MissReason.UNAVAILABLE
            return
        self._counters.add("promoted_chunks")
        self._counters.add("promoted_bytes", placement.byte_count)
        self._enter(loading, header)

    def _is_reached(self, row: int) -> bool:
        """Return True when a prefix reaches the chunk: a chunk without its parent only fills memory. The parent may be
        in another batch, which takes longer."""
        parent = self._catalog.table.parents[row]
        if self._catalog.is_visible(row) or parent == ROOT_ROW or self._catalog.is_visible(parent):
            return True
        above = self._loading.get(parent)
        return above is not None and not above.lost

    def _enter(self, loading: Loading, header: ChunkHeader) -> None:
        """Give a chunk to memory, and publish it if the node did not have it before."""
        row, catalog = loading.row, self._catalog
        is_new = not catalog.is_visible(row)
        self._memory.put_placement(row, loading.placement)
        loading.is_entered = True
        if is_new:
            catalog.table.write_marks[row] = write_mark(header.write_id)
            catalog.publish(row)
        else:
            catalog.moved(row, self._memory.kind)
        self._memory.policy.stored(row, catalog.table.digests[row], *catalog.worth(row))
        if is_new:
            self._entered(row)

    async def _lose(self, loading: Loading, error: KVStoreError) -> None:
        """Give up a chunk that will not come. Its room is free once every read of it has ended."""
        if not loading.lost:
            why = MissReason.UNAVAILABLE
            if isinstance(error, DataLoss):  # a chunk that was dropped or written anew meanwhile is not damaged
                why = MissReason.EVICTED if error.fields.get("reason") in WENT else MissReason.CORRUPT
            self._lost(loading, why, error.message)
            await loading.source.failed(error)

    def _lost(self, loading: Loading, why: MissReason, reason: str) -> None:
        loading.lost = why
        self._counters.add("promotion_failed_chunks")
        _log.warning("a chunk could not be read", extra={"tier": loading.source.name, "reason": reason})
        loading.changed()

    def _end(self, loading: Loading) -> None:
        """Free a chunk's room unless memory has taken it: every read of it has ended."""
        loading.is_done = True
        self.loading_bytes -= loading.placement.byte_count
        is_late = loading.lost is MissReason.UNAVAILABLE and not loading.has_landed
        self._meters.ended(
            loading.source.name, loading.placement.byte_count, has_come=loading.has_landed, is_late=is_late
        )
        if self._loading.get(loading.row) is loading:
            del self._loading[loading.row]
        if not self._memory.holds(loading.row, loading.placement):
            loading.lost = loading.lost or MissReason.UNAVAILABLE
        if not loading.is_entered:
            self._arena.free(loading.placement)
        self._catalog.unhold(loading.row)
        loading.changed()


def _ahead(loading: Loading) -> Sequence[Bytes]:
    """Return the memory that the first read of a chunk fills, where that read begins with the first slab; else none."""
    first = loading.pieces[0]
    return () if first.start else loading.placement.pieces[1 : 1 + first.stop]


def _checksums(runs: Sequence[StripMemory]) -> bytes:
    """Return 16 bytes per strip, in order. Blocking."""
    return b"".join(strips.checksums(data) for data, strips in runs)
