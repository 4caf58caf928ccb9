"""How long a tier may take, and how long it has kept its callers waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from kvstore.seams import Clock, SystemClock

Result = TypeVar("Result")
_clock = SystemClock()

BYTES_PER_S_MIN = 1e6
"""A chunk that moves slower than this has failed. A line of 10 MB/s gives each of the readers that share it more."""

SLOW_BYTES_PER_S = 10e6
"""A line with at least this rate is slow, but does not stall: moves side by side take their time on it, and the tier is
still asked meanwhile."""


def limit_s(base_s: float, byte_count: int) -> float:
    """Return the seconds after which a move of so many bytes has failed; ``base_s``: without any bytes."""
    return base_s + byte_count / BYTES_PER_S_MIN


def grace_s(move_count: int, byte_count: int) -> float:
    """Return the seconds that ``move_count`` moves of so many bytes, side by side on a slow line, take without a
    stall."""
    return move_count * byte_count / SLOW_BYTES_PER_S


def _late_s(due_s: Collection[float], answered_s: float, now_s: float) -> float:
    """Return the seconds since the oldest call was due, or since a call was last answered, if that was later. 0 without
    any call."""
    return max(now_s - max(min(due_s), answered_s), 0.0) if due_s else 0.0


@dataclass(eq=False, slots=True)
class Pace:
    """Jobs of one pool of workers that have not ended, each with when it began, and the time at which a job last ended.
    ``grace_s`` of ``began``: a job that moves much may take so many seconds before it counts as late. A job that finds
    all of the ``thread_count`` threads at work waits for one of them: it is due no sooner than the first of their
    jobs. 0: of a pool whose jobs have no grace, and are due as they began."""

    thread_count: int = 0
    given: dict[asyncio.Future[Any], float] = field(default_factory=dict)
    done_at_s: float = 0.0

    def began(self, job: asyncio.Future[Any], clock: Clock, grace_s: float = 0.0) -> None:
        due_s = clock.monotonic() + grace_s
        if 0 < self.thread_count <= len(self.given):
            due_s = max(due_s, min(self.given.values()))
        self.given[job] = due_s
        job.add_done_callback(partial(self._ended, clock))

    def _ended(self, clock: Clock, job: asyncio.Future[Any]) -> None:
        del self.given[job]
        self.done_at_s = clock.monotonic()

    def stalled_s(self, clock: Clock) -> float:
        """Return the seconds since the oldest of these jobs began, or since a job last ended, if that was later. 0
        without any job."""
        return _late_s(self.given.values(), self.done_at_s, clock.monotonic())


class Waits:
    """The calls that wait for an answer, each with when it began, and the time of the last answer. Giving up a call is
    no answer. ``grace_s``: as for ``Pace``."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._due_s: dict[object, float] = {}
        self._answered_s = float("-inf")

    def began(self, call: object, grace_s: float = 0.0) -> None:
        """Count a call that waits from now on."""
        self._due_s[call] = self._clock.monotonic() + grace_s

    def answered(self) -> None:
        """Record that the server replied. A refusal is an answer, too."""
        self._answered_s = self._clock.monotonic()

    def ended(self, call: object) -> None:
        """Count a call that waits no longer."""
        del self._due_s[call]

    @contextmanager
    def asked(self, grace_s: float = 0.0) -> Iterator[Callable[[], None]]:
        """Count a call that waits meanwhile. The call invokes the yielded function when it was answered."""
        call = object()
        self.began(call, grace_s)
        try:
            yield self.answered
        finally:
            self.ended(call)

    def stalled_s(self) -> float:
        """Return the seconds since the oldest call was due, or since a call was last answered, if that was later. 0
        without any."""
        return _late_s(self._due_s.values(), self._answered_s, self._clock.monotonic())


class Timed(NamedTuple, Generic[Result]):
    """A job's result, and the seconds that it took."""

    result: Result
    seconds: float


def timed(function: Callable[..., Result], *args: object) -> Timed[Result]:
    """Run a job, and count its seconds where it runs: without its wait for a mover."""
    begun_s = _clock.monotonic()
    result = function(*args)
    return Timed(result, _clock.monotonic() - begun_s)
