"""What one look brings, and rates between two."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.v1alpha import admin_pb2
from kvstore_ops.operators.calls import Operator


@dataclass(frozen=True, slots=True)
class Sample:
    """One look, at ``at_s`` of a clock that does not go back."""

    at_s: float
    stats: admin_pb2.StatsResponse
    tiers: admin_pb2.TiersResponse

    def count(self, name: str) -> int:
        """A counter since the service's start; 0 for one that this release does not have."""
        return self.stats.counters.get(name, 0)


def take_sample(asked: Operator, at_s: float) -> Sample:
    """Raises as the operator's calls do."""
    return Sample(at_s, asked.stats(), asked.tiers())


@dataclass(frozen=True, slots=True)
class Rates:
    """What happened between two samples, per second. Without an earlier one, and over a restart, since the start."""

    first: Sample | None
    last: Sample

    def of(self, name: str) -> float:
        """A counter's."""
        before = self.first
        if before is None or before.count(name) > self.last.count(name) or before.at_s >= self.last.at_s:
            return self.last.count(name) / max(1.0, self.last.stats.uptime_seconds)
        return (self.last.count(name) - before.count(name)) / (self.last.at_s - before.at_s)

    def of_tier(self, tier: str, name: str) -> float:
        """A tier's counter's. Memory's have no prefix."""
        return self.of(name if tier == "dram" else f"{tier}_{name}")
