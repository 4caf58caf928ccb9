"""Measures how fast tiers are read: bytes over the time in which at least one read was on its way. Concurrent reads are
not slow reads, so they are not timed one by one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvstore.planning.loading import ASSUMED, BusyTime, BusyTimes, TierRate
from kvstore.planning.loading.kept import KeptTier, pack_rates, unpack_rates
from kvstore.planning.loading.rates import SLOWEST
from kvstore.seams import Clock
from kvstore.spec import Tier

SLICE_S = 1.0
"""A tier that is never idle is measured every so many seconds."""


@dataclass(frozen=True)
class MeasuredTier:
    """A tier's rate, assumed until something was read from it, and the bytes that are on their way from it."""

    name: str
    kind: Tier
    rate: TierRate
    queued_bytes: int


@dataclass
class _Meter:
    """One tier's measurement. ``since_s``: when the current count began; ``come_bytes`` and ``cut_bytes``: the bytes
    that arrived since, and those that were given up."""

    kept: KeptTier
    reads: int = 0
    since_s: float = 0.0
    queued_bytes: int = 0
    come_bytes: int = 0
    cut_bytes: int = 0


@dataclass
class TierMeters:
    """Meters of the tiers below memory, by name. Runs on the event loop's thread. Cost: some microseconds per chunk."""

    clock: Clock
    is_changed: bool = False
    """True when something was learned since ``pack`` was last called."""
    _meters: dict[str, _Meter] = field(default_factory=dict)

    def add(self, name: str, kind: Tier) -> None:
        """Measure one more tier. Idempotent."""
        self._meters.setdefault(name, _Meter(KeptTier(kind, BusyTimes())))

    def began(self, name: str, kind: Tier, byte_count: int) -> None:
        """Record that a read of so many bytes is on its way."""
        self.add(name, kind)
        meter = self._meters[name]
        if not meter.reads:
            meter.since_s = self.clock.monotonic()
        meter.reads += 1
        meter.queued_bytes += byte_count

    def ended(self, name: str, byte_count: int, *, has_come: bool, is_late: bool = False) -> None:
        """Record the end of a read. ``has_come``: all of its bytes arrived. ``is_late``: they did not, because the tier
        was too slow; a read that failed for another reason says nothing of the tier's speed."""
        meter, now = self._meters[name], self.clock.monotonic()
        meter.reads -= 1
        meter.queued_bytes -= byte_count
        meter.come_bytes += byte_count if has_come else 0
        meter.cut_bytes += byte_count if is_late else 0
        counted = meter.come_bytes + meter.cut_bytes
        if meter.reads and (not counted or now - meter.since_s < SLICE_S):
            return  # nothing came yet: the time so far counts for the reads that go on
        seen = BusyTime(counted, now - meter.since_s, is_cut=meter.cut_bytes > 0)
        times = meter.kept.times.observed(seen)
        self.is_changed |= times is not meter.kept.times
        meter.kept = replace(meter.kept, times=times)
        meter.since_s, meter.come_bytes, meter.cut_bytes = now, 0, 0

    @property
    def tiers(self) -> tuple[MeasuredTier, ...]:
        """The measured tiers, in the order in which they came into use."""
        return tuple(
            MeasuredTier(
                name, each.kept.kind, each.kept.times.rate or ASSUMED.get(each.kept.kind, SLOWEST), each.queued_bytes
            )
            for name, each in self._meters.items()
        )

    def pack(self) -> bytes:
        """Return the measurements as ``unpack`` reads them."""
        self.is_changed = False
        return pack_rates({name: each.kept for name, each in self._meters.items()})

    def unpack(self, data: bytes) -> None:
        """Begin with the measurements that an earlier start packed. Tiers that are not in use stay known. Raises
        InvalidRequest saying what is wrong with ``data``."""
        for name, each in unpack_rates(data).items():
            self._meters[name] = _Meter(each)
