"""A suite that finds nothing proves nothing: the same crash loop that passes on the tier as it is fails on tiers that
were broken on purpose, one promise each.

The loop: writers store chunks until the device is full, evict, store into the slots that come free, read, erase, and
crash in the middle; the next life finds what it can. The oracle is a dict of what was acknowledged and not removed
since: each of those chunks must come back to the bit, and nothing else may come back at all.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest

from kvstore.errors import DataLoss, Exhausted, KVStoreError
from kvstore.seams import FaultPoints
from kvstore.tiers import Residency
from kvstore.tiers.nvme import NvmeTier, Regions
from kvstore.tiers.nvme.io import erase_at
from kvstore.tiers.nvme.slots import RegionFile
from kvstore.tiers.nvme.sync import GroupSync
from tests.contracts.chunks import SMALL, Chunk, balance, chunk
from tests.contracts.evictors import KeepsAll
from tests.contracts.local.stands import HOME, nvme_tier, scan
from tests.simulated import DiskStopped, LoopClock, SeededWorkers, SimulatedDisk, simulate

SEEDS = range(12)
LIVES = 5
SLOTS = 8


class Broken(AssertionError):
    """A promise was not kept."""


class Loop:
    """One disk, several lives. ``kept`` is the oracle: number -> (chunk, where)."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.seed = seed
        self.disk = SimulatedDisk(seed)
        self.kept: dict[int, tuple[Chunk, Residency]] = {}
        self.erased: set[bytes] = set()
        self.busy: set[int] = set()
        self.last = 0
        self.acknowledged = self.reads = 0

    async def run(self) -> None:
        for life in range(LIVES):
            async with self.tier(life) as tier:
                await self.verify(tier)
                self.disk.stop_after = self.disk.steps + self.chance.randrange(40, 120)
                self.stopped = False
                await asyncio.gather(*(self.worker(tier) for _ in range(5)))
                balance(tier)
            self.disk.crash()
        assert self.acknowledged > LIVES * 5
        assert self.reads > LIVES * 5

    @asynccontextmanager
    async def tier(self, life: int) -> AsyncIterator[NvmeTier]:
        tier = nvme_tier(
            self.disk, HOME, LoopClock(), SeededWorkers(self.seed + life), SeededWorkers(self.seed + life + 100),
            capacity_bytes=4096 + SLOTS * SMALL.total_bytes, faults=FaultPoints(), region_bytes=1 << 20,
        )  # fmt: skip
        columns = (await tier.recover(KeepsAll())).columns
        known = {residency for _, residency in self.kept.values()}
        for residency in columns.residencies.tolist():
            if residency not in known:
                tier.remove([residency])  # evicted before the crash, or never acknowledged
        yield tier

    async def verify(self, tier: NvmeTier) -> None:
        """After a crash: the acknowledged are there; what was erased is not."""
        for found in scan(tier):
            if found.header.write_id in self.erased:
                raise Broken("an erased chunk came back")
        for what, residency in self.kept.values():
            await self.read(tier, what, residency)

    async def worker(self, tier: NvmeTier) -> None:
        try:
            for _ in range(1000):
                if self.stopped:
                    return
                await asyncio.sleep(self.chance.uniform(0, 0.001))
                await self.chance.choices((self.store, self.fetch, self.evict, self.erase), (5, 4, 2, 1))[0](tier)
        except DiskStopped:
            self.stopped = True
        except KVStoreError:
            if not self.stopped:  # else it waited for somebody whose call was the last
                raise

    async def store(self, tier: NvmeTier) -> None:
        self.last += 1
        number, what = self.last, chunk(self.last % 20, write=self.last)
        try:
            residency = await tier.write(what.header, what.layout, what.pieces)
        except Exhausted:
            await self.evict(tier)
            return
        if self.stopped:
            return  # nobody heard of it
        self.acknowledged += 1
        self.kept[number] = what, residency

    def pick(self) -> int | None:
        """A chunk that nobody removes at present."""
        there = sorted(self.kept.keys() - self.busy)
        return self.chance.choice(there) if there else None

    async def fetch(self, tier: NvmeTier) -> None:
        number = self.pick()
        if number is not None:
            await self.read(tier, *self.kept[number], still=lambda: number in self.kept)

    async def read(
        self, tier: NvmeTier, what: Chunk, residency: Residency, still: Callable[[], bool] = lambda: True
    ) -> None:
        """Linger, open, linger, read. The slot may have another chunk by the time it is opened: then nothing is served.
        What was opened may be removed meanwhile: its bytes stay its own."""
        target = [np.zeros(slab.byte_count, np.uint8) for slab in what.layout.slabs]
        is_ours = False
        await asyncio.sleep(self.chance.choice((0.0, 0.0, 0.002)))
        was_there = still()
        try:
            stored = await tier.open(what.any_write, residency)
            is_ours = was_there
            if stored.header.storage_key != what.header.storage_key:
                raise Broken("another chunk was taken for this one")
            if stored.header.write_id != what.header.write_id and still():
                raise Broken("the header of another write was taken for this one's")
            try:
                await asyncio.sleep(self.chance.uniform(0, 0.002))
                await stored.read(range(len(target)), target)
            finally:
                stored.close()
        except DataLoss as error:
            if is_ours or still():
                raise Broken(f"an acknowledged chunk is lost: {error}") from error
            return
        except KVStoreError:
            return
        if stored.header.write_id != what.header.write_id:
            return  # the same chunk, written anew
        if any((one != other).any() for one, other in zip(target, what.pieces[1:], strict=True)):
            raise Broken("other bytes were served")
        self.reads += 1

    async def evict(self, tier: NvmeTier) -> None:
        number = self.pick()
        if number is not None:
            tier.remove([self.kept.pop(number)[1]])

    async def erase(self, tier: NvmeTier) -> None:
        number = self.pick()
        if number is None:
            return
        self.busy.add(number)
        what, residency = self.kept.pop(number)
        try:
            tier.remove([residency], erase=True)
            await tier.tidy()
            if not self.stopped:
                self.erased.add(what.header.write_id)
        finally:
            self.busy.discard(number)


