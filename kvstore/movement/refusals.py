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
    written refuses some and takes others in between, and each of them would be a line. One that has no room for large
    chunks takes small ones: they do not show that it has room again."""

    def __init__(self, tier: str, clock: Clock) -> None:
        self._tier = tier
        self._clock = clock
        self._told_s: dict[str, float] = {}
        """When each reason was logged last."""
        self._standing: set[str] = set()
        """The reasons that were logged since the tier took chunks again."""
        self._refused_bytes = 0
        """The size of the smallest chunk that was refused since then; 0: none."""

    def refused(self, reason: str, byte_count: int) -> None:
        """Log why the tier took a chunk of that size no more. A reason that was logged lately is not."""
        now_s = self._clock.monotonic()
        self._refused_bytes = min(self._refused_bytes or byte_count, byte_count)
        if reason in self._standing or now_s - self._told_s.get(reason, float("-inf")) < TOLD_S:
            return
        if len(self._told_s) >= REASON_COUNT_MAX:
            self._told_s.clear()
        self._told_s[reason] = now_s
        self._standing.add(reason)
        _log.error("a tier takes no chunks for now", extra={"tier": self._tier, "reason": reason})

    def taken(self, byte_count: int) -> None:
        """Log that the tier took a chunk of that size, if the last line says otherwise."""
        if byte_count < self._refused_bytes:
            return
        if self._standing:
            _log.info("the tier takes chunks again", extra={"tier": self._tier})
        self._standing.clear()
        self._refused_bytes = 0

    def ended(self) -> None:
        """Record that no refused chunk waits any more: the next one that the tier takes shows that it does."""
        self._refused_bytes = 0
