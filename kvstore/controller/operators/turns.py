"""Turns: they bound the time that operators' requests keep the event loop."""

from __future__ import annotations

import asyncio

from kvstore.seams import Clock

STEP_S = 0.0005
REST = 5.0
"""After a step the loop is left to others for so many times as long: operators' requests get at most a sixth of it."""
REST_S_MAX = 0.02
CALL_S = 0.003
"""Seconds of work that a request counts for besides its steps: its call and its messages take the loop, too."""


class Turns:
    """Work on the whole catalog, cut into short steps. Of all waiting requests, however many, one gets a step per round
    of the event loop, in the order in which they came, and between two steps there is a rest."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.gate = asyncio.Lock()
        self.worked_s = 0.0
        """Seconds worked since the last rest, by all requests together."""

    def begin(self) -> Turn:
        """Return the turn of one request. Its first step begins when ``next`` returns."""
        self.worked_s += CALL_S
        return Turn(self)


class Turn:
    """The turn of one request. The request awaits ``next`` before it begins, and ``between`` between its items."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._since_s: float | None = None

    async def next(self) -> None:
        """Wait for a step. State that was read before may have changed meanwhile."""
        self.end()
        turns = self._turns
        async with turns.gate:
            rest_s, turns.worked_s = min(turns.worked_s * REST, REST_S_MAX), 0.0
            await turns.clock.sleep(rest_s)
        self._since_s = turns.clock.monotonic()

    async def between(self) -> None:
        """Wait for another step if this step's time is used up. Cost otherwise: a look at the clock."""
        if self._since_s is None or self._turns.clock.monotonic() - self._since_s >= STEP_S:
            await self.next()

    def end(self) -> None:
        """End the step: the time that the request waits from now on is not counted as work. Idempotent."""
        if self._since_s is not None:
            self._turns.worked_s += self._turns.clock.monotonic() - self._since_s
            self._since_s = None
