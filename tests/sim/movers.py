"""Byte movers in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tests.simulated.disk import DiskStopped

SECONDS_MAX = 0.001


class Movers:
    """At most ``count`` jobs at once. A job's effect comes at some moment of its time, its result at the end, both
    drawn from the seed; ``stall_s`` makes jobs that long, without holding up the loop. Those a dead process had
    submitted never happen."""

    def __init__(self, chance: random.Random, *, count: int = 2) -> None:
        self.count = count
        self.stall_s = 0.0
        self.is_inside = False
        """Whether a job runs right now."""
        self.running = 0
        self._chance = chance
        self._waiting: deque[tuple[Future[Any], Callable[..., Any], tuple[object, ...]]] = deque()
        self._jobs: dict[int, tuple[Future[Any], Callable[[], None], list[asyncio.TimerHandle]]] = {}
        self._number = 0
        self._is_closed = self._is_dead = False

    def submit(self, function: Callable[..., Any], /, *args: object) -> Future[Any]:
        if self._is_closed:
            raise RuntimeError("cannot submit to movers that were closed")
        future: Future[Any] = Future()
        if self._is_dead:
            future.set_exception(DiskStopped())
            return future
        self._waiting.append((future, function, args))
        self._fill()
        return future

    def _fill(self) -> None:
        while self._waiting and self.running < self.count:
            self._begin(*self._waiting.popleft())

    def _begin(self, future: Future[Any], function: Callable[..., Any], args: tuple[object, ...]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        self.running += 1
        self._number += 1
        number = self._number
        outcome: list[tuple[Any, BaseException | None]] = []

        def act() -> None:
            self.is_inside = True
            try:
                outcome.append((function(*args), None))
            except BaseException as error:  # a future carries whatever the call raised
                outcome.append((None, error))
            finally:
                self.is_inside = False

        def end() -> None:
            del self._jobs[number]
            self.running -= 1
            if not outcome:
                act()
            if not future.done():
                result, error = outcome[0]
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(result)
            self._fill()

        took = self._chance.uniform(self.stall_s / 2, self.stall_s) if self.stall_s else 0.0
        took += self._chance.uniform(0, SECONDS_MAX)
        loop = asyncio.get_running_loop()
        effect = self._chance.uniform(0, took)
        timers = [loop.call_later(effect, lambda: None if outcome else act()), loop.call_later(took, end)]
        self._jobs[number] = (future, end, timers)

    def close(self) -> None:
        """Finish what was taken."""
        self._is_closed = True
        while self._jobs:
            number = next(iter(self._jobs))
            _, end, timers = self._jobs[number]
            for timer in timers:
                timer.cancel()
            end()

    def die(self) -> None:
        """The process is gone: nothing more happens, and who waited is told."""
        self._is_dead = True
        waiting, self._waiting = self._waiting, deque()
        jobs, self._jobs = self._jobs, {}
        for future, _, timers in jobs.values():
            for timer in timers:
                timer.cancel()
            if not future.done():
                future.set_exception(DiskStopped())
        for future, _, _ in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(DiskStopped())
