"""Simulated twins of the seams: clock, randomness, disk, threads, memory and event loop. They live in memory and draw
from seeds: the whole service runs hours of simulated time on them in milliseconds, the same way for the same seed.

A twin keeps no promise that the real one does not keep.
"""

from tests.simulated.clock import ManualClock
from tests.simulated.disk import DiskStopped, SimulatedDisk
from tests.simulated.loop import LoopClock, SimulatedLoop, simulate
from tests.simulated.memory import BytearrayMemory
from tests.simulated.randomness import SeededRandom
from tests.simulated.workers import InlineWorkers, SeededWorkers

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
