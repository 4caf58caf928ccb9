"""The parts that all rooms of one tenant's controller share, built in one place."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from kvstore.arena import Arena
from kvstore.catalog import Catalog
from kvstore.config import LimitSettings, PolicySettings
from kvstore.controller.benefit import Heat, Served
from kvstore.controller.pins import Pins
from kvstore.controller.profiles import RegisteredProfiles
from kvstore.controller.sessions import Leases
from kvstore.directory import NodeDirectory
from kvstore.movement import Movement, MovementParts, TierMeters
from kvstore.policy import EvictionPolicy
from kvstore.seams import Clock, Deadline, FaultPoints, LongWork, Memory, Random, Rounds, TenantKeys, Workers
from kvstore.telemetry import NO_TRACING, Counters, Tracing


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """Memory, seams and settings (the fields) come from the tenant's server. The properties are built from them once,
    and all rooms use the same ones."""

    arena: Arena
    policy: Callable[[], EvictionPolicy]
    """Makes the policy of one tier."""
    limits: LimitSettings
    clock: Clock
    random: Random
    memory: Memory
    workers: Workers
    keys: TenantKeys
    faults: FaultPoints
    counters: Counters
    rounds: Rounds = field(default_factory=Rounds)
    """The rounds of the event loop, which all tenants' long work shares."""
    deadline_s: float = 10.0
    """Seconds that a call may wait at most, whatever its caller allows."""
    policies: PolicySettings = field(default_factory=PolicySettings)
    node: str = ""
    """This node's name, as other nodes know it."""
    directory: NodeDirectory | None = None
    """The directory in which nodes tell what they have; None: there is none."""
    tracing: Tracing = NO_TRACING
    """Receives the spans of requests."""
    is_write_through: bool = False
    """True: a commit is answered only when the tiers below memory are done with the chunks."""

    @cached_property
    def ids(self) -> Iterator[int]:
        """Ids for sessions, leases, reservations and staging. No id is used twice in a server's life."""
        return itertools.count(1)

    @cached_property
    def long_work(self) -> LongWork:
        return LongWork(self.clock, self.rounds)

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
        served = Served(self.clock)
        self.catalog.registered.on_forgotten.append(served.forget)
        return served

    @cached_property
    def profiles(self) -> RegisteredProfiles:
        return RegisteredProfiles(self.clock)

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

    @property
    def problems(self) -> list[str]:
        """Reasons why tiers are not in use or lack chunks, and why other nodes do not hear of this one."""
        told = self.directory.problem if self.directory is not None else ""
        return [*self.movement.problems, *([told] if told else [])]

    def deadline(self, remaining_s: float | None = None) -> Deadline:
        """Return the deadline of a call that begins now: ``remaining_s`` if given, and ``deadline_s`` at most."""
        return Deadline.of(self.clock, remaining_s, self.deadline_s)
