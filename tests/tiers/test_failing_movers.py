"""Every job of a life with a device fails in turn, in every way: what is served is right to the bit, what was promised
stays, and the service goes on."""

from __future__ import annotations

import os
from typing import Any

import pytest

from kvstore.errors import KVStoreError
from kvstore.seams import Workers
from kvstore.spec import Durability, Encoding
from tests.faulty_workers import WAYS, FaultyWorkers
from tests.simulated import InlineWorkers, SeededWorkers
from tests.tiers.service import DeviceService

PATHS = ((1, 2), (3,))
FAILURES = (MemoryError, RuntimeError)
"""What the ways of failing raise that is no error of ours: it may stop a start."""
STRIDE = 1 if os.environ.get("KVSTORE_TEST_SCALE") == "full" else 12


class Plan:
    """Which job of all a service's movers fails."""

    def __init__(self, way: Any = None, target: int = 0) -> None:
        self.way, self.target = way, target
        self.names: list[str] = []

    def submit(self, workers: Workers, function: Any, args: tuple[object, ...]) -> Any:
        number = len(self.names)
        one = FaultyWorkers(workers)
        if self.way is not None and number == self.target:
            one.fail(self.way)
        try:
            return one.submit(function, *args)
        finally:
            self.names += one.names


class Planned:
    """Movers that follow a plan."""

    def __init__(self, plan: Plan, workers: Workers) -> None:
        self._plan, self._workers = plan, workers

    def submit(self, function: Any, /, *args: object) -> Any:
        return self._plan.submit(self._workers, function, args)

    def close(self) -> None:
        self._workers.close()


class FailingService(DeviceService):
    """A life of stores, reads, checks and restarts, of which one job fails."""

    def __init__(self, plan: Plan, encoding: Encoding) -> None:
        super().__init__(encoding=encoding)
        self.plan = plan
        self.promised: list[tuple[int, ...]] = []

    def movers(self, seed: int) -> Workers:
        return Planned(self.plan, SeededWorkers(seed) if seed else InlineWorkers())

    async def live(self) -> None:
        for path in PATHS:
            await self.store(self.session, *path)
            if (await self.settled(*path)).durability is Durability.LOCAL:
                self.promised.append(path)
        self.forget_memory()
        for path in PATHS:
            await self.fetch(*path)
        await self.look()
        await self.again(kill=True)
        for path in PATHS:
            await self.store(self.session, *path)
        await self.look()
        await self.again(kill=False)
        self.plan.way = None
        for path in self.promised:
            assert (await self.fetch(*path))[0] == len(path), "what was promised is there"
        for path in PATHS:
            await self.store(self.session, *path)
            assert (await self.settled(*path)).durability is Durability.LOCAL, "and the device takes chunks"
            assert (await self.fetch(*path))[0] == len(path)
        await self.clock.sleep(1.0)  # what was read is memory's by then
        self.balance()
        stats = self.controller.stats()
        assert (stats.reserved_bytes, stats.loading_bytes, stats.lease_count, stats.reservation_count) == (0, 0, 0, 0)
        assert self._group is not None
        assert not self._group.done(), "the service goes on"

    async def look(self) -> None:
        """What the scrub does, and a canary."""
        movement = self.controller.parts.movement
        for copies in (self.mapped, self.device):
            for row in list(copies.rows()):
                assert await movement.checks.check(copies, row) is not False
        await movement.canaries.canary(self.nvme)

    async def again(self, *, kill: bool) -> None:
        """A restart. One whose recovery fails is done again: the device is there next time."""
        try:
            await self.restart(kill=kill)
        except (KVStoreError, *FAILURES):
            await self.start()


def live(plan: Plan, encoding: Encoding) -> FailingService:
    service = FailingService(plan, encoding)
    service.run(service.live)
    return service


@pytest.mark.parametrize("encoding", [Encoding.RAW, Encoding.LZ4])
def test_each_job_of_a_life_fails_in_turn(encoding: Encoding) -> None:
    plan = Plan()
    service = live(plan, encoding)
    assert service.promised == list(PATHS)
    jobs = plan.names
    expected = {"move", "erase_at", "are_right", "GroupSync.wait.<locals>.<lambda>", "read_header", "_scan_slots"}
    expected |= {"write_runs", "Regions.create", "rewrite", "read_slabs"}
    expected |= {"encode_chunk", "_checksums"} if encoding is Encoding.LZ4 else set()
    assert expected <= set(jobs), "the life has every kind of job"
    first_of_each = {jobs.index(name) for name in set(jobs)}
    for number in range(len(jobs)):
        for shift, way in enumerate(WAYS):
            if (number + shift) % STRIDE == 0 or number in first_of_each:
                failed = Plan(way, number)
                try:
                    live(failed, encoding)
                except BaseException as error:
                    error.add_note(f"job {number}, {failed.names[number:][:1]}, {way.__name__}")
                    raise
