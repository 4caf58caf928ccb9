"""What the tenants of a process share."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.seams import Clock, Disk, FaultPoints, Memory, MoverProcesses, Random, Workers


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
