"""One process: from recovery to its end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from kvstore.arena import Arena
from kvstore.catalog import NOWHERE, ChunkTable, Copies, MappedCopies
from kvstore.chunk import Trust
from kvstore.config import LimitSettings, PolicySettings
from kvstore.controller import Controller, Parts
from kvstore.errors import UNREGISTERED, Exhausted, InvalidRequest, KVStoreError
from kvstore.keys import fingerprint
from kvstore.policy import LeastRecentlyUsed
from kvstore.seams import EnvelopeKey, EnvelopeRing, FaultPoints, TenantKeys
from kvstore.spec import Encoding
from kvstore.telemetry import Counters
from kvstore.tiers.nvme import Directory, NvmeTier, PlainCopies, PosixIO, Regions
from tests.sim.cloud import Cloud
from tests.sim.disk import DIRECTORY, RECORD, ProcessDisk
from tests.sim.models import OWN_SPECS
from tests.sim.movers import Movers
from tests.sim.oracle import Oracle
from tests.sim.trace import SimulationFailure, Trace
from tests.sim.warm import Processors
from tests.simulated import LoopClock, SeededRandom, SimulatedDisk
from tests.simulated.disk import DiskStopped

KIB = 1024
DEADLINE_S = 10.0
CROWDED_EVERY = 4
CANCELLED_S_MAX = 300.0
"""Simulated seconds in which a task ends that was cancelled: longer than any job takes."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a service is set up; drawn once per seed. ``file_system_bytes`` None: room without end."""

    arena_bytes: int = 144 * KIB
    arena_region_bytes: int = 144 * KIB
    device_bytes: int = 400 * KIB
    region_bytes: int = 64 * KIB
    file_system_bytes: int | None = None
    encoding: Encoding = Encoding.RAW
    is_write_through: bool = False
    scrub_bytes_per_s: int = 0
    canary_interval_s: float = 0.0
    lease_age_s_max: float = 60.0
    group_bytes: int = 4 << 20
    newest_count_max: int = 4096
    envelope: str = "none"

    @staticmethod
    def drawn(chance: random.Random) -> Setup:
        arena = chance.randrange(128, 224, 4) * KIB
        device = chance.randrange(280, 600, 4) * KIB
        return Setup(
            arena_bytes=arena,
            arena_region_bytes=chance.choice((arena, 64 * KIB)),
            device_bytes=device,
            region_bytes=chance.choice((48, 64, 100, 128, 1024)) * KIB,
            file_system_bytes=chance.choice((None, None, device // 2)),
            encoding=chance.choice((Encoding.RAW, Encoding.RAW, Encoding.LZ4)),
            is_write_through=chance.random() < 0.25,
            scrub_bytes_per_s=chance.choice((0, 64 * KIB, 1024 * KIB)),
            canary_interval_s=chance.choice((0.0, 3.0)),
            lease_age_s_max=chance.choice((2.0, 60.0)),
            group_bytes=chance.choice((1, 4 << 20)),
            newest_count_max=chance.choice((4096, 4096, 2)),
        )


class Life:
    """A controller with everything below it. ``over`` is set when the process ended."""

    def __init__(
        self, setup: Setup, disk: SimulatedDisk, oracle: Oracle, trace: Trace, chance: random.Random, seed: int,
        cloud: Cloud | None = None,
    ) -> None:  # fmt: skip
        self.setup, self.oracle, self.trace, self.cloud, self.seed = setup, oracle, trace, cloud, seed
        self.trust = Trust(setup.envelope, EnvelopeRing([EnvelopeKey.derived(b"the key of all lives")]))
        self.over = asyncio.Event()
        self.disk = ProcessDisk(disk, chance, trace, self.over.set)
        self.movers = Movers(chance)
        self.readers, self.writers, self.keepers = self.device_workers = tuple(Movers(chance) for _ in range(3))
        self.disk.may_call = lambda: any(workers.is_inside for workers in self.device_workers)
        self.faults = FaultPoints()
        self.processors = memory = Processors(self.faults)
        self.arena = Arena(memory, self.faults, capacity_bytes=setup.arena_bytes, region_bytes=setup.arena_region_bytes)
        limits = LimitSettings(
            leased_bytes_max=setup.arena_bytes, pin_bytes_max=0, reservation_age_s_max=15.0,
            lease_age_s_max=setup.lease_age_s_max, model_count_max=len(OWN_SPECS) if self.is_crowded else 256,
        )  # fmt: skip
        self.parts = Parts(
            arena=self.arena, policy=LeastRecentlyUsed, limits=limits, clock=LoopClock(), random=SeededRandom(seed),
            memory=memory, workers=self.movers, keys=TenantKeys(), faults=self.faults, counters=Counters(),
            deadline_s=DEADLINE_S, is_write_through=setup.is_write_through,
            policies=PolicySettings(
                scrub_bytes_per_s=setup.scrub_bytes_per_s, canary_interval_s=setup.canary_interval_s
            ),
        )  # fmt: skip
        self.controller = Controller(self.parts)
        self.tasks: list[asyncio.Task[None]] = []
        self._running: asyncio.Task[None] | None = None

    @property
    def is_crowded(self) -> bool:
        """True where strangers' models take the places of models that nothing needs."""
        return self.seed % CROWDED_EVERY == CROWDED_EVERY - 1

    def registered_again(self, error: InvalidRequest) -> str:
        """Register a model that was forgotten, as clients do. Return what came of it; "": the error is another one."""
        if not self.is_crowded or UNREGISTERED not in error.fields:
            return ""
        spec = next(each for each in OWN_SPECS if fingerprint(each, each.kind).hex() == error.fields[UNREGISTERED])
        try:
            self.controller.register_model(spec)
        except Exhausted:
            return "its model was forgotten, and has no place"
        return "its model was forgotten"

    @property
    def table(self) -> ChunkTable:
        return self.controller.parts.catalog.table

    @property
    def is_over(self) -> bool:
        return self.disk.is_over

    @property
    def nvme(self) -> NvmeTier | None:
        tier = None if self.device is None else self.device.tier
        assert tier is None or isinstance(tier, NvmeTier)
        return tier

    @property
    def memory(self) -> MappedCopies:
        return self.controller.parts.movement.memory

    @property
    def device(self) -> Copies | None:
        """Its copies; None while there is no device."""
        return next(iter(self.table.copies[1:]), None)

    def residency(self, row: int) -> int:
        """Where the device keeps a chunk; NOWHERE."""
        return NOWHERE if self.device is None else self.device.residency(row)

    # ------------------------------------------------------------ start

    async def start(self) -> bool:
        """Recover and serve. False when the process ended on the way. Raises nothing that the service must not."""
        try:
            await self.controller.parts.movement.attach(self._tier())
        except DiskStopped:
            return False
        except (KVStoreError, OSError) as error:
            self.trace.add("service", f"runs without its device: {error}")
            self.trace.check(self.disk.injected, f"the device was refused: {error}")
        for use in self.cloud.uses() if self.cloud is not None else ():
            self.controller.parts.movement.attach_shared(use)
        self.oracle.watch(self)
        for spec in OWN_SPECS:
            self.controller.register_model(spec)
        self.oracle.recovered(self)
        self.disk.is_serving = True
        self._running = asyncio.get_running_loop().create_task(self.controller.run())
        self._running.add_done_callback(self._ran)
        return True

    def _tier(self) -> NvmeTier:
        setup, io = self.setup, PosixIO(self.disk)
        directory = Directory(DIRECTORY, self.disk, self.faults)
        regions = Regions(
            DIRECTORY, self.disk, io, self.faults,
            capacity_bytes=setup.device_bytes, region_bytes=setup.region_bytes,
        )  # fmt: skip
        self.oracle.watch_room(regions)
        return NvmeTier(
            directory, regions, disk=self.disk, io=io, readers=self.readers, writers=self.writers,
            keepers=self.keepers, clock=LoopClock(), faults=self.faults, encoding=setup.encoding,
            plain=PlainCopies(self.trust, self.disk, RECORD),
        )  # fmt: skip

    def _ran(self, task: asyncio.Task[None]) -> None:
        """The service's own tasks never end by themselves."""
        error = None if task.cancelled() else task.exception()  # asked in any case: else asyncio prints it
        if task.cancelled() or self.is_over:
            self.over.set()
            return
        failures = [error] if not isinstance(error, BaseExceptionGroup) else list(error.exceptions)
        while any(isinstance(each, BaseExceptionGroup) for each in failures):
            failures = [
                inner
                for each in failures
                for inner in (each.exceptions if isinstance(each, BaseExceptionGroup) else (each,))
            ]
        if not all(isinstance(each, DiskStopped) for each in failures):
            self.trace.failure = self.trace.failure or error
            if not any(isinstance(each, SimulationFailure) for each in failures):
                self.trace.add("FAILURE", f"the service ended: {failures[0]!r}")
        self.over.set()

    # ------------------------------------------------------------ end

    async def unless_over(self, coroutine: Coroutine[Any, Any, None]) -> bool:
        """Do something as long as the process lives. False when it did not live to the end of it. Raises what that
        raised, unless the process had ended."""
        loop = asyncio.get_running_loop()
        doing, over = loop.create_task(coroutine), loop.create_task(self.over.wait())
        await asyncio.wait([doing, over], return_when=asyncio.FIRST_COMPLETED)
        over.cancel()
        if self.over.is_set() or not doing.done():
            self.tasks.append(doing)
            return False
        await doing
        return True

    async def stop(self) -> bool:
        """A clean stop, as the server does it. False when the process ended on the way."""
        await self.controller.drain(1.0)
        self.disk.is_serving = False
        await self._cancelled([self._running])
        await self.controller.close_sessions()
        try:
            await self.controller.parts.movement.detach()
        except DiskStopped:
            return False
        self.movers.close()
        self.end()
        return True

    def end(self) -> None:
        """The process is gone, whatever it was doing."""
        self.disk.is_over = True
        for movers in (self.movers, *self.device_workers):
            movers.die()
        self.over.set()

    async def buried(self) -> None:
        """Let every task of a process that is gone come to its end."""
        self.end()
        await self._cancelled([*self.tasks, self._running])

    async def _cancelled(self, tasks: list[asyncio.Task[None] | None]) -> None:
        """Cancel these tasks, and wait for their ends. One that goes on all the same would keep a real service from
        stopping, and this run from ending."""
        alive = [task for task in tasks if task is not None]
        for task in alive:
            task.cancel()
        left = (await asyncio.wait(alive, timeout=CANCELLED_S_MAX))[1] if alive else ()
        self.trace.check(not left, f"{CANCELLED_S_MAX} s after they were cancelled these tasks go on: {left}")
