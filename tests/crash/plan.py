"""Where to crash: the points, how often each is passed before it kills, and on what directory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

POINTS: dict[str, int] = {
    "store.filled": 25,
    "store.commit": 25,
    "arena.free.bumped": 12,
    "nvme.allocated": 60,
    "nvme.written": 60,
    "nvme.synced": 40,
    "nvme.acknowledge": 60,
    "nvme.region.begin": 4,
    "nvme.region.opened": 4,
    "nvme.region.allocated": 4,
    "nvme.region.written": 4,
    "nvme.region.synced": 4,
    "nvme.region.retired": 2,
    "nvme.evict": 16,
    "nvme.erased": 3,
    "load.finish": 15,
    "nvme.replace": 3,
    "nvme.snapshot.written": 1,
    "nvme.recovery.begin": 1,
    "nvme.recovery.read": 1,
}
"""Point -> the highest pass at which it kills: as many as the load reaches within a second or so."""
ON_A_FULL_DEVICE = {"nvme.evict", "nvme.region.retired"}
AT_A_STOP = {"nvme.snapshot.written", "nvme.replace"}
"""Passed at a clean stop: the load ends with SIGTERM."""
CRASHES_PER_DIRECTORY = 5


@dataclass(frozen=True)
class Crash:
    """One crash. ``flip``: spoil a chunk on the device before it, for something to quarantine."""

    number: int
    point: str
    count: int
    flip: bool

    @property
    def stops(self) -> bool:
        return self.point in AT_A_STOP


@dataclass(frozen=True)
class Series:
    """Crashes in a row on one directory."""

    seed: int
    crashes: tuple[Crash, ...]
    is_full: bool
    encoding: str


def series(seed: int, count: int) -> list[Series]:
    """``count`` crashes: the points in a random order, again and again, a few of them to a directory."""
    random = np.random.default_rng(seed)
    points: list[str] = []
    while len(points) < count:
        points += [str(point) for point in random.permutation(list(POINTS))]
    full = [point for point in points[:count] if point in ON_A_FULL_DEVICE]
    roomy = [point for point in points[:count] if point not in ON_A_FULL_DEVICE]
    # A full device meets other crashes, too.
    full += roomy[: len(full)]
    roomy = roomy[len(full) // 2 :]
    made: list[Series] = []
    number = 0
    for is_full, names in ((True, [str(each) for each in random.permutation(full)]), (False, roomy)):
        for start in range(0, len(names), CRASHES_PER_DIRECTORY):
            part = names[start : start + CRASHES_PER_DIRECTORY]
            crashes = []
            for point in part:
                flip = point == "nvme.erased" and bool(crashes)
                crashes.append(Crash(number, point, int(random.integers(1, POINTS[point] + 1)), flip))
                number += 1
            encoding = "lz4" if random.random() < 0.25 else "raw"
            made.append(Series(int(random.integers(1 << 31)), tuple(crashes), is_full, encoding))
    return made


def again(seed: int, point: str) -> Series:
    """Another try for a point that was not reached: at its first pass."""
    first = Crash(1000, "store.commit", 20, False)
    return Series(seed, (first, Crash(1001, point, 1, False)), point in ON_A_FULL_DEVICE, "raw")
