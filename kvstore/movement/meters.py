"""How fast tiers are read: bytes over the time in which at least one read was on its way. Concurrency is not slowness,
so reads are not timed one by one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvstore.planning.loading import ASSUMED, BusyTime, BusyTimes, TierRate
from kvstore.planning.loading.kept import KeptTier
from kvstore.planning.loading.rates import SLOWEST
from kvstore.seams import Clock
from kvstore.spec import Tier

SLICE_S = 1.0
"""A tier that is never idle is measured this often."""


@dataclass(frozen=True)
class MeasuredTier:
    """A tier's rate, assumed until something was read from it, and the bytes that are on their way from it."""

    name: str
    kind: Tier
    rate: TierRate
    queued_bytes: int


@dataclass
class _Meter:
    """One tier's. ``since_s``: when what is counted began; ``come_bytes`` and ``cut_bytes``: what came since, and what
    was given up."""

    kept: KeptTier
    reads: int = 0
    since_s: float = 0.0
    queued_bytes: int = 0
    come_bytes: int = 0
    cut_bytes: int = 0


@dataclass
class TierMeters:
    """Of the tiers below memory, by name. Runs on the event loop's thread. Cost: some microseconds per chunk."""

    clock: Clock
    is_changed: bool = False
    """Whether something was learned since ``kept`` was last asked."""
    _meters: dict[str, _Meter] = field(default_factory=dict)

    def add(self, name: str, kind: Tier) -> None:
        """Measure a tier, too. Idempotent."""
        self._meters.setdefault(name, _Meter(KeptTier(kind, BusyTimes())))

    def began(self, name: str, kind: Tier, byte_count: int) -> None:
        """A read of so many bytes is on its way."""
        self.add(name, kind)
        meter = self._meters[name]
        if not meter.reads:
            meter.since_s = self.clock.monotonic()
        meter.reads += 1
        meter.queued_bytes += byte_count

    def ended(self, name: str, byte_count: int, *, has_come: bool, is_late: bool = False) -> None:
        """A read that began has ended, and all of its bytes have come, or not: for ``is_late`` because the tier was too
        slow, else for another reason, which tells nothing of its speed."""
        meter, now = self._meters[name], self.clock.monotonic()
        meter.reads -= 1
        meter.queued_bytes -= byte_count
        meter.come_bytes += byte_count if has_come else 0
        meter.cut_bytes += byte_count if is_late else 0
        counted = meter.come_bytes + meter.cut_bytes
        if meter.reads and (not counted or now - meter.since_s < SLICE_S):
            return  # where nothing came yet, the time that the others have waited is theirs
        seen = BusyTime(counted, now - meter.since_s, is_cut=meter.cut_bytes > 0)
        times = meter.kept.times.observed(seen)
        self.is_changed |= times is not meter.kept.times
        meter.kept = replace(meter.kept, times=times)
        meter.since_s, meter.come_bytes, meter.cut_bytes = now, 0, 0

    @property
    def tiers(self) -> tuple[MeasuredTier, ...]:
        """What is known of each, in the order in which they came into use."""
        return tuple(
            MeasuredTier(
                name, each.kept.kind, each.kept.times.rate or ASSUMED.get(each.kept.kind, SLOWEST), each.queued_bytes
            )
            for name, each in self._meters.items()
        )

    def kept(self) -> dict[str, KeptTier]:
        """What a later start is to know."""
        self.is_changed = False
        return {name: each.kept for name, each in self._meters.items()}

    def restore(self, kept: dict[str, KeptTier]) -> None:
        """Begin with what an earlier start has measured. Tiers that are not in use stay known."""
        for name, each in kept.items():
            self._meters[name] = _Meter(each)
