"""Copies on a device: a cache of memory, filled by use, and the first to give way.

The device has a chunk only while memory has it, too: what leaves memory leaves the device before. So no promise rests
on bytes that a client of the device could have written, nothing is read from there into another tier, and the catalog
does not know of these copies. They serve fetches into tensors on the same device, and ``kvstore verify`` reads them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from kvstore.catalog import Catalog, MappedCopies, RowIdentity
from kvstore.chunk import parse_header
from kvstore.errors import DataLoss, Exhausted, KVStoreError
from kvstore.movement.names import ChunkNames
from kvstore.movement.sources import STALL_S, check_whole
from kvstore.telemetry import Counters
from kvstore.tiers import Residency
from kvstore.tiers.contract import HelpingCopies
from kvstore.tiers.hbm import HbmTier, PoolExtent

WAITING_COUNT_MAX = 4096
"""Chunks that wait to be copied to the device. The next request asks again for those beyond."""
VICTIM_COUNT = 16
"""Copies that are chosen together to leave: the list of all of them would hold up the loop for each copy that comes."""
_log = logging.getLogger("kvstore.movement")


class _Waiting(NamedTuple):
    """A chunk to be copied. ``request``: the chunks of its request, none of which it drives out."""

    identity: RowIdentity
    request: frozenset[int]


class HbmCopies:
    """One tenant's copies on a device, the least recently used first."""

    def __init__(
        self, catalog: Catalog, memory: MappedCopies, tier: HbmTier, names: ChunkNames, counters: Counters
    ) -> None:
        self.tier = tier
        self._table = catalog.table
        self._memory = memory
        self._names = names
        self._counters = counters
        self._there: OrderedDict[int, Residency] = OrderedDict()
        self._waiting: dict[int, _Waiting] = {}
        """By row, in the order in which they are copied."""
        self._has_work = asyncio.Event()
        self._request: frozenset[int] = frozenset()
        """The chunks of the request for which a chunk is copied now."""
        self._is_refused = False
        counters.add_tier(tier.name)

    async def begin(self) -> None:
        """Take the tier into use."""
        await self.tier.recover(self)
        self._memory.on_leaving.append(self.gave_up)

    def __contains__(self, row: int) -> bool:
        return row in self._there

    def extent(self, row: int) -> PoolExtent | None:
        """Return the place of a chunk's copy; None where the device has none."""
        residency = self._there.get(row)
        return None if residency is None else self.tier.extent(residency)

    def used(self, chain: Sequence[int]) -> None:
        """Record that a chain was read, root first. Its end leaves before its beginning."""
        for row in reversed(chain):
            if row in self._there:
                self._there.move_to_end(row)

    # ------------------------------------------------------------ copies come

    def wants(self, rows: Sequence[int]) -> None:
        """Have chunks copied to the device, the first ones first, as far as they fit. Chunks that wait already wait
        once, and nothing more waits for a device that does not answer."""
        missing = [row for row in rows if row not in self._there and not self._is_waiting(row)]
        if missing and self.tier.stalled_s() <= STALL_S:
            request = frozenset(rows)
            for row in missing[: WAITING_COUNT_MAX - len(self._waiting)]:
                self._waiting[row] = _Waiting(self._table.identity(row), request)
            self._has_work.set()

    def _is_waiting(self, row: int) -> bool:
        """True when this chunk waits, and not another one that had its row before."""
        waiting = self._waiting.get(row)
        return waiting is not None and waiting.identity == self._table.identity(row)

    async def run(self) -> None:
        """Copy the chunks that are wanted, for ever."""
        while True:
            await self._has_work.wait()
            if not self._waiting:
                self._has_work.clear()
                continue
            row = next(iter(self._waiting))
            waiting = self._waiting.pop(row)
            if row in self._there or row not in self._memory or self._table.identity(row) != waiting.identity:
                continue
            try:
                self._request = waiting.request
                await self._fill(row)
                self._is_refused = False
            except Exhausted:  # the rest of its request finds no room either
                self._drop_waiting(waiting.request)
            except Exception as error:  # noqa: BLE001 - the boundary: a device that fails costs copies, not the service
                self._drop_waiting(waiting.request)
                if not self._is_refused:
                    _log.warning("nothing is copied to the device now", extra={"reason": str(error)})
                self._is_refused = True
            finally:
                self._request = frozenset()

    def _drop_waiting(self, request: frozenset[int]) -> None:
        self._waiting = {row: each for row, each in self._waiting.items() if each.request is not request}

    async def _fill(self, row: int) -> None:
        """Copy one chunk. It counts only if memory still has it where it was copied from: nothing holds it there, so
        that a device that hangs keeps nobody from removing or replacing it. Raises KVStoreError."""
        placement, layout = self._memory.placement(row), self._names.of(row).layout
        header = parse_header(placement.pieces[0], layout)
        residency = await self.tier.write(header, layout, placement.pieces)
        if row in self._there or not self._memory.holds(row, placement):
            self.tier.remove([residency])
            return
        self._there[row] = residency
        self._counters.add_of(self.tier.name, "written_chunks")
        self._counters.add_of(self.tier.name, "written_bytes", placement.byte_count)

    # ------------------------------------------------------------ copies go

    def gave_up(self, row: int) -> None:
        """Give up the copy of a chunk that is leaving memory."""
        residency = self._there.pop(row, None)
        if residency is not None:
            self.tier.remove([residency])

    def evict(
        self, helps: Callable[[Residency], bool], enough: Callable[[], bool], *, among: HelpingCopies | None = None
    ) -> bool:
        """See ``tiers.Evictor``. What a reader or a ticket holds stays, and so do chunks of the request for which room
        is made."""
        while victims := list(islice(self._victims(helps), VICTIM_COUNT)):
            for row in victims:
                self._evict(row)
                if enough():
                    return True
        return False

    def _victims(self, helps: Callable[[Residency], bool]) -> Iterator[int]:
        for row, residency in self._there.items():
            if row not in self._request and not self._table.is_held(row) and helps(residency):
                yield row

    def evict_all(self, residencies: Sequence[Residency]) -> bool:
        """See ``tiers.Evictor``."""
        wanted = set(residencies)
        rows = [row for row, residency in self._there.items() if residency in wanted]
        if len(rows) < len(wanted) or any(row in self._request or self._table.is_held(row) for row in rows):
            return False
        for row in rows:
            self._evict(row)
        return True

    def _evict(self, row: int) -> None:
        self._counters.add_of(self.tier.name, "demoted_chunks")  # memory has it
        self.gave_up(row)

    async def check(self, row: int) -> bool | None:
        """Read a whole copy. True: it passed its checks, or there is none any more; False: it failed, and was given up;
        None: the device did not give it."""
        residency, name = self._there.get(row), self._names.of(row)
        if residency is None:
            return True
        try:
            await check_whole(await self.tier.open(name, residency), name.layout)
        except DataLoss:
            if self._there.get(row) == residency:
                _log.error("a chunk on the device fails its check", extra={"digest": self._table.digests[row].hex()})
                self._counters.add("quarantined_chunks")
                self.gave_up(row)
            return False
        except KVStoreError as error:
            _log.warning("a chunk on the device could not be read", extra={"reason": error.message})
            return None
        self._counters.add_of(self.tier.name, "verified_bytes", name.layout.total_bytes)
        return True

    def end(self) -> None:
        """Give up all copies. The tier is not used any more, and may be closed."""
        for row in list(self._there):
            self.gave_up(row)
        self._memory.on_leaving.remove(self.gave_up)
