"""Where chunks lie, and how a copy goes: dropped, forgotten, quarantined. The catalog's columns change here."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from kvstore.arena import Arena
from kvstore.catalog import NOWHERE, ROOT_ROW, UNPROVEN, Catalog, ChunkTable
from kvstore.errors import DataLoss, KVStoreError
from kvstore.keys import DIGEST_BYTES, ROOT_DIGEST, storage_key
from kvstore.policy import EvictionPolicy, LeastRecentlyUsed
from kvstore.seams import FaultPoints, TenantKeys
from kvstore.spec import MissReason, Tier
from kvstore.telemetry import Counters
from kvstore.tiers import ChunkName, IndexColumns
from kvstore.tiers.nvme import NvmeTier

CLIMB_COUNT_MAX = 512
_log = logging.getLogger("kvstore.residency")


class Residency:
    """The copies of every chunk. ``nvme`` is None while no device is configured, or it could not be opened."""

    def __init__(
        self,
        *,
        arena: Arena,
        catalog: Catalog,
        policy: EvictionPolicy,
        keys: TenantKeys,
        faults: FaultPoints,
        counters: Counters,
    ) -> None:
        self.arena_policy = policy
        self.nvme_policy: EvictionPolicy = LeastRecentlyUsed()
        self.nvme: NvmeTier | None = None
        self._arena = arena
        self._catalog = catalog
        self._keys = keys
        self._faults = faults
        self._counters = counters
        self._alternates: dict[int, list[tuple[int, int]]] = {}
        """Row -> (residency, mark) of further copies that a scan met."""

    @property
    def table(self) -> ChunkTable:
        return self._catalog.table

    @property
    def has_lower_tier(self) -> bool:
        return self.nvme is not None

    def name(self, row: int) -> ChunkName:
        """What a read of this chunk must find."""
        space, table = self._catalog.space_of(row), self.table
        key = storage_key(self._keys.secret, space.fingerprint, space.provenance, space.exactness, table.digests[row])
        return ChunkName(key, space.layout(table.token_counts[row]), table.write_marks[row])

    def used(self, chain: Sequence[int]) -> None:
        """A chain was stored or read, root first."""
        table = self.table
        self.arena_policy.used([row for row in chain if row in table.arena])
        if self.nvme is not None:
            self.nvme_policy.used([row for row in chain if table.residencies[row] != NOWHERE])

    def superseded(self, row: int) -> None:
        """Another chunk has all that this one has: in every tier it is the first to go when room is needed."""
        self._counters.add("superseded_chunks")
        self.arena_policy.superseded(row)
        self.nvme_policy.superseded(row)

    def was_written(self, row: int) -> None:
        """The device has the chunk now; its chain stays more recent than it, as the policy wants it."""
        table = self.table
        chain = [row]
        while len(chain) < CLIMB_COUNT_MAX and (parent := table.parents[chain[-1]]) != ROOT_ROW:
            chain.append(parent)
        self.nvme_policy.used([each for each in reversed(chain) if table.residencies[each] != NOWHERE])

    # ------------------------------------------------------------ copies go

    def drop(self, row: int) -> None:
        """Give up memory's copy."""
        self.arena_policy.removed(row)
        self._arena.free(self.table.arena.pop(row))
        if self.table.residencies[row] != NOWHERE:
            self._catalog.moved(row, Tier.NVME)

    def forget(self, row: int) -> None:
        """Give up the device's copies; their slots are free at once."""
        assert self.nvme is not None
        residency = self.table.residencies[row]
        self.table.residencies[row] = NOWHERE
        self.nvme_policy.removed(row)
        erase = self._catalog.space_of(row).may_be_replaced
        self.nvme.forget(residency, erase=erase)
        for other, _ in self._alternates.pop(row, ()):
            self.nvme.forget(other, erase=erase)

    def withdraw_if_gone(self, row: int, reason: MissReason, tier: Tier) -> None:
        """Make a chunk that no tier holds any more invisible; ``tier`` was the last."""
        if self.table.is_resident(row):
            return
        if self._catalog.is_visible(row):
            self._catalog.withdraw(row, reason, tier)
        else:
            self._catalog.forget_ghost(row)

    def remove(self, row: int, reason: MissReason) -> None:
        """Give up every copy."""
        tier = Tier.DRAM if row in self.table.arena else Tier.NVME
        if self.table.residencies[row] != NOWHERE:
            self.forget(row)
        if tier is Tier.DRAM:
            self.drop(row)
        self.withdraw_if_gone(row, reason, tier)

    async def supersede(self, writes: Mapping[bytes, int], wait_s: float) -> None:
        """Before other writes take the place of what was removed: no crash brings that back. See ``NvmeTier``. Raises
        KVStoreError."""
        if self.nvme is not None:
            await self.nvme.supersede(writes, wait_s)

    # ------------------------------------------------------------ copies that fail

    def quarantine_arena(self, row: int) -> None:
        """Memory's copy failed its check. A copy of the device takes its place at the next use."""
        self._counters.add("quarantined_chunks")
        _log.error("a chunk in memory fails its check", extra={"digest": self.table.digests[row].hex()})
        self.drop(row)
        self.withdraw_if_gone(row, MissReason.CORRUPT, Tier.DRAM)

    async def quarantine_nvme(self, row: int, residency: int) -> None:
        """The device's copy failed its check. Memory's copy, or another one found on the device, takes its place."""
        assert self.nvme is not None
        if self.table.residencies[row] != residency:
            return  # another reader met it first: a slot is given up once
        self._counters.add("quarantined_chunks")
        _log.error("a chunk on the device fails its check", extra={"digest": self.table.digests[row].hex()})
        self.table.residencies[row] = NOWHERE
        self.nvme_policy.removed(row)
        others = self._alternates.pop(row, [])
        if row in self.table.arena:  # what is certain is written anew, rather than given up for what a crash left
            for other, _ in others:
                self.nvme.forget(other, erase=self._catalog.space_of(row).may_be_replaced)
        elif others:
            self.table.residencies[row], self.table.write_marks[row] = others.pop()
            self.nvme_policy.used([row])
            self._catalog.spaces.show(self._catalog.space_of(row), self.table.digests[row])
            if others:
                self._alternates[row] = others
        self.withdraw_if_gone(row, MissReason.CORRUPT, Tier.NVME)
        try:
            await self.nvme.quarantine(residency)
        except KVStoreError as error:
            _log.warning("its slot could not be erased", extra={"reason": error.message})

    # ------------------------------------------------------------ copies that are checked

    async def check_nvme(self, row: int) -> bool:
        """Read the device's copy, all of it. False: it failed, and is quarantined. True also when there is none.
        Raises KVStoreError when the device does not answer."""
        nvme, residency, name = self.nvme, self.table.residencies[row], self.name(row)
        if nvme is None or residency == NOWHERE:
            return True
        try:
            stored = await nvme.open(name, residency)
            try:
                for slab in range(len(name.layout.slabs)):
                    await stored.check(range(slab, slab + 1))
            finally:
                stored.close()
        except DataLoss:
            await self.quarantine_nvme(row, residency)
            return False
        return True

    async def prove_nvme(self, row: int) -> bool:
        """As ``check_nvme``; and a copy that an earlier process left is written and synced anew, for that process may
        have ended, or its sync may have failed, before it was there to stay. One that lies where nothing can be
        written is given up: False, too. The row is held by the caller."""
        nvme, residency = self.nvme, self.table.residencies[row]
        if not await self.check_nvme(row):
            return False
        if nvme is not None and self.table.residencies[row] == residency and not self.table.is_proven(row):
            is_renewed = await nvme.renew(residency)
            if self.table.residencies[row] == residency:
                if not is_renewed:
                    self._give_up(row)
                    return False
                self.table.residencies[row] &= ~UNPROVEN
        return True

    def _give_up(self, row: int) -> None:
        """A good copy in a file that takes no writes: the chunk is to be written elsewhere."""
        self.forget(row)
        self.withdraw_if_gone(row, MissReason.EVICTED, Tier.NVME)

    # ------------------------------------------------------------ room on the device

    def make_room(self, slot_bytes: int) -> bool:
        """Evict from the device until a slot of that size can be had. False when nothing that could go helps."""
        nvme, table = self.nvme, self.table
        assert nvme is not None

        def frees(row: int) -> bool:
            return nvme.regions.slot_bytes_at(table.residencies[row]) == slot_bytes

        def eligible(row: int) -> bool:
            if table.child_counts[row] or table.is_held(row):
                return False
            parent = table.parents[row]
            return frees(row) or (parent != ROOT_ROW and table.residencies[parent] != NOWHERE and frees(parent))

        for row in self.nvme_policy.victims(eligible):
            self._evict(row)
            doomed = (nvme.regions.slot_bytes_at(each) for each in nvme.erasures.doomed)
            if nvme.regions.free_count(slot_bytes) or slot_bytes in doomed:
                return True
        return self._empty_a_region(slot_bytes)

    def _empty_a_region(self, slot_bytes: int) -> bool:
        """All files are cut for other sizes: give up the one that holds the least, of those where nothing is held and
        nothing is being written."""
        assert self.nvme is not None
        table = self.table
        for region in self.nvme.regions.in_the_way(slot_bytes):
            wanted = region.used_slots()
            places = np.frombuffer(table.residencies, np.int64)
            inside = np.isin(places & ~UNPROVEN, np.array(wanted, np.int64)) & (places != NOWHERE)
            rows = np.flatnonzero(inside).tolist()
            del places, inside
            if len(rows) < len(wanted) or any(table.is_held(row) for row in rows):
                continue
            for row in rows:
                self._evict(row)
            return True
        return False

    def _evict(self, row: int) -> None:
        self._faults.reach("nvme.evict")
        self._counters.add("nvme_evicted_chunks")
        self.forget(row)
        self.withdraw_if_gone(row, MissReason.EVICTED, Tier.NVME)

    # ------------------------------------------------------------ start and stop

    def adopt(self, columns: IndexColumns, *, clean: bool) -> int:
        """Enter what the device holds into the catalog; not ``clean``: a scan found it, it is to be proven. Returns how
        many chunks. Cost: about 3 us each."""
        table, catalog = self.table, self._catalog
        spaces = {number: catalog.spaces.get(*columns.names[number]) for number in set(columns.spaces.tolist())}
        digests, parents = columns.digests, columns.parents
        rows: list[int] = []
        residencies = columns.residencies if clean else columns.residencies | UNPROVEN
        place = 0
        for residency, mark, count, number in zip(
            residencies.tolist(), columns.marks.tolist(), columns.token_counts.tolist(),
            columns.spaces.tolist(), strict=True,
        ):  # fmt: skip
            stop = place + DIGEST_BYTES
            space, digest = spaces[number], digests[place:stop]
            known = space.index.get(digest)
            if known is not None:
                self._alternates.setdefault(known, []).append((residency, mark))
            elif digest != ROOT_DIGEST:
                row = catalog.row_of(space, digest, parents[place:stop], count)
                table.residencies[row] = residency
                table.write_marks[row] = mark
                catalog.publish(row)
                rows.append(row)
            place = stop
        self._order(rows)
        return len(rows)

    def _order(self, rows: list[int]) -> None:
        """Recency as the columns have it, and each run of a chain from its end to its beginning."""
        run: list[int] = []
        for row in rows:
            if run and self.table.parents[row] != run[-1]:
                self.nvme_policy.used(run)
                run = []
            run.append(row)
        self.nvme_policy.used(run)

    def columns(self) -> IndexColumns:
        """What the device holds, for its snapshot: the least recently used first, further copies last."""
        table = self.table
        rows = list(self.nvme_policy.victims(lambda row: table.residencies[row] != NOWHERE))
        copies = [(row, table.residencies[row], table.write_marks[row]) for row in rows]
        copies += [(row, *other) for row, others in self._alternates.items() for other in others]
        rows = [row for row, _, _ in copies]
        parents = [table.parents[row] for row in rows]
        numbers = [table.spaces[row] for row in rows]
        spaces = {number: self._catalog.spaces.numbered[number] for number in dict.fromkeys(numbers)}
        places = {number: place for place, number in enumerate(spaces)}
        return IndexColumns(
            [(space.fingerprint, space.provenance, space.exactness) for space in spaces.values()],
            np.array([residency for _, residency, _ in copies], np.int64),
            np.array([mark for _, _, mark in copies], np.uint64),
            np.array([table.token_counts[row] for row in rows], np.int32),
            np.array([places[number] for number in numbers], np.uint16),
            b"".join(table.digests[row] for row in rows),
            b"".join(ROOT_DIGEST if parent == ROOT_ROW else table.digests[parent] for parent in parents),
        )
