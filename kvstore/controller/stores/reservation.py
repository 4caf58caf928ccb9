"""A store in flight: its chunks, and what of them is there."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore.arena import Placement
from kvstore.catalog import Namespace
from kvstore.chunk import ChunkHeader, ChunkLayout
from kvstore.controller.sessions import Session
from kvstore.controller.stores.filling import Filling
from kvstore.controller.stores.mover import Move
from kvstore.controller.values import StoreResult
from kvstore.errors import KVStoreError
from kvstore.spec import Durability, StoreState


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
    """Set once somebody reads it while it is written."""
    claimed: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    """The strips that a fill has named: no other may."""
    filled: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    """The strips whose bytes are there, and whose checksums are in the header: a mover said so."""

    def moved(self, move: Move, rows: bytes) -> int:
        """A move has ended well, and found these checksums. Returns the bytes moved. Nothing else fills a strip."""
        byte_count = move.moved(rows)
        self.filled[move.first : move.stop] = True
        if self.filling is not None:
            self.filling.filled(self.filled)
        return byte_count

    def tell_end(self) -> None:
        """Wake the stores that wait for this chunk. Idempotent."""
        if self.ended is not None and not self.ended.done():
            self.ended.set_result(None)


@dataclass(eq=False)
class Reservation:
    """A store in flight. ``busy`` counts the movers' jobs that run: nothing is freed under them. ``sessions`` write it
    together, and ``shard_count`` commits publish it. It ends with the first of its sessions that ends."""

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
    levels: set[Durability] = field(default_factory=set)
    """Beyond the node, which its writers asked for."""
    is_publishing: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def want(self, level: Durability) -> None:
        """A writer asked for this level."""
        if level > Durability.LOCAL:
            self.levels.add(level)

    @property
    def has_ended(self) -> bool:
        return self.ended.is_set()

    @property
    def result(self) -> StoreResult:
        """The result that writers get before the commit."""
        states = tuple(entry.state for entry in self.entries)
        return StoreResult(self.reservation_id, states, refusal=self.refusal, ticket=self.ticket)
