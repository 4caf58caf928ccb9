"""A chunk on its way to memory from its writers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore.arena import Placement
from kvstore.chunk import ChunkHeader, ChunkLayout, pack_header
from kvstore.controller.sessions import Lease, Leases
from kvstore.controller.stores.mover import Move
from kvstore.errors import KVStoreError
from kvstore.spec import MissReason


@dataclass(eq=False)
class Filling:
    """A chunk that is being written. It may be read meanwhile. ``landed``: a bitmap of the filled slabs, once there are
    readers. The slabs are provisional until the chunk is committed; then it ``has_landed``. ``leases``: those of its
    readers."""

    layout: ChunkLayout
    header: ChunkHeader
    placement: Placement
    moving: set[asyncio.Future[bytes]] = field(default_factory=set)
    failure: KVStoreError | None = None
    """The error of a failed move: such a chunk is never published."""
    has_readers: bool = False
    landed: int = 0
    lost: MissReason = MissReason.NONE
    has_landed: bool = False
    listeners: dict[asyncio.Event, None] = field(default_factory=dict)
    leases: list[Lease] = field(default_factory=list)
    claimed: NDArray[np.bool_] = field(init=False)
    """The strips that a fill has named: no other fill may name them."""
    filled: NDArray[np.bool_] = field(init=False)
    """The strips whose bytes a mover has copied, and whose checksums are in the header."""

    def __post_init__(self) -> None:
        self.claimed, self.filled = np.zeros((2, self.layout.strip_count), np.bool_)

    @property
    def slab_count(self) -> int:
        return len(self.layout.slabs)

    @property
    def is_provisional(self) -> bool:
        return not self.has_landed

    def moved(self, move: Move, rows: bytes) -> int:
        """Take note of a successful move, which returned the checksums ``rows``. Return the bytes moved. Nothing else
        marks strips as filled."""
        byte_count = move.moved(rows)
        self.filled[move.first : move.stop] = True
        if self.has_readers:
            self._land()
        return byte_count

    def read(self) -> None:
        """Take note of a reader. The first one finds the header, which says which chunk lies here; the commit writes it
        again, with the checksums."""
        if not self.has_readers:
            self.has_readers = True
            self.write_header()
            self._land()

    def _land(self) -> None:
        """Tell readers of slabs whose strips are all filled: they can be read."""
        whole = np.logical_and.reduceat(self.filled, self.layout.slab_firsts)
        landed = sum(1 << int(slab) for slab in np.flatnonzero(whole))
        if landed != self.landed:
            self.landed = landed
            self._changed()

    def write_header(self) -> None:
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
