"""Pauses in long work on the event loop, so that other tasks run in between."""

from __future__ import annotations

import asyncio

from kvstore.seams.clock import Clock

STEP_S = 0.002
"""Longest step of work without a pause. With the last item and the loop's own cost, others wait at most 5 ms."""
QUIET_ROUNDS, ALONE_ROUNDS, ROUNDS_MAX = 8, 3, 100
"""Rounds of the event loop without new long work after which the next step is taken: where other long work waits for
its turn, and where none does; and rounds after which it is taken in any case. A round without work takes some 20 us."""


class Rounds:
    """The rounds of an event loop. Of all pieces of long work that pause, one goes on at a time, whosever they are."""

    def __init__(self) -> None:
        self.paused_count = 0
        """Pauses of this round."""
        self._gate = asyncio.Lock()
        self._waiting_count = 0

    async def turn(self, tenant_gate: asyncio.Lock, clock: Clock) -> None:
        """Wait until it is a piece's turn, of its tenant and of all, and let others run."""
        self._pause()
        self._waiting_count += 1
        try:
            async with tenant_gate, self._gate:
                await self._give_way(clock)
        finally:
            self._waiting_count -= 1

    def _pause(self) -> None:
        """Count a pause, until the next round."""
        if not self.paused_count:
            asyncio.get_running_loop().call_soon(self._begin_round)
        self.paused_count += 1

    def _begin_round(self) -> None:
        self.paused_count = 0

    async def _give_way(self, clock: Clock) -> None:
        """Let others run until no more long work comes. gRPC begins the calls of a burst one by one, in two rounds
        each: after a step in every round, a short call behind them would have waited for most of their work."""
        quiet_count = 0
        for _ in range(ROUNDS_MAX):
            await clock.sleep(0)
            quiet_count = 0 if self.paused_count else quiet_count + 1
            if quiet_count >= (QUIET_ROUNDS if self._waiting_count > 1 else ALONE_ROUNDS):
                return


class LongWork:
    """The long work of one tenant, whose pieces take turns with each other, and together with other tenants' work on
    the same loop. The more pieces paused in a round, the shorter is the first step of one that begins then: many may
    begin in one round. Short work ends within it, and waits for none of them, however many wait for their turn."""

    def __init__(self, clock: Clock, rounds: Rounds | None = None) -> None:
        """``rounds``: those of the loop, where others have long work on it, too."""
        self.clock = clock
        self.rounds = rounds or Rounds()
        self.gate = asyncio.Lock()

    def begin(self) -> Pauses:
        return Pauses(self)

    @property
    def first_step_s(self) -> float:
        """The longest first step of work that begins now."""
        return STEP_S / (1 + self.rounds.paused_count)


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
        await self._work.rounds.turn(self._work.gate, self._work.clock)
        self._step_s, self._since_s = STEP_S, self._work.clock.monotonic()
