"""The parts that the rooms of one tenant's controller share, built in one place."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from kvstore.arena import Arena
from kvstore.catalog import Catalog, Namespace
from kvstore.config import LimitSettings, PolicySettings
from kvstore.controller.benefit import Heat, Served
from kvstore.controller.pins import Pins
from kvstore.controller.sessions import Leases
from kvstore.directory import NodeDirectory
from kvstore.movement import Movement, MovementParts, TierMeters
from kvstore.policy import EvictionPolicy
from kvstore.seams import Clock, Deadline, FaultPoints, LongWork, Memory, Random, TenantKeys, Workers
from kvstore.telemetry import NO_TRACING, Counters, Tracing


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """The fields are what a tenant's server gives: memory, seams, settings. The properties are made of them once, and
    all rooms use the same."""

    arena: Arena
    policy: Callable[[], EvictionPolicy]
    """Makes one for a tier."""
    limits: LimitSettings
    clock: Clock
    random: Random
    memory: Memory
    workers: Workers
    keys: TenantKeys
    faults: FaultPoints
    counters: Counters
    deadline_s: float = 10.0
    """How long a call may wait, whatever its caller allows."""
    policies: PolicySettings = field(default_factory=PolicySettings)
    node: str = ""
    """What other nodes call this one."""
    directory: NodeDirectory | None = None
    """Where they tell what they have."""
    tracing: Tracing = NO_TRACING
    """Who is told of requests as spans."""
    is_write_through: bool = False
    """A commit is answered when the tiers below memory are through with the chunks."""

    @cached_property
    def ids(self) -> Iterator[int]:
        """Of sessions, leases, reservations and staging. No id is used twice in a server's life."""
        return itertools.count(1)

    @cached_property
    def long_work(self) -> LongWork:
        return LongWork(self.clock)

    @cached_property
    def catalog(self) -> Catalog:
        return Catalog(self.limits.model_count_max, self.memory, self.limits.namespace_count_max)

    @cached_property
    def leases(self) -> Leases:
        return Leases(self.catalog, self.limits, self.clock, self.counters, self.ids)

    @cached_property
    def pins(self) -> Pins:
        return Pins(self.catalog, self.limits, self.clock)

    @cached_property
    def served(self) -> Served:
        return Served(self.clock)

    @cached_property
    def heat(self) -> Heat:
        return Heat(self.catalog, self.clock)

    @cached_property
    def meters(self) -> TierMeters:
        return TierMeters(self.clock)

    @cached_property
    def movement(self) -> Movement:
        parts = MovementParts(
            arena=self.arena, catalog=self.catalog, policy=self.policy, keys=self.keys, clock=self.clock,
            random=self.random, workers=self.workers, faults=self.faults, counters=self.counters,
            policies=self.policies, meters=self.meters, tracing=self.tracing,
        )  # fmt: skip
        return Movement(parts, self.leases.revoke_stale)

    def deadline(self, remaining_s: float | None = None) -> Deadline:
        """Of a call that begins now and whose caller waits ``remaining_s``, or says nothing of it."""
        return Deadline.of(self.clock, remaining_s, self.deadline_s)

    def storage_key(self, space: Namespace, digest: bytes) -> bytes:
        """Return the key that names this tenant's chunk in every tier below memory."""
        return self.movement.names.key(space, digest)
