"""The last hour of one tenant, in rings: the growth of counters in each interval, and changes of the tiers' health."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvstore.movement import TierAccount

INTERVAL_S = 10.0
SAMPLE_COUNT_MAX = 360
"""An hour of intervals."""
EVENT_COUNT_MAX = 64
WORDS_MAX = 300
"""Characters after which a tier's problem is cut."""
SAVED = "served_milliseconds"
"""The time that computing the tokens of fetches would have taken, of all models."""
FLOWS = (
    "fetch_hit_chunks", "fetch_miss_chunks", "fetch_bytes", "store_committed_bytes", SAVED,
    "partial_prefill_saved_milliseconds",
)  # fmt: skip
"""Counters whose growth in each interval the history keeps."""
STALLED_S = 2.0


class HealthEvent(NamedTuple):
    """A tier's health became ``text`` at ``at_s`` (seconds since 1970)."""

    at_s: float
    tier: str
    text: str


class History:
    """The history of one tenant. Runs on the event loop's thread. Bounded: ``SAMPLE_COUNT_MAX`` intervals and
    ``EVENT_COUNT_MAX`` events."""

    def __init__(self) -> None:
        self._flows: deque[tuple[int, ...]] = deque(maxlen=SAMPLE_COUNT_MAX)
        self._last: Mapping[str, int] | None = None
        self._tiers: dict[str, tuple[int, int]] = {}
        self._said: dict[str, str] = {}
        self.events: deque[HealthEvent] = deque(maxlen=EVENT_COUNT_MAX)

    def note(self, counters: Mapping[str, int], accounts: Iterable[TierAccount], wall_s: float) -> None:
        """Record the interval that has just ended: the counters' growth, the tiers' rates, and changes of health."""
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
        """Return, by counter, its growth in each interval, the oldest first."""
        return {name: [each[place] for each in self._flows] for place, name in enumerate(FLOWS)}

    def rates(self, tier: str) -> tuple[float, float]:
        """Return the bytes per second that came into a tier, and that were read from it, in the last interval."""
        came, went = self._tiers.get(tier, (0, 0))
        return came / INTERVAL_S, went / INTERVAL_S


def health_of(account: TierAccount) -> str:
    """Return "up", or words for the tier's problem."""
    if account.is_draining:
        return "draining"
    if account.stalled_s > STALLED_S:
        return "stalled"
    problem = account.problem[:WORDS_MAX]
    state = str(account.stats.state)
    return f"{state}: {problem}" if problem else state


def _moved(tier: str, before: Mapping[str, int], after: Mapping[str, int]) -> tuple[int, int]:
    """Return the bytes that came into a tier, and the bytes read from it. Into memory they come by stores and from
    slower tiers; fetches read them."""

    def grown(*names: str) -> int:
        return sum(after.get(name, 0) - before.get(name, 0) for name in names)

    if tier == "dram":
        return grown("store_committed_bytes", "promoted_bytes"), grown("fetch_bytes")
    return grown(f"{tier}_written_bytes"), grown(f"{tier}_verified_bytes")
