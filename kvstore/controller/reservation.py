"""A store in flight: its chunks, and what of them is there."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvstore.arena import Placement
from kvstore.catalog import Namespace
from kvstore.chunk import ChunkHeader, ChunkLayout
from kvstore.controller.sessions import Session
from kvstore.spec import StoreState

if TYPE_CHECKING:
    from kvstore.controller.joining import Filling


@dataclass(eq=False)
class Entry:
    """One chunk of a reservation. WANTED entries own a placement until they are committed or aborted."""

    namespace: Namespace
    digest: bytes
    parent: bytes
    state: StoreState
    ended: asyncio.Future[None] | None = None
    """Resolved when the writer's reservation ends, whichever way. Set on WANTED, shared by PENDING entries."""
    held: int | None = None
    """The row of a PRESENT or COMMITTED entry: kept until the reservation ends, for the chunks after it."""
    moving: set[asyncio.Future[bytes]] = field(default_factory=set)
    failure: str = ""
    layout: ChunkLayout | None = None
    placement: Placement | None = None
    header: ChunkHeader | None = None
    filling: Filling | None = None
    """Who reads it while it is written."""
    filled: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))


@dataclass(eq=False)
class Reservation:
    """A store in flight. ``busy`` counts fills whose bytes are moving: nothing is freed under them.

    ``sessions`` write it together, ``shard_count`` commits publish it; it ends with the first session that goes.
    """

    reservation_id: int
    sessions: list[Session]
    entries: list[Entry]
    part_count: int
    born_s: float
    refusal: str = ""
    busy: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    fingerprint: bytes = b""
    shard_count: int = 1
    ticket: bytes = b""
    committed: set[int] = field(default_factory=set)
    is_publishing: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def has_ended(self) -> bool:
        return self.ended.is_set()
