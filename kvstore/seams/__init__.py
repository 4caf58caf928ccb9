"""Where the service touches the world: time, randomness, disk, threads, memory, secrets and fault points.

Every other room takes these as arguments, so that the whole service can run on simulated twins. Real
implementations live beside their twins: one file per seam. A lint rule forbids ``time``, ``random``,
bare threads and stray tasks anywhere else.
"""

from kvstore.seams.clock import Clock, ManualClock, SystemClock
from kvstore.seams.disk import Disk, SystemDisk
from kvstore.seams.faults import FaultPoints
from kvstore.seams.memory import BytearrayMemory, Mapping, Memory, SystemMemory
from kvstore.seams.movers import MoverProcesses
from kvstore.seams.pauses import LongWork, Pauses
from kvstore.seams.randomness import Random, SeededRandom, SystemRandom
from kvstore.seams.scheduler import InlineWorkers, Lender, OwnThreads, SeededWorkers, Workers, WorkerThreads
from kvstore.seams.secrets import TenantKeys
from kvstore.seams.simulated_disk import DiskStopped, SimulatedDisk
from kvstore.seams.simulated_loop import LoopClock, SimulatedLoop, simulate

__all__ = [
    "BytearrayMemory",
    "Clock",
    "Disk",
    "DiskStopped",
    "FaultPoints",
    "InlineWorkers",
    "Lender",
    "LongWork",
    "LoopClock",
    "ManualClock",
    "Mapping",
    "Memory",
    "MoverProcesses",
    "OwnThreads",
    "Pauses",
    "Random",
    "SeededRandom",
    "SeededWorkers",
    "SimulatedDisk",
    "SimulatedLoop",
    "SystemClock",
    "SystemDisk",
    "SystemMemory",
    "SystemRandom",
    "TenantKeys",
    "WorkerThreads",
    "Workers",
    "simulate",
]
