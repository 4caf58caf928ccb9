"""Samples of the sidecar's statistics, and rates between two samples."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.v1alpha import admin_pb2
from kvstore_ops.operators.calls import Operator, OtherRelease
from kvstore_ops.top.others import ALONE, Others

HOT_COUNT, PLAN_COUNT = 8, 4


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of the statistics, at ``at_s`` of a monotonic clock and ``wall_s`` seconds since 1970."""

    at_s: float
    stats: admin_pb2.StatsResponse
    tiers: admin_pb2.TiersResponse
    hottest: list[admin_pb2.HotPrefix] = field(default_factory=list)
    wall_s: float = 0.0
    plans: list[admin_pb2.PlanEntry] = field(default_factory=list)
    tenants: dict[str, admin_pb2.StatsResponse | str] = field(default_factory=dict)
    """The other tenants' statistics, or why there are none."""

    def count(self, name: str) -> int:
        """Return a counter since the service's start; 0 for a counter that the sidecar's release does not have."""
        return self.stats.counters.get(name, 0)

    @property
    def served_tokens(self) -> int:
        """Tokens that were fetched since the service's start, of models that were forgotten since, too."""
        known = sum(each.served.token_count for each in self.stats.models)
        return known + self.stats.served_of_forgotten.token_count


def take_sample(asked: Operator, at_s: float, others: Others = ALONE) -> Sample:
    """Ask the sidecar for a sample. Raises as the operator's calls do, but not for the ``others``."""
    stats, tiers, hottest = asked.stats(), asked.tiers(), asked.hottest(HOT_COUNT)
    try:
        plans = asked.plans(PLAN_COUNT)
    except OtherRelease:
        plans = []
    return Sample(at_s, stats, tiers, hottest, time.time(), plans, others.stats())


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates per second between two samples. Without an earlier sample, or after a restart in between, rates are
    averages since the sidecar's start."""

    first: Sample | None
    last: Sample

    def of(self, name: str) -> float:
        """Return the rate of a counter."""
        return self._grown(lambda sample: sample.count(name))

    @property
    def served_tokens(self) -> float:
        """Tokens per second that were fetched instead of computed."""
        return self._grown(lambda sample: sample.served_tokens)

    def _grown(self, count: Callable[[Sample], int]) -> float:
        before, now = self.first, count(self.last)
        if before is None or count(before) > now or before.at_s >= self.last.at_s:
            return now / max(1.0, self.last.stats.uptime_seconds)
        return (now - count(before)) / (self.last.at_s - before.at_s)

    def of_tier(self, tier: str, name: str) -> float:
        """Return the rate of a tier's counter. The counters of memory have no prefix."""
        return self.of(name if tier == "dram" else f"{tier}_{name}")
