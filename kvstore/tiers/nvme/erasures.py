"""Erases chunks that must not come back: their headers are overwritten, with a sync, before anything takes their place.
A slot that the device refuses to erase stays out of use and is tried again; meanwhile ``newest`` says which writes are
to be believed. A slot that an earlier process erased is erased anew: reads show the erasure also where its sync failed
or never came, and a power cut would undo it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from kvstore.errors import KVStoreError
from kvstore.tiers.contract import Residency
from kvstore.tiers.nvme.newest import WHOLE_FILE, Newest, SlotPlace
from kvstore.tiers.nvme.regions import Regions
from kvstore.tiers.nvme.slots import RegionFile, region_of

AT_ONCE = 256
"""Headers that are erased before one sync."""
REFUSED_MAX = 4
"""Slots that the device refuses to erase before others of the same file wait for a later time."""
_log = logging.getLogger("kvstore.nvme")


class Erasures:
    """``erase`` overwrites the headers of slots and syncs them; ``run`` calls a blocking function on a byte mover. Both
    raise KVStoreError."""

    def __init__(
        self,
        regions: Regions,
        newest: Newest,
        erase: Callable[..., Awaitable[None]],
        run: Callable[..., Awaitable[Any]],
    ) -> None:
        self.newest = newest
        self.doomed: list[Residency] = []
        """Slots that are free once their headers are erased."""
        self._regions = regions
        self._erase = erase
        self._run = run
        self._erasing = asyncio.Lock()
        self._noting = asyncio.Lock()
        self._at_work: dict[tuple[int, int], asyncio.Future[None]] = {}
        """Slots (region, slot) that a caller of ``alone_at`` has to itself; resolved when that ends."""

    async def erase_doomed(self) -> None:
        """Erase the ``doomed`` slots, up to ``AT_ONCE`` of a file with one sync, and free them. A slot that the device
        refuses to erase stays out of use."""
        async with self._erasing:
            while self.doomed:
                some = self.doomed[-AT_ONCE:]
                del self.doomed[-AT_ONCE:]
                files: dict[int, list[Residency]] = {}
                for residency in some:
                    files.setdefault(region_of(residency), []).append(residency)
                try:
                    for number in list(files):
                        await self._erase_and_free(files[number])
                        del files[number]
                except BaseException:  # the caller was cancelled; the next one erases them
                    self.doomed += (residency for left in files.values() for residency in left)
                    raise

    async def _erase_and_free(self, residencies: list[Residency]) -> None:
        """Erase slots of one file, and free them."""
        try:
            places = list(map(self._regions.find, residencies))
        except KVStoreError as error:
            _log.warning("chunks that were given up could not be erased", extra={"reason": error.message})
            return  # their file is gone, or away
        erased = set(await self._erased(places[0][0], [slot for _, slot in places]))
        for residency, (region, slot) in zip(residencies, places, strict=True):
            if slot in erased:
                self._regions.give_back(region, slot)
            else:
                self._regions.keep_unerased(residency)

    async def _erased(self, region: RegionFile, slots: list[int]) -> list[int]:
        """Erase slots of one file with one sync, and return them. Where the device refuses they are erased one by one,
        until it has refused ``REFUSED_MAX``: one bad place keeps no other slot out of use. Return those that were."""
        try:
            await self._erase(region, *slots)
            return slots
        except KVStoreError as error:
            _log.warning("chunks that were given up could not be erased", extra={"reason": error.message})
        erased: list[int] = []
        refused = 0
        for slot in slots if len(slots) > 1 else ():
            try:
                await self._erase(region, slot)
                erased.append(slot)
            except KVStoreError:
                refused += 1
                if refused == REFUSED_MAX:
                    break
        return erased

    @asynccontextmanager
    async def alone_at(self, region: RegionFile, slot: int) -> AsyncIterator[None]:
        """Keep other callers from renewing or erasing this slot meanwhile. The slot is not reused, and its file stays,
        from the call on."""
        place = (region.number, slot)
        self._regions.begin_reading(region, slot)
        try:
            while (other := self._at_work.get(place)) is not None:
                await asyncio.wait([other])
            done = self._at_work[place] = asyncio.get_running_loop().create_future()
            try:
                yield
            finally:
                del self._at_work[place]
                done.set_result(None)
        finally:
            self._regions.end_reading(region, slot)

    async def note(self, writes: Mapping[bytes, int]) -> None:
        """See ``LocalTier.supersede``: where an older write may lie in a place that cannot be erased, record the newer
        writes. Raises KVStoreError."""
        async with self._noting:
            unseen = self._unseen(writes)
            if unseen or self.newest.knows(writes):
                await self._run(self.newest.note, writes, unseen)

    def _unseen(self, writes: Mapping[bytes, int] | None = None) -> frozenset[SlotPlace]:
        """Return the places that may hold a write which could not be read, or not be erased. A locked slot shows its
        key: it counts where ``writes`` replace that key, or an earlier write did."""
        places = {(name, WHOLE_FILE) for name in self._regions.away}
        is_any_stale = bool(self.newest)
        for region in self._regions.by_number.values():
            file = region.path.name
            places |= {(file, slot) for slot in region.unread - region.locked.keys() | region.unerased}
            places |= {
                (file, slot)
                for slot, (key, mark) in region.locked.items()
                if (writes and key in writes) or (is_any_stale and self.newest.is_stale(key, mark, (file, slot)))
            }
        return frozenset(places)

    @property
    def is_tidy(self) -> bool:
        """True when ``tidy`` would find nothing to do."""
        is_erasing = bool(self.doomed) or self._erasing.locked()
        return not (is_erasing or self.newest or any(each.unerased for each in self._regions.by_number.values()))

    async def begin(self) -> None:
        """At a start: ``tidy``. The slots in quarantine then were just erased anew, and are freed, for they failed no
        check."""
        await self.tidy()
        for region in self._regions.by_number.values():
            while region.quarantined:
                self._regions.give_back(region, region.quarantined.pop())

    async def tidy(self) -> None:
        """Erase slots that could not be erased before. Once no older write can lie anywhere, forget which writes are
        the newest."""
        await self.erase_doomed()
        erased = [place for region in list(self._regions.by_number.values()) for place in await self._erase_in(region)]
        async with self._noting:
            try:
                left = self._unseen() - {(region.path.name, slot) for region, slot in erased}
                if self.newest:
                    await self._run(self.newest.forget, left)
            except KVStoreError as error:
                _log.warning("which values are the newest could not be forgotten", extra={"reason": error.message})
                for region in self._regions.by_number.values():
                    region.is_read_only |= self.newest.speaks_of(region.path.name)  # new ones would not be believed
                return
            for region, slot in erased:
                self._regions.rest(region, slot)

    async def _erase_in(self, region: RegionFile) -> list[tuple[RegionFile, int]]:
        """Erase the region's ``unerased`` slots, until the device refuses or the file is removed. Returns the erased
        slots, which are still out of use."""
        erased: list[tuple[RegionFile, int]] = []
        todo = sorted(slot for slot in region.unerased if (region.number, slot) not in self._at_work)
        for first in range(0, len(todo), AT_ONCE):
            if self._regions.by_number.get(region.number) is not region:
                break  # its file was removed while others were erased: the descriptor may be a newer file's by now
            async with AsyncExitStack() as alone:
                for slot in todo[first : first + AT_ONCE]:
                    await alone.enter_async_context(self.alone_at(region, slot))
                left = [slot for slot in todo[first : first + AT_ONCE] if slot in region.unerased]
                # slots that others erased meanwhile may be in use again
                found = await self._erased(region, left) if left else []
            erased += [(region, slot) for slot in found]
            if left and not found:
                break
        return erased
