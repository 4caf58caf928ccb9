"""Whether a tier that fails is asked."""

from __future__ import annotations

import logging

from kvstore.seams import Clock

FAILURE_COUNT = 3
"""Failures in a row after which a tier is left alone for a while."""
PAUSE_S_MIN, PAUSE_S_MAX = 0.5, 5.0
_log = logging.getLogger("kvstore.movement")


class Breaker:
    """Open after ``FAILURE_COUNT`` failures in a row: nobody waits for a tier that does not answer. It closes by itself
    after a pause, which doubles with each failure that follows."""

    def __init__(self, tier: str, clock: Clock) -> None:
        self._tier = tier
        self._clock = clock
        self._failures = 0
        self._closes_s = float("-inf")
        self.reason = ""
        """What the last call that failed said; empty once one was answered."""

    @property
    def is_open(self) -> bool:
        """Whether the tier is to be left alone now."""
        return self._clock.monotonic() < self._closes_s

    def failed(self, reason: str = "") -> None:
        """Count a call that raised Unavailable, or had no answer in time."""
        self.reason = reason or self.reason
        self._failures += 1
        excess = self._failures - FAILURE_COUNT
        if excess < 0:
            return
        if not excess:
            _log.warning("a tier does not answer: going on without it", extra={"tier": self._tier})
        self._closes_s = self._clock.monotonic() + min(PAUSE_S_MIN * 2 ** min(excess, 10), PAUSE_S_MAX)

    def worked(self) -> None:
        """Count a call that was answered."""
        if self._failures >= FAILURE_COUNT:
            _log.info("a tier answers again", extra={"tier": self._tier})
        self._failures = 0
        self.reason = ""
        self._closes_s = float("-inf")
