"""A circuit breaker for a tier that fails."""

from __future__ import annotations

import logging

from kvstore.seams import Clock

FAILURE_COUNT = 3
"""Failures in a row after which a tier is left alone for a while."""
PAUSE_S_MIN, PAUSE_S_MAX = 0.5, 5.0
_log = logging.getLogger("kvstore.movement")


class Breaker:
    """Open after ``FAILURE_COUNT`` failures in a row: while it is open no request waits for the tier. It closes by
    itself after a pause, which doubles with each failure that follows."""

    def __init__(self, tier: str, clock: Clock) -> None:
        self._tier = tier
        self._clock = clock
        self._failures = 0
        self._closes_s = float("-inf")
        self.failing_since_s = float("-inf")
        """The time of the first of the failures in a row."""
        self.reason = ""
        """The error text of the last call that failed; empty once a call was answered."""

    @property
    def is_open(self) -> bool:
        """True while no call should be made to the tier."""
        return self._clock.monotonic() < self._closes_s

    @property
    def is_in_doubt(self) -> bool:
        """True while the last calls failed, so many that the tier is left alone at times, and none was answered
        since."""
        return self._failures >= FAILURE_COUNT

    def failed(self, reason: str) -> None:
        """Count a call that raised Unavailable, or had no answer in time. One that ends while the breaker is open was
        on its way before: it says nothing new, and lengthens no pause."""
        self.reason = reason
        if self.is_open:
            return
        if not self._failures:
            self.failing_since_s = self._clock.monotonic()
        self._failures += 1
        excess = self._failures - FAILURE_COUNT
        if excess < 0:
            return
        if not excess:
            _log.warning("a tier does not answer: going on without it", extra={"tier": self._tier, "reason": reason})
        self._closes_s = self._clock.monotonic() + min(PAUSE_S_MIN * 2 ** min(excess, 10), PAUSE_S_MAX)

    def worked(self) -> None:
        """Count a call that was answered."""
        if self.is_in_doubt:
            _log.info("a tier answers again", extra={"tier": self._tier})
        self._failures = 0
        self.reason = ""
        self._closes_s = float("-inf")


def told_of(tier: str, reason: str) -> str:
    """Return a reason behind its tier's name in settings, which it may begin with."""
    return reason if reason.startswith(f"tiers.{tier}") else f"tiers.{tier}: {reason}"
