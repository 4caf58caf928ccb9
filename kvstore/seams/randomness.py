"""Randomness. Secrets and write ids come from the operating system; a simulation is seeded."""

from __future__ import annotations

import os
from typing import Protocol


class Random(Protocol):
    """A source of bytes."""

    def bytes(self, count: int) -> bytes: ...


class SystemRandom:
    """The operating system's generator: fit for secrets."""

    def bytes(self, count: int) -> bytes:
        return os.urandom(count)
