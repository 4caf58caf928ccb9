"""Simulated twins of the seams: clock, randomness, disk, threads, memory and event loop. They live in memory and draw
from seeds: the whole service runs hours of simulated time on them in milliseconds, the same way for the same seed.

For tests and benchmarks. Code that serves users does not import this package: the lint says so. A twin keeps no promise
that the real one does not keep.
"""

from kvstore.simulated.clock import ManualClock
from kvstore.simulated.disk import DiskStopped, SimulatedDisk
from kvstore.simulated.loop import LoopClock, SimulatedLoop, simulate
from kvstore.simulated.memory import BytearrayMemory
from kvstore.simulated.randomness import SeededRandom
from kvstore.simulated.workers import InlineWorkers, SeededWorkers

__all__ = [
    "BytearrayMemory",
    "DiskStopped",
    "InlineWorkers",
    "LoopClock",
    "ManualClock",
    "SeededRandom",
    "SeededWorkers",
    "SimulatedDisk",
    "SimulatedLoop",
    "simulate",
]
