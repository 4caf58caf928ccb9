"""The interface of movement for the controller."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from kvstore.arena import Arena, Placement
from kvstore.catalog import Catalog, Copies, MappedCopies
from kvstore.config import PolicySettings
from kvstore.movement.accounts import TierAccount, TierStates, accounts_of
from kvstore.movement.breaker import told_of
from kvstore.movement.canary import Canaries
from kvstore.movement.checks import Checks
from kvstore.movement.clearing import Clearing
from kvstore.movement.demotion import Demotions
from kvstore.movement.eviction import Eviction
from kvstore.movement.hbm import HbmCopies
from kvstore.movement.levels import Levels, SharedWrites
from kvstore.movement.loads import Loads
from kvstore.movement.meters import TierMeters
from kvstore.movement.names import ChunkNames
from kvstore.movement.readbacks import ReadBacks
from kvstore.movement.recovery import adopt, held_by
from kvstore.movement.relocation import Relocation
from kvstore.movement.removal import Removal
from kvstore.movement.room import Room
from kvstore.movement.shared import REUSED
from kvstore.movement.shared_target import SharedTarget
from kvstore.movement.shared_tiers import SharedTiers
from kvstore.movement.targets import LocalTarget, MoveTarget
from kvstore.movement.uses import Uses
from kvstore.movement.writes import Writes
from kvstore.policy import EvictionPolicy
from kvstore.seams import Clock, FaultPoints, Random, TenantKeys, Workers
from kvstore.spec import MissReason
from kvstore.telemetry import NO_TRACING, Counters, Tracing
from kvstore.tiers import LocalTier, SharedUse, TierStatistics
from kvstore.tiers.dram import DramTier
from kvstore.tiers.hbm import HbmTier

_log = logging.getLogger("kvstore.movement")


@dataclass(frozen=True, kw_only=True)
class MovementParts:
    """The parts that movement is built from. ``policy`` makes an eviction policy for one tier."""

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
    meters: TierMeters
    tracing: Tracing = NO_TRACING


class Movement:
    """One tenant's moves. ``revoke_stale``: takes back leases that are too old; returns whether there were any."""

    def __init__(self, parts: MovementParts, revoke_stale: Callable[[], bool]) -> None:
        self._parts = parts
        self._catalog = catalog = parts.catalog
        self._table = catalog.table
        self._counters = parts.counters
        self.memory = MappedCopies(DramTier(parts.arena, parts.workers), parts.policy())
        catalog.table.add_tier(self.memory)
        self.names = ChunkNames(catalog, parts.keys)
        self.removal = Removal(catalog, parts.counters)
        self.writes: list[Writes] = []
        """Writes to each slower local tier, the fastest first."""
        self.shared: list[SharedWrites] = []
        """Writes to each shared tier, the fastest first."""
        self.demotions = Demotions(catalog, parts.clock, parts.counters, self.shared)
        self.room = Room(parts.arena, self.memory, self._eviction(self.memory), revoke_stale)
        self.shared_tiers = SharedTiers(catalog, self.names, parts.clock, parts.counters, parts.tracing)
        self.loads = Loads(
            catalog, self.memory, self.room, parts.arena, self.names, self.removal, self.shared_tiers, self._entered,
            parts.workers, parts.faults, parts.counters, parts.meters, parts.tracing,
        )  # fmt: skip
        self.readbacks = ReadBacks(catalog, self.memory, self.loads, self.removal, parts.counters)
        self.uses = Uses(catalog.table, self.names, parts.clock, parts.counters, self.shared)
        self.states = TierStates(parts.clock)
        self.hbm: HbmCopies | None = None
        """Copies of chunks in memory on a device, where there is a pool."""
        self.absent: list[str] = []
        """Reasons why configured tiers are not in use."""
        self.checks = Checks(
            catalog, self.names, self.removal, self.writes, parts.clock, parts.counters, parts.policies
        )
        self.levels = Levels(
            catalog, self.names, parts.clock, self.writes, self.shared, self.absent, self.checks.proofs_end
        )
        self.clearing = Clearing(catalog.table, self.removal, parts.counters)
        self.relocation = Relocation(catalog.table, self.memory, self.loads, self.removal, self.checks)
        self.canaries = Canaries(
            catalog.table, self.shared_tiers.tiers, parts.clock, parts.random, parts.counters, parts.policies
        )

    def _eviction(self, copies: Copies) -> Eviction:
        parts = self._parts
        return Eviction(parts.catalog, copies, self.removal, self.demotions.leaves, parts.faults, parts.counters)

    # ------------------------------------------------------------ tiers

    async def attach(self, tier: LocalTier) -> None:
        """Take a tier into use, slower than those before it: the chunks that it holds become visible. Raises
        Unavailable when it cannot be read; it is closed then."""
        parts, started_s = self._parts, self._parts.clock.monotonic()
        copies = Copies(tier, parts.policy())
        self._counters.add_tier(tier.name)
        parts.meters.add(tier.name, tier.kind)
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

    async def attach_hbm(self, tier: HbmTier) -> None:
        """Take a pool on a device into use, for copies of what memory has."""
        hbm = HbmCopies(self._catalog, self.memory, tier, self.names, self._counters)
        await hbm.begin()
        self.hbm = hbm

    def attach_shared(self, use: SharedUse) -> None:
        """Take a shared tier into use, slower than those before it. From now on a chunk that is not here may be
        elsewhere."""
        self._counters.add_tier(use.tier.name, is_shared=True)
        self._parts.meters.add(use.tier.name, use.tier.kind)
        shared = self.shared_tiers.add(use)
        target = SharedTarget(self._catalog, shared, self.names, self.shared_tiers.written, self._counters)
        self.shared.append(SharedWrites(shared, target, self._writes(target)))
        self._catalog.presence.become_partial()

    def _writes(self, target: MoveTarget) -> Writes:
        parts = self._parts
        return Writes(
            self._catalog, self.memory, target, self.names, self.removal, self.readbacks, parts.clock, parts.faults,
            parts.counters,
        )  # fmt: skip

    @property
    def is_device_asked(self) -> bool:
        """True while a tier of the node owes an answer: until it comes, memory and the tier's files are in use."""
        return any(copies.tier.stalled_s() for copies in self._table.copies)

    async def detach(self) -> None:
        """Stop the tiers below memory cleanly, after ``run`` was told to end and while no tier of the node is asked.
        What shared tiers have not finished by then is given up."""
        self.writes.clear()
        self.shared.clear()
        hbm, self.hbm = self.hbm, None
        if hbm is not None:
            hbm.end()
        for copies in self._table.copies[:0:-1]:
            held = held_by(self._catalog, copies)
            self._table.drop_tier(copies)
            await copies.tier.close(held)
        await self.shared_tiers.close()  # behind our own tiers: they are closed well whatever an engine does
        if hbm is not None:
            await hbm.tier.close(None)  # last: it waits for a device that hangs

    def statistics(self) -> tuple[TierStatistics, ...]:
        """Return the statistics of every tier but memory, the fastest first, the shared ones last."""
        memory = self.memory.tier.name
        return tuple(each.stats for each in self.accounts() if each.stats.name != memory)

    def looks(self, row: int) -> list[tuple[str, Callable[[], Awaitable[bool | None]]]]:
        """Return, for each copy of a chunk, its tier's name and a function that reads the whole copy. Its result: True,
        the copy passed its checks; False, it failed and was given up (a shared tier's copy is replaced by the next
        store); None, the tier did not give it. The caller holds the row."""
        local = [
            (copies.tier.name, partial(self.checks.check, copies, row))
            for copies in self._table.copies
            if row in copies
        ]
        shared = [(each.target.name, partial(each.target.check, row)) for each in self.shared if row in each.copies]
        hbm = self.hbm
        device = [(hbm.tier.name, partial(hbm.check, row))] if hbm is not None and row in hbm else []
        return [*device, *local, *shared]

    def accounts(self) -> list[TierAccount]:
        """Return the account of each tier, the fastest first."""
        device = [] if self.hbm is None else [self.hbm.tier]
        local = [*device, *(copies.tier for copies in self._table.copies)]
        return accounts_of(local, self.shared_tiers.tiers, self.all_writes, self.states)

    @property
    def problems(self) -> list[str]:
        """Reasons why tiers are not in use, or lack chunks that they should have; empty when all is well."""
        refused = {each.target.name: told_of(each.target.name, each.reason) for each in self.all_writes if each.reason}
        failing = [each.problem for each in self.shared_tiers.tiers if each.tier.name not in refused]
        return [*self.absent, *refused.values(), *filter(None, failing)]

    @property
    def all_writes(self) -> list[Writes]:
        """Writes to each slower tier, the fastest first."""
        return [*self.writes, *(each.writes for each in self.shared)]

    @property
    def backlog_count(self) -> int:
        """Chunks that wait for a slower tier or are on their way to it."""
        return sum(writes.backlog_count for writes in self.all_writes)

    async def retry(self) -> None:
        """Try again to write chunks that a tier refused, once it had some time. Yields to other requests in between."""
        self.statistics()  # for the time since when each tier is in its state
        for writes in self.all_writes:
            await writes.retry()

    async def run(self) -> None:
        """Run all background work, for ever."""
        async with asyncio.TaskGroup() as group:
            for writes in self.all_writes:
                group.create_task(writes.run())
            group.create_task(self.loads.run())
            if self.hbm is not None:
                group.create_task(self.hbm.run())
            group.create_task(self.checks.run())
            group.create_task(self.canaries.run())
            if self.shared:
                group.create_task(self.uses.run())
                group.create_task(self.demotions.run())

    # ------------------------------------------------------------ stores

    def stored(self, row: int, placement: Placement, mark: int) -> None:
        """Make a stored chunk visible, which is whole in memory. ``mark``: the first 8 bytes of its write id. Copies of
        a hidden chunk in its row are of other bytes, and go."""
        if self._table.is_resident(row):
            self._table.hold(row)
            self.removal.remove(row, MissReason.CORRUPT, erase=True)
            self._table.unhold(row)
        self._table.write_marks[row] = mark
        self._table.came(row, self._parts.clock.wall())
        self.memory.put_placement(row, placement)
        self._catalog.publish(row)
        self.memory.policy.stored(row, self._table.digests[row], *self._catalog.worth(row))

    def write_down(self, row: int) -> None:
        """Have the other tiers take a chunk that memory has, as their settings say."""
        for writes in self.all_writes:
            writes.offer(row)

    def _entered(self, row: int) -> None:
        """Record a chunk that came from beyond the node. It was stored there, so this is its second use at least."""
        self._table.uses[row] = max(self._table.uses[row], REUSED)
        self._table.came(row, self._parts.clock.wall())
        self.write_down(row)

    @property
    def is_making_room(self) -> bool:
        """True when a chunk on its way to a slower tier makes room in memory sooner or later."""
        return any(writes.is_moving for writes in self.writes)

    async def progress(self, timeout_s: float) -> None:
        """Wait until some chunk's move to a slower tier has ended, well or not, at most ``timeout_s`` seconds."""
        moving = [writes for writes in self.writes if writes.is_moving]
        if moving:
            await moving[0].progress(timeout_s)

    # ------------------------------------------------------------ fetches

    def used(self, chain: Sequence[int]) -> None:
        """Record that a chain was stored or read, root first."""
        keys = [self._table.digests[row] for row in chain]
        for copies in self._table.copies:
            copies.used(keys, chain)
        if self.hbm is not None:
            self.hbm.used(chain)
        self.readbacks.used(chain)
        self.uses.count(chain)

    # ------------------------------------------------------------ copies go

    def goes_first(self, row: int) -> None:
        """Make a chunk the first to go in every tier when room is needed: another chunk has all its tokens, or it is of
        a value that was replaced."""
        self._counters.add("superseded_chunks")
        for copies in self._table.copies:
            copies.policy.superseded(row)

    async def supersede(self, writes: Mapping[bytes, int], wait_s: float) -> None:
        """Ensure that no later start brings removed chunks back, before new writes take their place (storage key ->
        first 8 bytes of the write id). Waits at most ``wait_s`` seconds per tier. Raises KVStoreError."""
        for copies in self._table.copies:
            await copies.tier.supersede(writes, wait_s)
