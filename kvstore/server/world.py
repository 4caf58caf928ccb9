"""The parts that the tenants of a process share."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.seams import Clock, Disk, EnvelopeRing, FaultPoints, Memory, MoverProcesses, Random, Workers
from kvstore.server.reloading import Reloading
from kvstore.telemetry import NO_TRACING, Tracing


@dataclass(frozen=True)
class TierOwner:
    """The owner of a tier's copies: ``name`` ("": the default tenant without a secret), and what it is sealed with."""

    name: str = ""
    ring: EnvelopeRing = field(default_factory=EnvelopeRing)


@dataclass(frozen=True, kw_only=True)
class World:
    """The process's clock, disks and byte movers. Nothing of a tenant's is in it."""

    clock: Clock
    random: Random
    memory: Memory
    disk: Disk
    faults: FaultPoints
    workers: Workers
    prefaulting: Workers
    movers: MoverProcesses
    descriptor_limit: int
    """Open files that the process may have."""
    reloading: Reloading
    tracing: Tracing = NO_TRACING
