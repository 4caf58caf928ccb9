"""The last hour of one tenant, in rings: what came and went in each interval, and what was wrong from when on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvstore.movement import TierAccount

INTERVAL_S = 10.0
SAMPLE_COUNT_MAX = 360
"""An hour."""
EVENT_COUNT_MAX = 64
WORDS_MAX = 300
"""Characters of what a tier says is wrong."""
FLOWS = ("fetch_hit_chunks", "fetch_miss_chunks", "fetch_bytes", "store_committed_bytes")
"""Counters of which each interval's growth is kept."""
STALLED_S = 2.0


class HealthEvent(NamedTuple):
    """From ``at_s`` on (seconds since 1970) this was said of a tier."""

    at_s: float
    tier: str
    text: str


class History:
    """Runs on the event loop's thread. Bounded: ``SAMPLE_COUNT_MAX`` intervals and ``EVENT_COUNT_MAX`` events."""

    def __init__(self) -> None:
        self._flows: deque[tuple[int, ...]] = deque(maxlen=SAMPLE_COUNT_MAX)
        self._last: Mapping[str, int] | None = None
        self._tiers: dict[str, tuple[int, int]] = {}
        self._said: dict[str, str] = {}
        self.events: deque[HealthEvent] = deque(maxlen=EVENT_COUNT_MAX)

    def note(self, counters: Mapping[str, int], accounts: Iterable[TierAccount], wall_s: float) -> None:
        """An interval has ended."""
        before, self._last = self._last, counters
        if before is not None:
            self._flows.append(tuple(counters.get(name, 0) - before.get(name, 0) for name in FLOWS))
        for account in accounts:
            name = account.stats.name
            if before is not None:
                self._tiers[name] = _moved(name, before, counters)
            said = health_of(account)
            if said != self._said.get(name, "up"):
                self.events.append(HealthEvent(wall_s, name, said))
            self._said[name] = said

    def flows(self) -> dict[str, list[int]]:
        """What each interval brought, the oldest first."""
        return {name: [each[place] for each in self._flows] for place, name in enumerate(FLOWS)}

    def rates(self, tier: str) -> tuple[float, float]:
        """Bytes a second that came into a tier, and that were read from it, in the last interval."""
        came, went = self._tiers.get(tier, (0, 0))
        return came / INTERVAL_S, went / INTERVAL_S


def health_of(account: TierAccount) -> str:
    """What is to be said of a tier: "up", or what is not as it should be."""
    if account.is_draining:
        return "draining"
    if account.stalled_s > STALLED_S:
        return "stalled"
    problem = account.problem[:WORDS_MAX]
    state = str(account.stats.state)
    return f"{state}: {problem}" if problem else state


def _moved(tier: str, before: Mapping[str, int], after: Mapping[str, int]) -> tuple[int, int]:
    """Bytes into a tier and from it. Memory's are what stores and slower tiers brought, and what fetches took."""

    def grown(*names: str) -> int:
        return sum(after.get(name, 0) - before.get(name, 0) for name in names)

    if tier == "dram":
        return grown("store_committed_bytes", "promoted_bytes"), grown("fetch_bytes")
    return grown(f"{tier}_written_bytes"), grown(f"{tier}_verified_bytes")
