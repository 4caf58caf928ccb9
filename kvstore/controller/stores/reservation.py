"""A store in flight: its chunks, and their filled strips."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore.arena import Placement
from kvstore.catalog import Namespace, Use
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
    """Resolved when the chunk is committed or the writer's reservation ends. Made for a WANTED entry, and shared by the
    PENDING entries of other stores."""
    held: int | None = None
    """The row of a PRESENT or COMMITTED entry: held until the reservation ends, because later chunks need their
    parent."""
    moving: set[asyncio.Future[bytes]] = field(default_factory=set)
    failure: KVStoreError | None = None
    """The error of a failed move: such a chunk is never published."""
    layout: ChunkLayout | None = None
    placement: Placement | None = None
    header: ChunkHeader | None = None
    filling: Filling | None = None
    """Set once somebody reads the chunk while it is written."""
    claimed: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    """The strips that a fill has named: no other fill may name them."""
    filled: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    """The strips whose bytes a mover has copied, and whose checksums are in the header."""

    def moved(self, move: Move, rows: bytes) -> int:
        """Take note of a successful move, which returned the checksums ``rows``. Return the bytes moved. Nothing else
        marks strips as filled."""
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
    """A store in flight. ``busy`` counts the movers' jobs that run: no memory is freed meanwhile. ``sessions`` write
    the store together, and ``shard_count`` commits publish it. It ends with the first of its sessions that ends."""

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
    """The levels beyond the node that its writers asked for."""
    is_at_once: bool = False
    """True when chunks are published as soon as they are whole, not only by the commit."""
    published: int = 0
    """Number of leading chunks that are known to be visible, of a store that is published at once."""
    is_publishing: bool = False
    is_counted: bool = False
    """True when the store counted as a use of its chunks."""
    use: Use | None = None
    """Its model and its parts' namespaces, of which it may have no chunk: another store may be writing all of them."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def want(self, level: Durability) -> None:
        """Take note of the durability that a writer asked for; only levels beyond the node matter here."""
        if level > Durability.LOCAL:
            self.levels.add(level)

    @property
    def has_ended(self) -> bool:
        return self.ended.is_set()

    @property
    def result(self) -> StoreResult:
        """The result that its writers get before the commit."""
        states = tuple(entry.state for entry in self.entries)
        return StoreResult(self.reservation_id, states, refusal=self.refusal, ticket=self.ticket)
