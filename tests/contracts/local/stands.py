"""Every tier there is, each where a test can damage, fail, slow and restart it."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvstore.arena import Arena
from kvstore.chunk import Trust, parse_header
from kvstore.seams import (
    Clock,
    Disk,
    EnvelopeKey,
    EnvelopeRing,
    FaultPoints,
    SystemClock,
    SystemDisk,
    Workers,
    WorkerThreads,
)
from kvstore.seams.devices import DeviceRegion
from kvstore.seams.devices.memory import HostRegion
from kvstore.spec import Encoding
from kvstore.tiers import IndexColumns, LocalTier, Recovered, Residency
from kvstore.tiers.dram import DramTier
from kvstore.tiers.hbm import HbmTier, Pool
from kvstore.tiers.nvme import Directory, NvmeTier, PlainCopies, PosixIO, Regions
from kvstore.tiers.nvme.newest import Newest
from kvstore.tiers.nvme.recovery import ErasedSlot, Gathered, LockedSlot, ScannedSlot, read_slot
from tests.contracts.evictors import OldestFirst
from tests.contracts.wrappers import Faulty, Latency, LocalUnder, Throttle
from tests.fakes import FilesSettings, FilesTier, Switch
from tests.fakes.files import columns_of as columns_of_files
from tests.simulated import BytearrayMemory, LoopClock, SeededRandom, SeededWorkers, SimulatedDisk, simulate

CAPACITY_BYTES = 1 << 20
REGION_BYTES = 64 << 10
"""Small files, so that several slot sizes find room."""
HOME = Path("/nvme")
SEED = 7


def proven(columns: IndexColumns) -> Recovered:
    """All of it is there to stay."""
    return Recovered(columns, np.ones(len(columns), np.bool_))


class Stand:
    """One tier under test, on virtual time. What an implementation cannot do it says with ``can_...``."""

    evictor: OldestFirst
    recovered: Recovered
    can_fail = False
    is_durable = False

    def __init__(self, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self.capacity_bytes = capacity_bytes
        self.tier: LocalTier = self.build()

    def build(self) -> LocalTier:
        raise NotImplementedError

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        async def whole() -> None:
            await self.start()
            await scenario()
            await self.stop()

        simulate(whole(), seed=SEED)

    async def start(self) -> None:
        self.evictor = OldestFirst()
        self.evictor.tier = self.tier
        self.recovered = await self.tier.recover(self.evictor)

    async def stop(self, *, kill: bool = False) -> None:
        """Without ``kill``: a clean stop, for which the tier is told what it holds."""
        await self.tier.close(None if kill else await self.held())

    async def held(self) -> Recovered:
        """What a catalog would say at a clean stop. Memory's goes with it."""
        return proven(IndexColumns())

    def found(self) -> dict[bytes, Residency]:
        """Chain digest -> where it lies, of what the last start found."""
        columns = self.recovered.columns
        return dict(zip(columns.each_digest(), columns.residencies.tolist(), strict=True))

    async def restart(self, *, kill: bool) -> None:
        await self.stop(kill=kill)
        self.tier = self.build()
        await self.start()

    def flip(self, residency: Residency, offset: int) -> None:
        """Damage one byte of a stored copy; ``offset`` counts from its header."""
        raise NotImplementedError

    def fail(self, method: str, times: int | None = 1) -> None:
        """The device answers EIO; ``times`` None: until ``mend``."""
        raise NotImplementedError

    def mend(self) -> None:
        raise NotImplementedError


