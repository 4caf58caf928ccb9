"""Byte movers without threads: they run at once, or a little later in an order drawn from a seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from concurrent.futures import Future

from kvstore.seams.scheduler import Result, run_for


class InlineWorkers:
    """Runs each call at once, in the caller's thread: the deterministic twin."""

    def submit(self, function: Callable[..., Result], /, *args: object) -> Future[Result]:
        future: Future[Result] = Future()
        run_for(future, function, *args)
        return future

    def close(self) -> None:
        return None


class SeededWorkers:
    """Runs each call a little later, on the loop's own thread; the seed draws which of several calls runs first. With a
    simulated loop equal seeds give equal orders. A call that raises, DiskStopped too, fails its future only."""

    DELAY_SECONDS_MAX = 0.001

    def __init__(self, random_seed: int) -> None:
        self._chance = random.Random(random_seed)
        self._due: dict[Callable[[], None], asyncio.TimerHandle] = {}
        self._closed = False

    def submit(self, function: Callable[..., Result], /, *args: object) -> Future[Result]:
        """Schedule a call. Call this from the loop only. Raises RuntimeError after ``close``."""
        if self._closed:
            raise RuntimeError("cannot submit to workers that were closed")
        future: Future[Result] = Future()

        def run() -> None:
            del self._due[run]
            run_for(future, function, *args)

        delay_seconds = self._chance.uniform(0, self.DELAY_SECONDS_MAX)
        self._due[run] = asyncio.get_running_loop().call_later(delay_seconds, run)
        return future

    def close(self) -> None:
        self._closed = True
        for run, timer in sorted(self._due.items(), key=lambda item: item[1].when()):
            timer.cancel()
            run()
