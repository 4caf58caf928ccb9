"""The log of what a slower tier refuses."""

from __future__ import annotations

import logging

from kvstore.seams import Clock

TOLD_S = 60.0
"""The same reason is logged once in so many seconds."""
REASON_COUNT_MAX = 64
_log = logging.getLogger("kvstore.movement")


class RefusalLog:
    """Logs that a tier takes no chunks, and that it takes them again. An engine that drops chunks while they are
    written refuses some and takes others in between, and each of them would be a line."""

    def __init__(self, tier: str, clock: Clock) -> None:
        self._tier = tier
        self._clock = clock
        self._told_s: dict[str, float] = {}
        """When each reason was logged last."""
        self.is_told = False
        """True from the line that the tier takes none to the line that it takes some."""

    def refused(self, reason: str) -> None:
        """Log why the tier took a chunk no more. One whose reason was logged lately is not: call this again until
        ``is_told``, so that a tier that stays away does not stand as one that takes chunks."""
        now_s = self._clock.monotonic()
        if now_s - self._told_s.get(reason, float("-inf")) < TOLD_S:
            return
        if len(self._told_s) >= REASON_COUNT_MAX:
            self._told_s.clear()
        self._told_s[reason], self.is_told = now_s, True
        _log.error("a tier takes no chunks for now", extra={"tier": self._tier, "reason": reason})

    def taken(self) -> None:
        """Log that the tier took a chunk, if the last line says otherwise."""
        if self.is_told:
            _log.info("the tier takes chunks again", extra={"tier": self._tier})
        self.is_told = False
