"""How long an operator's question may keep the event loop."""

from __future__ import annotations

import asyncio

from kvstore.seams import Clock

STEP_S = 0.0005


class Turns:
    """Work on the whole catalog, cut into short steps. Of all questions that wait, however many, one has a step per
    round of the event loop, in the order in which they came."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.gate = asyncio.Lock()

    def begin(self) -> Turn:
        """One question's. Its first step is the one after ``next``."""
        return Turn(self)


class Turn:
    """Of one question: it waits for ``next`` before it begins, and calls ``between`` its items."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._since_s = 0.0

    async def next(self) -> None:
        """Wait for a step. What was read before may have changed after."""
        async with self._turns.gate:
            await self._turns.clock.sleep(0)
        self._since_s = self._turns.clock.monotonic()

    async def between(self) -> None:
        """Wait for another step if this one has had its time. Cost while it has not: a look at the clock."""
        if self._turns.clock.monotonic() - self._since_s >= STEP_S:
            await self.next()
