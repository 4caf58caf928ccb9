"""Pauses in long work on the event loop, so that other tasks run in between."""

from __future__ import annotations

import asyncio

from kvstore.seams.clock import Clock

STEP_S = 0.002
"""Longest step of work without a pause. With the last item and the loop's own cost, others wait at most 5 ms."""


class LongWork:
    """The long work of one tenant: of all its pieces that pause, one goes on per round of the event loop."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.gate = asyncio.Lock()

    def begin(self) -> Pauses:
        return Pauses(self)


class Pauses:
    """The pauses of one piece of work, which awaits ``between`` after each item. Cost without a pause: one look at the
    clock."""

    def __init__(self, work: LongWork) -> None:
        self._work = work
        self._since_s = work.clock.monotonic()

    async def between(self) -> None:
        """Let others run if this work has used up its step. State that was read before may have changed afterwards."""
        clock = self._work.clock
        if clock.monotonic() - self._since_s >= STEP_S:
            async with self._work.gate:
                await clock.sleep(0)
            self._since_s = clock.monotonic()
