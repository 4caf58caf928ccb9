"""One region file, and the slots that it is cut into."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.tiers.contract import Residency
from kvstore.units import PAGE_BYTES

SEALED = 1 << 61
"""Set in the residency of a copy in an envelope."""
FLAGS_SHIFT = 56
PLACE_MASK = (1 << FLAGS_SHIFT) - 1
"""The bits of a residency that name the place: region << 32 | slot."""
Places = TypeVar("Places", int, NDArray[np.int64])
"""One residency, or many."""


def region_of(residencies: Places) -> Places:
    """Return the number of the region that each copy lies in."""
    return residencies >> 32 & 0xFFFFFF


def slot_of(residencies: Places) -> Places:
    """Return the slot of its region that each copy lies in."""
    return residencies & 0xFFFFFFFF


def slot_bytes_for(stored: int, *, is_full_raw: bool) -> int:
    """Return the slot size for ``stored`` bytes: exact for a full raw chunk, else rounded up by an eighth at most."""
    pages = -(-stored // PAGE_BYTES)
    if not is_full_raw:
        step = 1 << max(0, pages.bit_length() - 4)
        pages = -(-pages // step) * step
    return pages * PAGE_BYTES


@dataclass(eq=False)
class RegionFile:
    """One file. ``free`` holds the unused slots. A slot that is given back while it is read waits in ``leaving`` for
    its last reader. The content of two kinds of slots is unknown, and neither kind is used for anything else.
    ``unread`` slots could not be read when the file was opened, or only with a key that is not here (``locked``): they
    may hold acknowledged chunks. ``unerased`` slots hold, or may hold, a copy that must not come back: the device
    refused to erase it, or an earlier process erased it, and a power cut may undo that."""

    number: int
    path: Path
    descriptor: int
    slot_bytes: int
    slot_count: int
    is_read_only: bool = False
    sync_failures: int = 0
    free: array[int] = field(default_factory=lambda: array("i"))
    quarantined: list[int] = field(default_factory=list)
    readers: dict[int, int] = field(default_factory=dict)
    leaving: set[int] = field(default_factory=set)
    unread: set[int] = field(default_factory=set)
    locked: dict[int, tuple[bytes, int]] = field(default_factory=dict)
    """Slot -> storage key and mark of the write that is sealed there."""
    unerased: set[int] = field(default_factory=set)
    encodings: bytearray = field(init=False)
    """For each slot in use, the encoding of its chunk, and whether it is sealed."""

    def __post_init__(self) -> None:
        self.encodings = bytearray(self.slot_count)

    @property
    def file_bytes(self) -> int:
        return PAGE_BYTES + self.slot_bytes * self.slot_count

    @property
    def used_count(self) -> int:
        return self.slot_count - len(self.free) - self.resting_count

    @property
    def resting_count(self) -> int:
        """The number of slots that hold no chunk and take none."""
        return len(self.quarantined) + len(self.unread) + len(self.unerased)

    def offset(self, slot: int) -> int:
        return PAGE_BYTES + slot * self.slot_bytes

    def seat(self, slot: int) -> int:
        """Return the place that the header of a replaceable or sealed copy names as its own."""
        return 1 << 63 | self.number << 32 | slot

    def used_slots(self) -> list[Residency]:
        idle = {*self.free, *self.quarantined, *self.unread, *self.unerased}
        return [
            self.encodings[slot] << FLAGS_SHIFT | self.number << 32 | slot
            for slot in range(self.slot_count)
            if slot not in idle
        ]


def remedy_of(regions: Iterable[RegionFile], capacity_bytes: int) -> str:
    """Return what an operator can do about a full device. Sealed chunks whose keys are not here are never evicted, so
    they are named first."""
    locked_bytes = sum(len(each.locked) * each.slot_bytes for each in regions)
    larger = f"raise tiers.nvme.capacity_bytes ({capacity_bytes})"
    if not locked_bytes:
        return larger
    return (
        f"{locked_bytes} bytes of it are chunks sealed with keys that are not in the tenant's envelope key file: put "
        f"the keys back and start again, or {larger}"
    )
