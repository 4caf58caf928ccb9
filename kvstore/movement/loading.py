"""A chunk on its way to memory, as its readers see it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.arena import Placement
from kvstore.chunk import ChunkLayout
from kvstore.movement.sources import ChunkSource
from kvstore.spec import MissReason


@dataclass(eq=False)
class Loading:
    """A chunk on its way to memory. ``landed`` is the bitmap of slabs that have arrived and are verified; ``first`` are
    the layers that a reader waits for (none: all alike), ``pieces`` its reads in order; ``lost`` says why the load
    failed; ``is_entered``: memory took the placement, and frees it, perhaps before the load has ended."""

    row: int
    source: ChunkSource
    layout: ChunkLayout
    placement: Placement
    landed: int = 0
    lost: MissReason = MissReason.NONE
    is_entered: bool = False
    is_done: bool = False
    first: frozenset[int] = frozenset()
    pieces: Sequence[range] = ()
    listeners: dict[asyncio.Event, None] = field(default_factory=dict)
    """Events of the waiting readers, set in the order in which the readers came."""

    @property
    def slab_count(self) -> int:
        return len(self.layout.slabs)

    @property
    def is_provisional(self) -> bool:
        return False

    @property
    def has_landed(self) -> bool:
        return self.landed == (1 << self.slab_count) - 1

    def changed(self) -> None:
        for listener in self.listeners:
            listener.set()

    def slab_landed(self, slabs: range) -> None:
        """Mark slabs as landed and tell the waiting readers."""
        for slab in slabs:
            self.landed |= 1 << slab
        self.changed()
