"""One chunk on its way to memory, and those who wait for it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from kvstore.arena import Placement
from kvstore.chunk import ChunkLayout
from kvstore.movement.sources import ChunkSource
from kvstore.spec import MissReason


@dataclass(eq=False)
class Loading:
    """A chunk on its way to memory. ``landed`` is the bitmap of slabs that have arrived and are verified; ``first`` are
    the layers that a reader waits for (none: all alike); ``lost`` says why the load failed.

    A load whose last reader left before it had what it waits for ends: no more of it is read than what a tier has
    begun. Of a reader that waited until its deadline it goes on: the next one finds it."""

    row: int
    source: ChunkSource
    layout: ChunkLayout
    placement: Placement
    landed: int = 0
    lost: MissReason = MissReason.NONE
    is_done: bool = False
    is_left: bool = False
    """True when it was lost because its readers left."""
    first: frozenset[int] = frozenset()
    expected: int = 0
    """Number of those who asked for it and do not listen yet, or never will: it goes on for these."""
    listeners: dict[asyncio.Event, None] = field(default_factory=dict)
    """Events of the waiting readers, set in the order in which the readers came."""
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)
    """The calls of its tier. Cancelled, each ends once the tier fills its memory no more."""

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

    def attend(self, listener: asyncio.Event) -> None:
        """Have a reader that asked for the chunk hear of it from now on."""
        self.expected -= 1
        self.listeners[listener] = None

    def leave(self, listener: asyncio.Event) -> None:
        """Take note that a reader waits no more. The last one ends the load, unless it has what it waits for."""
        if listener not in self.listeners:
            return
        del self.listeners[listener]
        if self.listeners or self.expected > 0 or self.is_done or self.lost or self._has_wanted:
            return
        self.lost, self.is_left = MissReason.UNAVAILABLE, True
        for task in self.tasks:
            task.cancel()

    @property
    def _has_wanted(self) -> bool:
        wanted = [slab for slab, entry in enumerate(self.layout.slabs) if not self.first or entry.layer in self.first]
        return all(self.landed >> slab & 1 for slab in wanted)
