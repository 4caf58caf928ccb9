"""What the controller asks of movement."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvstore.arena import Arena, Placement
from kvstore.catalog import Catalog, Copies, MappedCopies
from kvstore.config import PolicySettings
from kvstore.movement.canary import Canaries
from kvstore.movement.checks import Checks
from kvstore.movement.eviction import Eviction
from kvstore.movement.loads import Loading, Loads
from kvstore.movement.names import ChunkNames
from kvstore.movement.recovery import adopt, held_by
from kvstore.movement.removal import Removal
from kvstore.movement.room import Room
from kvstore.movement.shared import Beyond, SharedTarget
from kvstore.movement.targets import LocalTarget, Target
from kvstore.movement.writes import Writes
from kvstore.policy import EvictionPolicy
from kvstore.seams import Clock, FaultPoints, Random, TenantKeys, Workers
from kvstore.spec import Durability, MissReason
from kvstore.telemetry import Counters
from kvstore.tiers import LocalTier, SharedTier, TierStatistics
from kvstore.tiers.dram import DramTier

_log = logging.getLogger("kvstore.movement")


@dataclass(frozen=True, kw_only=True)
class MovementParts:
    """What movement is made of. ``policy`` makes one for a tier."""

    arena: Arena
    catalog: Catalog
    policy: Callable[[], EvictionPolicy]
    keys: TenantKeys
    clock: Clock
    random: Random
    workers: Workers
    faults: FaultPoints
    counters: Counters
    policies: PolicySettings


class Movement:
    """One tenant's moves. ``revoke_stale``: take back leases that are too old; whether there were any."""

    def __init__(self, parts: MovementParts, revoke_stale: Callable[[], bool]) -> None:
        self._parts = parts
        self._catalog = catalog = parts.catalog
        self._table = catalog.table
        self._counters = parts.counters
        self.memory = MappedCopies(DramTier(parts.arena, parts.workers), parts.policy())
        catalog.table.add_tier(self.memory)
        self.names = ChunkNames(catalog, parts.keys)
        self.removal = Removal(catalog, parts.counters)
        self.evictions: dict[str, Eviction] = {}
        """By the name of their tier."""
        self.room = Room(parts.arena, self._eviction(self.memory), revoke_stale)
        self.beyond = Beyond(catalog, self.names, parts.clock, parts.counters)
        self.loads = Loads(
            catalog, self.memory, self.room, parts.arena, self.names, self.removal, self.beyond, self.write_down,
            parts.workers, parts.faults, parts.counters,
        )  # fmt: skip
        self.writes: list[Writes] = []
        """To each slower local tier, the fastest first."""
        self.shared_writes: list[Writes] = []
        """To each shared tier. Nobody waits for these: what a shared tier has it may drop at any time."""
        self.checks = Checks(
            catalog, self.names, self.removal, self.writes, parts.clock, parts.counters, parts.policies
        )
        self.canaries = Canaries(catalog.table, parts.clock, parts.random, parts.counters, parts.policies)

    def _eviction(self, copies: Copies) -> Eviction:
        parts = self._parts
        found = Eviction(parts.catalog, copies, self.removal, parts.faults, parts.counters)
        self.evictions[copies.tier.name] = found
        return found

    # ------------------------------------------------------------ tiers

    async def attach(self, tier: LocalTier) -> None:
        """Take a tier into use, slower than those before it: what it holds becomes visible. Raises Unavailable when it
        cannot be read; it is closed then."""
        parts, started_s = self._parts, self._parts.clock.monotonic()
        copies = Copies(tier, parts.policy())
        self._counters.add_tier(tier.name)
        self._table.add_tier(copies)
        try:
            found = await tier.recover(self._eviction(copies))
        except BaseException:
            self._table.drop_tier(copies)
            raise
        count = adopt(self._catalog, copies, found)
        self.writes.append(self._writes(LocalTarget(self._catalog, copies)))
        self._counters.add_of(tier.name, "recovered_chunks", count)
        seconds = round(parts.clock.monotonic() - started_s, 3)
        _log.info("tier attached", extra={"tier": tier.name, "chunks": count, "seconds": seconds})

    def attach_shared(self, tier: SharedTier, lookup_s_max: float) -> None:
        """Take a shared tier into use, slower than those before it. Its answers are waited for ``lookup_s_max``. From
        now on what is not here may be elsewhere."""
        self._counters.add_tier(tier.name, is_shared=True)
        shared = self.beyond.add(tier, lookup_s_max)
        self.shared_writes.append(self._writes(SharedTarget(self._catalog, shared, self.beyond)))
        self._catalog.presence.become_partial()

    def _writes(self, target: Target) -> Writes:
        parts = self._parts
        return Writes(
            self._catalog, self.memory, target, self.names, self.removal, parts.clock, parts.faults, parts.counters
        )

    async def detach(self) -> None:
        """A clean stop of the tiers below memory, after ``run`` has ended."""
        self.writes.clear()
        self.shared_writes.clear()
        for copies in self._table.copies[:0:-1]:
            held = held_by(self._catalog, copies)
            self._table.drop_tier(copies)
            await copies.tier.close(held)
        await self.beyond.close()  # last: whatever an engine does, what is ours is closed well

    def statistics(self) -> tuple[TierStatistics, ...]:
        """Of every tier below memory, the fastest first, the shared ones last."""
        local = (copies.tier.statistics() for copies in self._table.copies[1:])
        return *local, *(shared.statistics() for shared in self.beyond.tiers)

    @property
    def problems(self) -> list[str]:
        """Why tiers lack chunks that they should have, one line per tier; empty while all of them take them."""
        return [f"tiers.{writes.target.name}: {writes.reason}" for writes in self._all_writes if writes.reason]

    @property
    def _all_writes(self) -> list[Writes]:
        return [*self.writes, *self.shared_writes]

    @property
    def backlog_count(self) -> int:
        """Chunks that wait for a slower tier or are on their way to it."""
        return sum(writes.backlog_count for writes in self._all_writes)

    @property
    def loading_bytes(self) -> int:
        """Room in memory of chunks on their way there."""
        return self.loads.loading_bytes

    def retry(self) -> None:
        """Try again what a tier refused, once it had some time."""
        for writes in self._all_writes:
            writes.retry()

    async def run(self) -> None:
        """Everything that goes on without being asked, for ever."""
        async with asyncio.TaskGroup() as group:
            for writes in self._all_writes:
                group.create_task(writes.run())
            group.create_task(self.loads.run())
            group.create_task(self.checks.run())
            group.create_task(self.canaries.run())

    # ------------------------------------------------------------ stores

    def allocate(
        self, piece_bytes: tuple[int, ...], keep: frozenset[int], *, evict_unwritten: bool = True
    ) -> Placement | None:
        """Room in memory for a chunk. See ``Room.allocate``."""
        return self.room.allocate(piece_bytes, keep, evict_unwritten=evict_unwritten)

    def stored(self, row: int, placement: Placement, mark: int) -> None:
        """A store's chunk is whole, in memory: make it visible. ``mark``: the first 8 bytes of its write id."""
        self._table.write_marks[row] = mark
        self.memory.put_placement(row, placement)
        self._catalog.publish(row)
        self.memory.policy.stored(row, self._table.digests[row], *self._catalog.worth(row))

    def write_down(self, row: int) -> None:
        """Have the other tiers take a chunk that memory has, as their settings want it."""
        for writes in self._all_writes:
            writes.add(row)

    @property
    def is_making_room(self) -> bool:
        """Whether what is on its way to a slower tier makes room in memory sooner or later."""
        return any(writes.is_moving for writes in self.writes)

    async def progress(self, timeout_s: float) -> None:
        """Wait until some chunk is through to a slower tier, one way or the other, at most so long."""
        moving = [writes for writes in self.writes if writes.is_moving]
        if moving:
            await moving[0].progress(timeout_s)

    async def settle(self, rows: Sequence[int], timeout_s: float) -> tuple[Durability, str, bool]:
        """The level that all of these chunks have reached once a tier has them all, or every tier is through with
        them, at most ``timeout_s`` seconds from now; why it is no higher; and whether it will stay so."""
        if not self.writes:
            return Durability.MEMORY, "no lower tier is configured", True
        found: list[tuple[Durability, str, bool]] = []
        highest = max(writes.target.durability for writes in self.writes)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(writes.settle(rows, timeout_s)) for writes in self.writes]
            for ended in asyncio.as_completed(tasks):
                found.append(await ended)
                if found[-1][0] == highest:  # another tier may stall: nobody waits for it
                    break
            for task in tasks:
                task.cancel()
        level, reason, _ = max(found, key=lambda each: each[0])
        return level, reason, level == highest or all(is_settled for _, _, is_settled in found)

    async def prove(self, rows: Sequence[int], timeout_s: float) -> None:
        """See ``Checks.prove_all``."""
        await self.checks.prove_all(rows, timeout_s)

    # ------------------------------------------------------------ fetches

    def bring(
        self, rows: Sequence[int], keep: frozenset[int], layers: frozenset[int] = frozenset()
    ) -> tuple[list[Loading | None], MissReason]:
        """See ``Loads.begin``."""
        return self.loads.begin(rows, keep, layers)

    def placement(self, row: int) -> Placement:
        """Where a chunk lies in memory, which has it."""
        return self.memory.placement(row)

    def are_in_memory(self, rows: Sequence[int]) -> bool:
        """Whether memory has all of these."""
        return self.memory.have_all(rows)

    def used(self, chain: Sequence[int]) -> None:
        """A chain was stored or read, root first."""
        keys = [self._table.digests[row] for row in chain]
        for copies in self._table.copies:
            copies.used(keys, chain)

    # ------------------------------------------------------------ copies go

    def superseded(self, row: int) -> None:
        """Another chunk has all that this one has: in every tier it is the first to go when room is needed."""
        self._counters.add("superseded_chunks")
        for copies in self._table.copies:
            copies.policy.superseded(row)

    def remove(self, row: int, reason: MissReason) -> None:
        """Give up every copy."""
        self.removal.remove(row, reason)

    async def supersede(self, writes: Mapping[bytes, int], wait_s: float) -> None:
        """Before other writes take the place of what was removed (storage key -> first 8 bytes of the write id): no
        start brings that back. Raises KVStoreError."""
        for copies in self._table.copies:
            await copies.tier.supersede(writes, wait_s)
