"""What the controller asks of movement."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from kvstore.arena import Arena, Placement
from kvstore.catalog import Catalog
from kvstore.config import PolicySettings
from kvstore.movement.capacity import Capacity
from kvstore.movement.promotion import Loading, Promotion
from kvstore.movement.residency import Residency
from kvstore.movement.scrub import Scrub
from kvstore.movement.writeback import Writeback
from kvstore.policy import EvictionPolicy
from kvstore.seams import Clock, FaultPoints, Random, TenantKeys, Workers
from kvstore.spec import Durability, MissReason
from kvstore.telemetry import Counters
from kvstore.tiers import TierStatistics
from kvstore.tiers.nvme import NvmeTier

_log = logging.getLogger("kvstore.movement")


class Movement:
    """One tenant's moves. ``revoke_stale``: take back leases that are too old; whether there were any."""

    def __init__(
        self,
        *,
        arena: Arena,
        catalog: Catalog,
        policy: EvictionPolicy,
        keys: TenantKeys,
        clock: Clock,
        random: Random,
        workers: Workers,
        faults: FaultPoints,
        counters: Counters,
        policies: PolicySettings,
        revoke_stale: Callable[[], bool],
    ) -> None:
        self._catalog = catalog
        self._clock = clock
        self._counters = counters
        self.residency = Residency(
            arena=arena, catalog=catalog, policy=policy, keys=keys, faults=faults, counters=counters
        )
        self.capacity = Capacity(arena, self.residency, counters, revoke_stale)
        self.writeback = Writeback(catalog, self.residency, clock, faults, counters)
        self.promotion = Promotion(
            arena=arena, catalog=catalog, residency=self.residency, capacity=self.capacity, workers=workers,
            faults=faults, counters=counters,
        )  # fmt: skip
        self.scrub = Scrub(
            arena=arena, catalog=catalog, residency=self.residency, writeback=self.writeback, clock=clock,
            random=random, workers=workers, counters=counters, policies=policies,
        )  # fmt: skip

    # ------------------------------------------------------------ the device

    async def attach(self, nvme: NvmeTier) -> None:
        """Take a device into use: what it holds becomes visible. Raises Unavailable when it cannot be read."""
        started_s = self._clock.monotonic()
        try:
            columns, clean = await nvme.read_back()
        except BaseException:
            await nvme.close(None)
            raise
        self.residency.nvme = nvme
        nvme.on_full = self.residency.make_room
        count = self.residency.adopt(columns, clean=clean)
        self._counters.add("nvme_recovered_chunks", count)
        _log.info(
            "device attached",
            extra={"chunks": count, "clean": clean, "seconds": round(self._clock.monotonic() - started_s, 3)},
        )

    async def detach(self) -> None:
        """A clean stop of the device, after ``run`` has ended."""
        nvme, self.residency.nvme = self.residency.nvme, None
        if nvme is not None:
            await nvme.erasures.erase_doomed()
            await nvme.close(self.residency.columns())

    def nvme_statistics(self) -> TierStatistics | None:
        """None while there is no device."""
        nvme = self.residency.nvme
        return None if nvme is None else nvme.statistics()

    @property
    def reason(self) -> str:
        """Why chunks stay in memory only; empty while the device takes them."""
        return self.writeback.reason

    @property
    def backlog_count(self) -> int:
        """Chunks that wait for a lower tier or are on their way to it."""
        return self.writeback.backlog

    @property
    def loading_bytes(self) -> int:
        """Room in memory of chunks on their way there."""
        return self.promotion.loading_bytes

    def retry(self) -> None:
        """Try again what a lower tier refused, once it had some time."""
        self.writeback.retry()

    async def run(self) -> None:
        """Everything that goes on without being asked, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.writeback.run())
            group.create_task(self.promotion.run())
            group.create_task(self.scrub.run())

    # ------------------------------------------------------------ stores

    def allocate(
        self, piece_bytes: tuple[int, ...], keep: frozenset[int], *, evict_unwritten: bool = True
    ) -> Placement | None:
        """Room in memory for a chunk. See ``Capacity.allocate``."""
        return self.capacity.allocate(piece_bytes, keep, evict_unwritten=evict_unwritten)

    def stored(self, row: int, placement: Placement, mark: int) -> None:
        """A store's chunk is whole, in memory: make it visible. ``mark``: the first 8 bytes of its write id."""
        self._catalog.table.arena[row] = placement
        self._catalog.table.write_marks[row] = mark
        self._catalog.publish(row)
        self.residency.arena_policy.used([row])

    def write_down(self, row: int) -> None:
        """Have the tiers below take a chunk that memory has, as their settings want it."""
        self.writeback.add(row)

    @property
    def is_making_room(self) -> bool:
        """Whether what is on its way to a lower tier makes room in memory sooner or later."""
        return self.writeback.is_moving

    async def progress(self, timeout_s: float) -> None:
        """Wait until some chunk is through to a lower tier, one way or the other, at most so long."""
        await self.writeback.progress(timeout_s)

    async def settle(self, rows: Sequence[int], timeout_s: float) -> tuple[Durability, str, bool]:
        """See ``Writeback.settle``."""
        return await self.writeback.settle(rows, timeout_s)

    async def prove(self, rows: Sequence[int], timeout_s: float) -> None:
        """See ``Scrub.prove``."""
        await self.scrub.prove(rows, timeout_s)

    # ------------------------------------------------------------ fetches

    def bring(
        self, rows: Sequence[int], keep: frozenset[int], layers: frozenset[int] = frozenset()
    ) -> tuple[list[Loading | None], MissReason]:
        """See ``Promotion.begin``."""
        return self.promotion.begin(rows, keep, layers)

    def placement(self, row: int) -> Placement:
        """Where a chunk lies in memory, which has it."""
        return self._catalog.table.arena[row]

    def are_in_memory(self, rows: Sequence[int]) -> bool:
        """Whether memory has all of these."""
        return all(map(self._catalog.table.arena.__contains__, rows))

    def used(self, chain: Sequence[int]) -> None:
        """A chain was stored or read, root first."""
        self.residency.used(chain)

    # ------------------------------------------------------------ copies go

    def superseded(self, row: int) -> None:
        """Another chunk has all that this one has: in every tier it is the first to go when room is needed."""
        self.residency.superseded(row)

    def remove(self, row: int, reason: MissReason) -> None:
        """Give up every copy."""
        self.residency.remove(row, reason)

    async def supersede(self, writes: Mapping[bytes, int], wait_s: float) -> None:
        """Before other writes take the place of what was removed (storage key -> first 8 bytes of the write id): no
        start brings that back. Raises KVStoreError."""
        await self.residency.supersede(writes, wait_s)
