"""Rates of tiers: the time that a read of n bytes takes, learned from the times in which a tier was busy. All are
values: the code that measures a read makes a new value with it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from kvstore.planning.loading.least_squares import CAUTION_MAX, caution_of, confidence_of, least_squares
from kvstore.spec import Tier

WINDOW = 16
"""Number of busy times from which a rate is fitted."""
SURPRISE = 2.0
"""A measurement is a surprise when it is this many times longer, or shorter, than expected."""
SIZES_DIFFER = 4.0
"""Least ratio of the largest to the smallest read at which latency and bandwidth can be told apart."""
FITTED_MIN = 3
"""Least number of busy times from which latency and bandwidth are told apart."""
BUSY_S_MIN, BUSY_S_MAX = 1e-9, 3600.0
"""Bounds of a plausible read: a clock resolves nothing shorter, and no tier takes longer."""
BYTES_MAX = 1 << 50


@dataclass(frozen=True)
class BusyTime:
    """``busy_s`` seconds in which a tier moved ``byte_count`` bytes, with any number of reads at once. ``is_cut``: the
    move was given up before all bytes had come, so that the whole would have taken longer."""

    byte_count: int
    busy_s: float
    is_cut: bool = False

    @property
    def is_sound(self) -> bool:
        """False for values that no tier can have: a clock jumped, or a client lies."""
        sound = BUSY_S_MIN <= self.busy_s <= BUSY_S_MAX
        return sound and 0 < self.byte_count <= BYTES_MAX


@dataclass(frozen=True)
class TierRate:
    """The time of a move: ``latency_s`` and ``byte_s`` for each byte, on average, and no more than ``caution`` times
    that in nine of ten cases. Moves of less than about ``least_bytes`` were not measured, and are expected to take as
    long as one of ``least_bytes``."""

    latency_s: float
    byte_s: float
    caution: float
    sample_count: int = 0
    least_bytes: int = 0

    def seconds(self, byte_count: float) -> float:
        if byte_count <= 0:
            return 0.0
        return self.latency_s + self.byte_s * max(byte_count, self.least_bytes)

    @property
    def bytes_per_s(self) -> float:
        return 1.0 / self.byte_s

    @property
    def is_sound(self) -> bool:
        """False for numbers that no tier can have. They are checked because rates come from another process."""
        return (
            0 <= self.latency_s <= BUSY_S_MAX
            and 1 / BYTES_MAX <= self.byte_s <= BUSY_S_MAX
            and 1 <= self.caution <= CAUTION_MAX
            and 0 <= self.least_bytes <= BYTES_MAX
        )

    @property
    def confidence(self) -> float:
        """From 0 (assumed, not measured) to 1."""
        return confidence_of(self.sample_count, self.caution)


ASSUMED = {
    Tier.DRAM: TierRate(0.0005, 1 / 2e9, 2.0),
    Tier.NVME: TierRate(0.002, 1 / 500e6, 2.0),
    Tier.REDIS: TierRate(0.005, 1 / 200e6, 2.0),
    Tier.S3: TierRate(0.05, 1 / 50e6, 2.0),
}
"""The rates of tiers that are not measured yet: half as fast in one case of ten."""
SLOWEST = ASSUMED[Tier.S3]


PROBE_SHARE = 0.02
"""The share of its bandwidth that probes may take of a tier that plans avoid."""


def is_probe_due(rate: TierRate, byte_count: float, since_s: float) -> bool:
    """True when a tier that plans avoid may be probed with a read of ``byte_count``, ``since_s`` seconds after the last
    probe. Without probes no measurement would show that the tier is fast again."""
    return rate.seconds(byte_count) <= PROBE_SHARE * since_s


def probe_count(rate: TierRate) -> int:
    """Return the number of chunks to read in a probe: several where reads of one size made the rate. Only larger ones
    show how much of their time was latency, and a plan that takes all of it for bandwidth never loads many chunks."""
    return int(SIZES_DIFFER) if rate.least_bytes and rate.sample_count >= FITTED_MIN else 1


@dataclass(frozen=True)
class BusyTimes:
    """The last busy times of one tier, oldest first. ``surprises``: the number in a row that took more than twice the
    expected time; negative: less than half of it."""

    times: tuple[BusyTime, ...] = ()
    surprises: int = 0

    @cached_property
    def rate(self) -> TierRate | None:
        """The rate fitted to these measurements; None: nothing was measured."""
        if not self.times:
            return None
        sizes = [each.byte_count for each in self.times]
        seconds = [each.busy_s for each in self.times]
        latency_s, byte_s, least = 0.0, sum(seconds) / sum(sizes), int(min(sizes) / SIZES_DIFFER)
        if len(sizes) >= FITTED_MIN and max(sizes) >= SIZES_DIFFER * min(sizes):
            found = least_squares([(1.0, float(size)) for size in sizes], seconds)
            if found is not None and found[1] >= 1 / BYTES_MAX:
                (latency_s, byte_s), least = found, 0
        bare = TierRate(latency_s, byte_s, 1.0, len(sizes), least)
        ratios = [each.busy_s / bare.seconds(each.byte_count) for each in self.times]
        return replace(bare, caution=caution_of(ratios))

    def observed(self, time: BusyTime) -> BusyTimes:
        """Return the times with one more. A time that is not sound is left out, and so is one that was cut before the
        expected time: it shows nothing. A second surprise of one kind in a row drops all measurements before the first:
        the tier has changed."""
        if not time.is_sound:
            return self
        rate = self.rate
        expected_s = rate.seconds(time.byte_count) if rate is not None else 0.0
        if time.is_cut and time.busy_s <= expected_s:
            return self
        surprises = 0
        if rate is not None and self._has_seen(time.byte_count, rate):
            if time.busy_s > SURPRISE * expected_s:
                surprises = max(self.surprises, 0) + 1
            elif time.busy_s < expected_s / SURPRISE:
                surprises = min(self.surprises, 0) - 1
        if abs(surprises) > 1:
            return BusyTimes((self.times[-1], time))
        return BusyTimes((*self.times, time)[-WINDOW:], surprises)

    def _has_seen(self, byte_count: int, rate: TierRate) -> bool:
        """True when moves of about that size were measured: else a wrong prediction is no surprise."""
        if not rate.least_bytes:
            return True
        sizes = [each.byte_count for each in self.times]
        return min(sizes) / SIZES_DIFFER < byte_count < max(sizes) * SIZES_DIFFER
