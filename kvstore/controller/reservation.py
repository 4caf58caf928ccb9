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
from kvstore.controller.moving import Move
from kvstore.controller.sessions import Session
from kvstore.errors import KVStoreError
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
    failure: KVStoreError | None = None
    """Why some of its bytes were not moved: it is never published."""
    layout: ChunkLayout | None = None
    placement: Placement | None = None
    header: ChunkHeader | None = None
    filling: Filling | None = None
    """Who reads it while it is written."""
    claimed: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    """The strips that a fill has named: no other may."""
    filled: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    """The strips whose bytes are there, and whose checksums are in the header: a mover said so."""

    def moved(self, move: Move, rows: bytes) -> int:
        """A move has ended well, and found these checksums. Returns the bytes moved. Nothing else fills a strip."""
        byte_count = move.moved(rows)
        self.filled[move.first : move.stop] = True
        if self.filling is not None:
            self.filling.moved()
        return byte_count


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
    supersedes: list[bytes] = field(default_factory=list)
    """Digests of partial chunks that chunks of this store begin with, as its writers say."""
    is_publishing: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def has_ended(self) -> bool:
        return self.ended.is_set()
