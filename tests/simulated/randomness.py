"""Randomness that can be repeated."""

from __future__ import annotations

import random


class SeededRandom:
    """Returns the same bytes for the same seed. Simulation only: its output is no secret."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def bytes(self, count: int) -> bytes:
        return self._random.randbytes(count)
