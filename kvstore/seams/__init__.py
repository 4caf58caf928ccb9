"""Seams: the service's access to the world, which is time, randomness, disk, threads, memory, secrets and fault points.

Every other package takes these as arguments, so that the whole service can run on their twins in ``tests.simulated``.
One file per seam. A lint rule forbids ``time``, ``random``, bare threads and stray tasks anywhere else.
"""

from kvstore.seams.clock import Clock, SystemClock
from kvstore.seams.deadline import Deadline
from kvstore.seams.disk import Disk, SystemDisk
from kvstore.seams.faults import FaultPoints
from kvstore.seams.memory import Mapping, Memory, SystemMemory
from kvstore.seams.movers import MoverProcesses
from kvstore.seams.pauses import LongWork, Pauses, Rounds
from kvstore.seams.randomness import Random, SystemRandom
from kvstore.seams.scheduler import Lender, OwnThreads, Workers, WorkerThreads
from kvstore.seams.secrets import EnvelopeKey, EnvelopeRing, TenantKeys

__all__ = [
    "Clock",
    "Deadline",
    "Disk",
    "EnvelopeKey",
    "EnvelopeRing",
    "FaultPoints",
    "Lender",
    "LongWork",
    "Mapping",
    "Memory",
    "MoverProcesses",
    "OwnThreads",
    "Pauses",
    "Random",
    "Rounds",
    "SystemClock",
    "SystemDisk",
    "SystemMemory",
    "SystemRandom",
    "TenantKeys",
    "WorkerThreads",
    "Workers",
]
