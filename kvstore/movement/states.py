"""Tells for how long each tier has been in its state."""

from __future__ import annotations

from dataclasses import replace

from kvstore.seams import Clock
from kvstore.tiers import TierStatistics

REASON_CHARS_MAX = 1000
"""An engine's words may be of any length; a reply has room for this much."""


class TierStates:
    """The last known state of each tier, by its name, and the time since when it is known. It is as fresh as the last
    look: whoever wants it fresh looks often. A tier that is up at the first look counts as up since the start."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started_s = clock.monotonic()
        self._known: dict[str, tuple[str, float]] = {}

    def seen(self, stats: TierStatistics, since_s: float | None = None) -> TierStatistics:
        """Return the statistics with the seconds for which the tier has been in this state. ``since_s``: the time since
        when, where that is known better than by the last look."""
        now_s = self._clock.monotonic()
        state, began_s = self._known.get(stats.name) or ("up", self._started_s)
        if state != stats.state:
            began_s = now_s if since_s is None else min(since_s, now_s)
        self._known[stats.name] = (stats.state, began_s)
        return replace(stats, state_s=now_s - began_s, reason=stats.reason[:REASON_CHARS_MAX])