def crash_loop(seed: int) -> None:
    simulate(Loop(seed).run(), seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_tier_as_it_is_keeps_its_promises(seed: int) -> None:
    crash_loop(seed)


def without_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Acknowledges what no fdatasync covered."""
    monkeypatch.setattr(SimulatedDisk, "sync", lambda disk, descriptor: None)


def slots_reused_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives a slot to the next chunk while somebody reads it."""

    def give_back(regions: Regions, region: RegionFile, slot: int) -> None:
        region.free.append(slot)

    monkeypatch.setattr(Regions, "give_back", give_back)


def without_header_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes what lies in the slot for what was asked for. The bytes of another write pass their own checksums."""
    monkeypatch.setattr("kvstore.tiers.nvme.reading.check_header", lambda name, header: header)


def acknowledged_before_the_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Syncs, but later than it says."""

    async def wait(sync: GroupSync, region: RegionFile, failures: int) -> None:
        asyncio.get_running_loop().call_later(0.01, sync._disk.sync, region.descriptor)

    monkeypatch.setattr(GroupSync, "wait", wait)


def erased_without_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """An erasure that a power cut takes back."""

    async def erase(tier: NvmeTier, region: RegionFile, *slots: int) -> None:
        await tier._run(tier._writers, erase_at, tier._io, region.descriptor, [*map(region.offset, slots)])

    monkeypatch.setattr(NvmeTier, "_erase", erase)


@pytest.mark.parametrize(
    "mutant",
    [without_sync, slots_reused_early, without_header_check, acknowledged_before_the_sync, erased_without_sync],
    ids=lambda mutant: mutant.__name__,
)
def test_a_broken_tier_is_found_out(mutant: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        mutant(monkeypatch)
        found = fails(crash_loop)
    assert found, f"{mutant.__name__}: {mutant.__doc__} No seed of {len(SEEDS)} finds it."


def fails(run: Callable[[int], None]) -> int:
    """For how many seeds the loop finds something."""
    count = 0
    for seed in SEEDS:
        try:
            run(seed)
        except Broken:
            count += 1
        except BaseExceptionGroup as group:
            count += group.subgroup(Broken) is not None
    return count
