"""A chunk that is read while it is written."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore.arena import Placement
from kvstore.chunk import ChunkHeader, ChunkLayout, pack_header
from kvstore.controller.sessions import Lease, Leases
from kvstore.spec import MissReason


@dataclass(eq=False)
class Filling:
    """A chunk on its way to memory from its writers. ``landed``: a bitmap of the filled slabs. They are provisional
    until the chunk is committed; then it ``has_landed``. ``leases``: those of its readers."""

    layout: ChunkLayout
    header: ChunkHeader
    placement: Placement
    landed: int = 0
    lost: MissReason = MissReason.NONE
    has_landed: bool = False
    listeners: dict[asyncio.Event, None] = field(default_factory=dict)
    leases: list[Lease] = field(default_factory=list)

    @property
    def slab_count(self) -> int:
        return len(self.layout.slabs)

    @property
    def is_provisional(self) -> bool:
        return not self.has_landed

    def filled(self, strips: NDArray[np.bool_]) -> None:
        """Take note of the strips filled so far (a flag per strip): slabs whose strips are all filled can be read."""
        whole = np.logical_and.reduceat(strips, self.layout.slab_firsts)
        landed = sum(1 << int(slab) for slab in np.flatnonzero(whole))
        if landed != self.landed:
            self.landed = landed
            self._changed()

    def write_header(self) -> None:
        """Write the header, so that readers see which chunk lies here. The commit writes the checksums."""
        packed = pack_header(self.header, self.layout)
        np.copyto(self.placement.pieces[0], np.frombuffer(packed, np.uint8))

    def committed(self, leases: Leases, row: int) -> None:
        """Take note of the commit: the readers' leases hold the chunk's row from now on."""
        self.landed, self.has_landed = (1 << self.slab_count) - 1, True
        for lease in self.leases:
            leases.extend(lease, row)
        self._changed()

    def aborted(self) -> None:
        """Take note that the chunk will not be committed: readers must discard the slabs that they read."""
        self.lost = MissReason.UNAVAILABLE
        self._changed()

    def _changed(self) -> None:
        for listener in self.listeners:
            listener.set()
