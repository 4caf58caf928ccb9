"""A store in flight, and its chunks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from kvstore.catalog import Namespace, Use
from kvstore.controller.sessions import Session
from kvstore.controller.stores.filling import Filling
from kvstore.controller.values import StoreResult
from kvstore.spec import Durability, StoreState


@dataclass(eq=False)
class Entry:
    """One chunk of a reservation. A WANTED one owns the placement of its filling until it is committed or aborted."""

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
    filling: Filling | None = None
    """The chunk as this store writes it: made for a WANTED entry."""

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
    def fillings(self) -> list[Filling]:
        """The chunks that this store writes, or has written."""
        return [entry.filling for entry in self.entries if entry.filling is not None]

    @property
    def has_ended(self) -> bool:
        return self.ended.is_set()

    @property
    def result(self) -> StoreResult:
        """The result that its writers get before the commit."""
        states = tuple(entry.state for entry in self.entries)
        return StoreResult(self.reservation_id, states, refusal=self.refusal, ticket=self.ticket)
