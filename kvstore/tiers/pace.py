"""How long a tier has kept its callers waiting."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvstore.seams import Clock


@dataclass(eq=False, slots=True)
class Pace:
    """Jobs of one pool of workers: those that have not ended, with when they began, and when one last ended. ``began``
    with ``grace_s``: so long a job may well take, because it moves much."""

    given: dict[asyncio.Future[Any], float] = field(default_factory=dict)
    done_at_s: float = 0.0

    def began(self, job: asyncio.Future[Any], clock: Clock, grace_s: float = 0.0) -> None:
        self.given[job] = clock.monotonic() + grace_s
        job.add_done_callback(partial(self._ended, clock))

    def _ended(self, clock: Clock, job: asyncio.Future[Any]) -> None:
        del self.given[job]
        self.done_at_s = clock.monotonic()

    def stalled_s(self, clock: Clock) -> float:
        """Seconds since the oldest of these jobs began, or since one ended, if that was later; 0 without any."""
        if not self.given:
            return 0.0
        oldest_s = min(self.given.values())
        return max(clock.monotonic() - max(oldest_s, self.done_at_s), 0.0)
