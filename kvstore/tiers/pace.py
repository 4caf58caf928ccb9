"""How long a tier may take, and how long it has kept its callers waiting."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvstore.seams import Clock

BYTES_PER_S_MIN = 1e6
"""A chunk that moves slower than this has failed. A line of 10 MB/s gives each of the readers that share it more."""


def limit_s(base_s: float, byte_count: int) -> float:
    """Return the seconds after which a move of so many bytes has failed; ``base_s``: without any bytes."""
    return base_s + byte_count / BYTES_PER_S_MIN


@dataclass(eq=False, slots=True)
class Pace:
    """Jobs of one pool of workers that have not ended, each with when it began, and the time at which a job last ended.
    ``grace_s`` of ``began``: a job that moves much may take so many seconds before it counts as late."""

    given: dict[asyncio.Future[Any], float] = field(default_factory=dict)
    done_at_s: float = 0.0

    def began(self, job: asyncio.Future[Any], clock: Clock, grace_s: float = 0.0) -> None:
        self.given[job] = clock.monotonic() + grace_s
        job.add_done_callback(partial(self._ended, clock))

    def _ended(self, clock: Clock, job: asyncio.Future[Any]) -> None:
        del self.given[job]
        self.done_at_s = clock.monotonic()

    def stalled_s(self, clock: Clock) -> float:
        """Return the seconds since the oldest of these jobs began, or since a job last ended, if that was later. 0
        without any job."""
        if not self.given:
            return 0.0
        oldest_s = min(self.given.values())
        return max(clock.monotonic() - max(oldest_s, self.done_at_s), 0.0)
