"""The world that the tenants of a process share, and the owners of tiers' copies."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.seams import Clock, Disk, EnvelopeRing, FaultPoints, Memory, MoverProcesses, Random, Rounds, Workers
from kvstore.server.reloading import Reloading
from kvstore.telemetry import NO_TRACING, Tracing


@dataclass(frozen=True)
class TierOwner:
    """The owner of a tier's copies. ``name`` marks the copies; "": the default tenant without a secret. ``ring``: the
    keys that seal them."""

    name: str = ""
    ring: EnvelopeRing = field(default_factory=EnvelopeRing)


@dataclass(frozen=True, kw_only=True)
class World:
    """The process's clock, disks and byte movers. It has nothing that belongs to one tenant."""

    clock: Clock
    random: Random
    memory: Memory
    disk: Disk
    faults: FaultPoints
    workers: Workers
    prefaulting: Workers
    movers: MoverProcesses
    descriptor_limit: int
    """Number of open files that the process may have."""
    reloading: Reloading
    tracing: Tracing = NO_TRACING
    rounds: Rounds = field(default_factory=Rounds)
