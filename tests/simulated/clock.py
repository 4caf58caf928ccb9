"""A clock that a test moves."""

from __future__ import annotations

import asyncio


class ManualClock:
    """A clock that moves only when a test calls ``advance``, or when code sleeps."""

    def __init__(self) -> None:
        self._now = 0.0

    def advance(self, seconds: float) -> None:
        assert seconds >= 0
        self._now += seconds

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        self._now += seconds
        await asyncio.sleep(0)
