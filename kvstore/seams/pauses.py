"""Pauses in long work on the event loop, so that other tasks run in between."""

from __future__ import annotations

import asyncio

from kvstore.seams.clock import Clock

STEP_S = 0.002
"""Longest step of work without a pause. With the last item and the loop's own cost, others wait at most 5 ms."""


class LongWork:
    """The long work of one tenant: of all its pieces that pause, one goes on per round of the event loop. The more of
    them paused in a round, the shorter is the first step of one that begins then: many may begin in one round. Short
    work ends within it, and waits for none of them, however many wait for their turn."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.gate = asyncio.Lock()
        self._paused_count = 0
        """Pauses of this round of the event loop."""

    def begin(self) -> Pauses:
        return Pauses(self)

    @property
    def first_step_s(self) -> float:
        """The longest first step of work that begins now."""
        return STEP_S / (1 + self._paused_count)

    def paused(self) -> None:
        """Count a pause, until the next round of the event loop."""
        if not self._paused_count:
            asyncio.get_running_loop().call_soon(self._begin_round)
        self._paused_count += 1

    def _begin_round(self) -> None:
        self._paused_count = 0


class Pauses:
    """The pauses of one piece of work, which awaits ``between`` after each item. Cost without a pause: one look at the
    clock."""

    def __init__(self, work: LongWork) -> None:
        self._work = work
        self._step_s = work.first_step_s
        self._since_s = work.clock.monotonic()

    async def between(self) -> None:
        """Let others run if this work has used up its step. State that was read before may have changed afterwards."""
        if self._work.clock.monotonic() - self._since_s >= self._step_s:
            await self.turn()

    async def turn(self) -> None:
        """Let others run, and wait until it is this work's turn to go on."""
        self._work.paused()
        async with self._work.gate:
            await self._work.clock.sleep(0)
        self._step_s, self._since_s = STEP_S, self._work.clock.monotonic()
