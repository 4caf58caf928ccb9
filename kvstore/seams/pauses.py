"""Long work on the event loop, in steps: others run in between."""

from __future__ import annotations

import asyncio

from kvstore.seams.clock import Clock

STEP_S = 0.002
"""Work that takes longer lets others run: with its last item, and what the loop itself costs, within 5 ms."""


class LongWork:
    """The long work of one tenant: however many pieces of it wait, one goes on per round of the event loop."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.gate = asyncio.Lock()

    def begin(self) -> Pauses:
        return Pauses(self)


class Pauses:
    """Of one piece of work, which calls ``between`` its items. Cost between two pauses: a look at the clock."""

    def __init__(self, work: LongWork) -> None:
        self._work = work
        self._since_s = work.clock.monotonic()

    async def between(self) -> None:
        """Let others run if this work has had its step. What was read before may have changed after."""
        clock = self._work.clock
        if clock.monotonic() - self._since_s >= STEP_S:
            async with self._work.gate:
                await clock.sleep(0)
            self._since_s = clock.monotonic()
