"""Randomness. Secrets and write ids come from the operating system; a simulation is seeded."""

from __future__ import annotations

import os
import random
from typing import Protocol


class Random(Protocol):
    """A source of bytes."""

    def bytes(self, count: int) -> bytes: ...


class SystemRandom:
    """The operating system's generator: fit for secrets."""

    def bytes(self, count: int) -> bytes:
        return os.urandom(count)


class SeededRandom:
    """The same bytes for the same seed. Simulation only: its output is no secret."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - simulation only, as the docstring says

    def bytes(self, count: int) -> bytes:
        return self._random.randbytes(count)
