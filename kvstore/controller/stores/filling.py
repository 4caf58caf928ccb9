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
    """A chunk on its way to memory from its writers. ``landed`` are the slabs that are filled. They are provisional
    until the chunk is committed, which is when it ``has_landed``. ``leases``: of those who read it."""

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
        """These strips are filled by now: whole slabs of them can be read."""
        whole = np.logical_and.reduceat(strips, self.layout.slab_firsts)
        landed = sum(1 << int(slab) for slab in np.flatnonzero(whole))
        if landed != self.landed:
            self.landed = landed
            self._changed()

    def write_header(self) -> None:
        """Say whose chunk it is. The checksums follow when it is committed."""
        packed = pack_header(self.header, self.layout)
        np.copyto(self.placement.pieces[0], np.frombuffer(packed, np.uint8))

    def committed(self, leases: Leases, row: int) -> None:
        """Its readers hold the chunk's row from now on."""
        self.landed, self.has_landed = (1 << self.slab_count) - 1, True
        for lease in self.leases:
            leases.extend(lease, row)
        self._changed()

    def aborted(self) -> None:
        """It will not be committed: what was read of it is nothing."""
        self.lost = MissReason.UNAVAILABLE
        self._changed()

    def _changed(self) -> None:
        for listener in self.listeners:
            listener.set()
