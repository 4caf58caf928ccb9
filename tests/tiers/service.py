"""A service with a device, over any number of lives: what the disk keeps is all that one leaves to the next."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self

import numpy as np

from kvstore.arena import Arena
from kvstore.catalog import Copies, MappedCopies
from kvstore.chunk import Trust, layout_of, parse_header
from kvstore.config import LimitSettings, PolicySettings
from kvstore.controller import Controller, Parts, Session, Settled, StoreResult
from kvstore.errors import KVStoreError
from kvstore.policy import LeastRecentlyUsed
from kvstore.seams import Clock, FaultPoints, TenantKeys, Workers
from kvstore.spec import Durability, Encoding, MissReason, ModelSpec
from kvstore.telemetry import Counters
from kvstore.tiers.nvme import NvmeTier
from tests.contracts.local.stands import nvme_tier
from tests.controller.service import Service
from tests.simulated import (
    BytearrayMemory,
    InlineWorkers,
    LoopClock,
    SeededRandom,
    SeededWorkers,
    SimulatedDisk,
    simulate,
)
from tests.specs import small_spec

HOME = Path("/nvme")
KIB = 1024
SEED = 11


class DeviceService(Service):
    """``arena_chunks`` small chunks fit memory; ``capacity_bytes`` is the device's. Chunks are written and read under
    virtual time. Nothing goes on by itself: no scrub, no canary."""

    controller: Controller
    nvme: NvmeTier

    def __init__(
        self, *, arena_chunks: int = 16, capacity_bytes: int = 512 * KIB, region_bytes: int = 64 * KIB,
        encoding: Encoding = Encoding.RAW, disk: SimulatedDisk | None = None, spec: ModelSpec | None = None,
        trust: Trust | None = None,
    ) -> None:  # fmt: skip
        """``trust``: what the device's copies are sealed with; a test may change it between two lives."""
        self.disk = disk or SimulatedDisk(SEED)
        self.capacity_bytes, self.region_bytes, self.encoding = capacity_bytes, region_bytes, encoding
        self.spec, self.trust = spec or small_spec(), trust
        self.layout = layout_of(self.spec, self.spec.kind, self.spec.chunk_tokens)
        self.arena_bytes = arena_chunks * self.layout.total_bytes
        self.lives = 0
        self._group: asyncio.Task[Any] | None = None

    def of(self, spec: ModelSpec) -> Self:
        """The same service, for chunks of another model."""
        other = copy.copy(self)
        other.spec = spec
        other.layout = layout_of(spec, spec.kind, spec.chunk_tokens)
        other.model = self.controller.register_model(spec)
        return other

    # ------------------------------------------------------------ lives

    def movers(self, seed: int) -> Workers:
        """Byte movers of a life that begins: the device's by their seed, memory's at once (0)."""
        return SeededWorkers(seed) if seed else InlineWorkers()

    def time(self) -> Clock:
        """Which a life has."""
        return LoopClock()

    async def start(self) -> None:
        """Raises what attaching the device raises."""
        self.lives += 1
        self.clock, self.faults, self.memory = self.time(), FaultPoints(), BytearrayMemory()
        self.arena = Arena(
            self.memory, self.faults, capacity_bytes=self.arena_bytes, region_bytes=self.arena_bytes
        )  # fmt: skip
        limits = LimitSettings(leased_bytes_max=self.arena_bytes, pin_bytes_max=self.arena_bytes)
        self.parts = Parts(
            arena=self.arena, policy=LeastRecentlyUsed, limits=limits, clock=self.clock,
            random=SeededRandom(self.lives), memory=self.memory, workers=self.movers(0), keys=TenantKeys(),
            faults=self.faults, counters=Counters(),
            policies=PolicySettings(scrub_bytes_per_s=0, canary_interval_s=0),
        )  # fmt: skip
        self.controller = Controller(self.parts)
        self.nvme = nvme_tier(
            self.disk, HOME, self.clock, self.movers(self.lives), self.movers(100 + self.lives),
            capacity_bytes=self.capacity_bytes, region_bytes=self.region_bytes, encoding=self.encoding,
            faults=self.faults, trust=self.trust,
        )  # fmt: skip
        await self.attach()
        self.model = self.controller.register_model(self.spec)
        self._group = asyncio.ensure_future(self.controller.run())
        self.session: Session = self.controller.open_session()

    async def attach(self) -> None:
        """Give the tiers below memory to a life that begins."""
        await self.controller.parts.movement.attach(self.nvme)

    async def stop(self, *, kill: bool = False) -> None:
        if self._group is not None:
            self._group.cancel()
            await asyncio.gather(self._group, return_exceptions=True)
            self._group = None
        if kill:
            self.disk.kill()
        else:
            await self.controller.parts.movement.detach()

    async def restart(self, *, kill: bool = False, meanwhile: Callable[[], None] = lambda: None) -> None:
        """``meanwhile`` is what befalls the disk while nobody uses it."""
        await self.stop(kill=kill)
        meanwhile()
        await self.start()

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        async def whole() -> None:
            await self.start()
            try:
                await scenario()
            finally:
                await self.stop(kill=True)

        simulate(whole(), seed=SEED)

    # ------------------------------------------------------------ use

    def body(self, digest: bytes) -> Any:
        """Every strip's bytes follow from the chunk's digest and the place."""
        body = np.zeros(self.layout.body_bytes, np.uint8)
        noise = np.random.default_rng(int.from_bytes(digest[:8], "little")).bytes(self.layout.body_bytes)
        for offset, length in zip(self.layout.strip_offsets.tolist(), self.layout.strip_lengths.tolist(), strict=True):
            body[offset : offset + length] = np.frombuffer(noise, np.uint8, length, offset)
        return body

    async def settled(self, *path: int) -> Settled:
        return await self.controller.settle(self.query(*path), 60.0)

    async def keep(self, *path: int) -> StoreResult:
        """Store, and wait until the device has it."""
        done = await self.store(self.session, *path)
        settled = await self.settled(*path)
        assert (done.committed_count, settled.durability) == (len(path), Durability.LOCAL), settled
        return done

    async def fetch(self, *path: int) -> tuple[int, MissReason]:
        """How many chunks came, every byte compared, and why no more did."""
        query = self.query(*path)
        result = await self.controller.fetch_wide(self.session, query)
        lost: dict[int, MissReason] = {}
        async for arrivals in self.controller.arrivals(result, None):
            lost.update((each.position, each.lost) for each in arrivals if each.lost)
        for position, resident in enumerate(result.chunks):
            if position in lost:
                continue
            digest = query.digests[resident.chain_index]
            assert parse_header(resident.placement.pieces[0], self.layout).chain_digest == digest
            assert (np.concatenate(resident.placement.pieces[1:]) == self.body(digest)).all()
        self.controller.release(self.session, [result.lease_id])
        if lost:
            return min(lost), lost[min(lost)]
        return result.hit_count, result.reason

    @property
    def mapped(self) -> MappedCopies:
        return self.controller.parts.movement.memory

    @property
    def device(self) -> Copies:
        return self.controller.parts.catalog.table.copies[1]

    def forget_memory(self) -> None:
        """From here on what the device has is read from there."""
        for row in [row for row in self.mapped.rows() if row in self.device]:
            self.drop(row)

    async def look(self, row: int) -> bool | None:
        """Return True when the device's copy is what it was. See ``Checks.check``."""
        return await self.controller.parts.movement.checks.check(self.device, row)

    def drop(self, row: int) -> None:
        """Memory gives a chunk up."""
        self.controller.parts.movement.removal.drop(self.mapped, row, MissReason.EVICTED)

    # ------------------------------------------------------------ the disk

    def region_files(self) -> list[Path]:
        return [HOME / name for name in self.disk.names(HOME) if name.startswith("region-")]

    def region_bytes_used(self) -> int:
        return sum(len(self.disk.read_file(path)) for path in self.region_files())

    def place(self, *path: int) -> tuple[Path, int]:
        """Where the last chunk of a path lies: file, and offset of its header."""
        controller = self.controller
        namespace = controller.parts.catalog.model(self.model).namespace(None, self.query(*path).exactness)
        row = namespace.index[self.query(*path).digests[-1]]
        region, slot = self.nvme.regions.find(self.device.residency(row))
        return region.path, region.offset(slot)

    def flip(self, *path: int, offset: int = 0) -> None:
        file, place = self.place(*path)
        self.disk.flip(file, place + offset)

    def counters(self) -> dict[str, int]:
        return self.controller.stats().counters

    def balance(self) -> None:
        now = self.nvme.statistics()
        parts = now.allocated_bytes + now.free_bytes + now.quarantined_bytes + now.overhead_bytes
        assert now.file_bytes == parts <= now.capacity_bytes == self.capacity_bytes
        assert now.file_bytes + self.nvme.regions.lost_bytes == self.region_bytes_used() <= self.capacity_bytes
        assert now.chunk_count >= len(list(self.device.rows()))


async def refused(service: DeviceService) -> KVStoreError:
    """Why a start is refused."""
    try:
        await service.start()
    except KVStoreError as error:
        return error
    raise AssertionError("it started")