class FilesStand(Stand):
    """The local tier that only tests have."""

    can_fail = is_durable = True

    def __init__(self, home: Path, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self.settings = FilesSettings(
            directory=home / "files", capacity_bytes=capacity_bytes, switches=home / "switches"
        )
        home.mkdir(parents=True)
        super().__init__(capacity_bytes)

    def build(self) -> LocalTier:
        self.files = FilesTier(self.settings, SeededWorkers(SEED))
        return self.files

    async def held(self) -> Recovered:
        headers = [(each, parse_header(np.fromfile(path, np.uint8))) for each, path in self.files.paths()]
        return proven(columns_of_files(headers))

    def flip(self, residency: Residency, offset: int) -> None:
        flip_in(dict(self.files.paths())[residency], offset)

    def fail(self, method: str, times: int | None = 1) -> None:
        self.files.switches.turn_on(Switch.AWAY)

    def mend(self) -> None:
        self.files.switches.turn_off()


class LatencyStand(FilesStand):
    def build(self) -> LocalTier:
        return LocalUnder(super().build(), Latency(LoopClock(), 0.0005))


class ThrottleStand(FilesStand):
    def build(self) -> LocalTier:
        return LocalUnder(super().build(), Throttle(LoopClock(), 1e8))


class FaultyStand(FilesStand):
    """Fails when it is told to, and is else as good as what it wraps."""

    def build(self) -> LocalTier:
        self._faulty = Faulty(SeededRandom(SEED))
        return LocalUnder(super().build(), self._faulty)

    def fail(self, method: str, times: int | None = 1) -> None:
        self._faulty.unavailable = 1.0

    def mend(self) -> None:
        self._faulty.unavailable = 0.0


class DramStand(Stand):
    def build(self) -> LocalTier:
        arena = Arena(
            BytearrayMemory(), FaultPoints(), capacity_bytes=self.capacity_bytes, region_bytes=self.capacity_bytes
        )
        self.dram = DramTier(arena, SeededWorkers(SEED))
        return self.dram

    def flip(self, residency: Residency, offset: int) -> None:
        for piece in self.dram.placement(residency).pieces:
            if offset < piece.size:
                piece[offset] ^= 1
                return
            offset -= piece.size
        raise AssertionError("nothing there to flip")


class HbmStand(Stand):
    """A pool in the host's memory: the same code as on a device."""

    def build(self) -> LocalTier:
        memory = BytearrayMemory()
        self.region = HostRegion(memory, self.capacity_bytes)
        self.hbm = HbmTier(Pool(OneRegion(self.region), memory, self.capacity_bytes), SeededWorkers(SEED))
        return self.hbm

    def flip(self, residency: Residency, offset: int) -> None:
        self.region.bytes[self.hbm.extent(residency).offset + offset] ^= 1


class OneRegion(NamedTuple):
    """A device that has one region to give, which a test can damage."""

    region: HostRegion
    identity: str = "cpu"

    def allocate(self, byte_count: int) -> DeviceRegion:
        return self.region


def nvme_tier(
    disk: Disk, home: Path, clock: Clock, readers: Workers, writers: Workers, *, capacity_bytes: int = CAPACITY_BYTES,
    region_bytes: int = REGION_BYTES, encoding: Encoding = Encoding.RAW, faults: FaultPoints | None = None,
    keepers: Workers | None = None, trust: Trust | None = None,
) -> NvmeTier:  # fmt: skip
    """An NVMe tier, not recovered yet. Its record of copies without an envelope lies beside its directory."""
    faults = faults or FaultPoints()
    directory, io = Directory(home, disk, faults), PosixIO(disk)
    regions = Regions(home, disk, io, faults, capacity_bytes=capacity_bytes, region_bytes=region_bytes)
    return NvmeTier(
        directory, regions, disk=disk, io=io, readers=readers, writers=writers, keepers=keepers or readers, clock=clock,
        faults=faults, encoding=encoding, plain=PlainCopies(trust, disk, home.parent / "plain" / home.name),
    )  # fmt: skip


def scan(tier: NvmeTier) -> Iterator[ScannedSlot]:
    """Every copy there is, by what the device itself holds. One that cannot be read is left out."""
    for region in tier.regions.by_number.values():
        for slot in range(region.slot_count):
            with suppress(OSError, LockedSlot, ErasedSlot):  # what the stand made unreadable is nobody's chunk
                found = read_slot(tier._io, tier._trust, region, slot)
                if found is not None:
                    yield found


async def columns_of(tier: NvmeTier) -> IndexColumns:
    """What a catalog would leave as the snapshot: here all that the slots in use hold."""
    doomed = set(tier.erasures.doomed)
    gathered = Gathered(Newest(tier._directory), tier._plain)
    for found in scan(tier):
        region, slot = tier.regions.find(found.residency)
        if slot not in {*region.free, *region.quarantined, *region.unerased} and found.residency not in doomed:
            gathered.add(region.path.name, [found])
    return gathered.columns()[0]


class NvmeStand(Stand):
    can_fail = is_durable = True
    encoding = Encoding.RAW
    trust = Trust()

    def __init__(self, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self.disk = SimulatedDisk(SEED)
        super().__init__(capacity_bytes)

    def build(self) -> NvmeTier:
        return nvme_tier(
            self.disk, HOME, LoopClock(), SeededWorkers(SEED), SeededWorkers(SEED + 1),
            capacity_bytes=self.capacity_bytes, encoding=self.encoding, trust=self.trust,
        )  # fmt: skip

    async def held(self) -> Recovered:
        assert isinstance(self.tier, NvmeTier)
        return proven(await columns_of(self.tier))

    async def stop(self, *, kill: bool = False) -> None:
        if kill:
            self.disk.kill()
        else:
            await super().stop()

    def place(self, residency: Residency, offset: int) -> tuple[Path, int]:
        assert isinstance(self.tier, NvmeTier)
        region, slot = self.tier.regions.find(residency)
        return region.path, region.offset(slot) + offset

    def flip(self, residency: Residency, offset: int) -> None:
        self.disk.flip(*self.place(residency, offset))

    def fail(self, method: str, times: int | None = 1) -> None:
        self.disk.fail(method, errno.EIO, path_contains="region", times=times)

    def mend(self) -> None:
        self.disk.mend()


KEYS = EnvelopeRing([EnvelopeKey.derived(b"the key of all stands")])


class Lz4Stand(NvmeStand):
    encoding = Encoding.LZ4


class MacStand(NvmeStand):
    trust = Trust("mac", KEYS)


class AeadStand(NvmeStand):
    trust = Trust("aead", KEYS)


class SealedLz4Stand(Lz4Stand):
    trust = Trust("aead", KEYS)


class _FailingDisk(SystemDisk):
    """The machine's files, and EIO for as many calls as were asked for."""

    def __init__(self) -> None:
        self.failing: dict[str, int | None] = {}

    def _strike(self, method: str) -> None:
        left = self.failing.get(method, 0)
        if left is None or left > 0:
            self.failing[method] = left if left is None else left - 1
            raise OSError(errno.EIO, "injected")

    def pread(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        self._strike("pread")
        return super().pread(descriptor, buffer, offset)

    def pwrite(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        self._strike("pwrite")
        return super().pwrite(descriptor, buffer, offset)

    def sync(self, descriptor: int) -> None:
        self._strike("sync")
        super().sync(descriptor)


class SystemStand(NvmeStand):
    """Real files, threads and time; direct I/O where the file system has it."""

    def __init__(self, home: Path, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self.home = home
        self.system = _FailingDisk()
        Stand.__init__(self, capacity_bytes)

    def build(self) -> NvmeTier:
        return nvme_tier(
            self.system, self.home, SystemClock(), WorkerThreads(2, "read"), WorkerThreads(2, "write"),
            capacity_bytes=self.capacity_bytes,
        )  # fmt: skip

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        async def whole() -> None:
            await self.start()
            await scenario()
            await self.stop()

        asyncio.run(whole())

    async def stop(self, *, kill: bool = False) -> None:
        """Descriptors and locks go with a process; here they are closed, and nothing else is done."""
        await Stand.stop(self, kill=kill)

    def flip(self, residency: Residency, offset: int) -> None:
        flip_in(*self.place(residency, offset))

    def fail(self, method: str, times: int | None = 1) -> None:
        self.system.failing[method] = times

    def mend(self) -> None:
        self.system.failing.clear()


def flip_in(path: Path, place: int) -> None:
    """Flip a bit of a real file."""
    with path.open("r+b", buffering=0) as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


STANDS: dict[str, Any] = {
    "dram": lambda _, **options: DramStand(**options),
    "hbm": lambda _, **options: HbmStand(**options),
    "nvme": lambda _, **options: NvmeStand(**options),
    "nvme lz4": lambda _, **options: Lz4Stand(**options),
    "nvme mac": lambda _, **options: MacStand(**options),
    "nvme aead": lambda _, **options: AeadStand(**options),
    "nvme lz4 aead": lambda _, **options: SealedLz4Stand(**options),
    "nvme on files": lambda home, **options: SystemStand(home, **options),
    "files": lambda home, **options: FilesStand(home, **options),
    "latency": lambda home, **options: LatencyStand(home, **options),
    "throttle": lambda home, **options: ThrottleStand(home, **options),
    "faulty": lambda home, **options: FaultyStand(home, **options),
}
