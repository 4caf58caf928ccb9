"""Fetches by tickets that name the places of their chunks: without a call.

The ticket holds the chunks where the lookup found them, so a process that maps the sidecar's memory copies them from
there, and then says that it has redeemed the ticket. A place is believed only as far as it can be checked here: the
chunk's header lies there, each further extent begins with a strip whose checksum the header has, and the generation is
unchanged after the copy. Generations begin at a number that the sidecar draws at its start, another one for each slot,
so that neither the places of an earlier start are believed, nor another chunk's slot. Where a check fails, a call
decides.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from kvstore.chunk import verify_slab
from kvstore.errors import DataLoss, InvalidRequest, Unavailable
from kvstore.spec import Exactness, MissReason, Tier
from kvstore_client.fetch.ticket import TICKET_BYTES, TicketFields
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.planes.shared_memory.chunk import Chunk
from kvstore_client.planes.shared_memory.mapped import MappedMemory
from kvstore_client.planes.shared_memory.reading import read_chunk
from kvstore_client.planes.shared_memory.resident import ResidentPrefix
from kvstore_client.prompt import EXACTNESSES


class PlacedPrefix(ResidentPrefix):
    """A prefix that a ticket holds in memory. ``close`` redeems the ticket; so does dropping the prefix."""

    is_leased = True
    is_provisional = False
    _on_closed: Callable[[], object] | None = None

    def __init__(self, session: MappedMemory, wanted: Wanted, chunks: list[Chunk], exactness: Exactness) -> None:
        super().__init__(session, wanted, chunks, exactness, Tier.DRAM, MissReason.NONE)
        self.token_count = self.settle(set())

    def redeem_with(self, on_closed: Callable[[], object]) -> None:
        """Have ``close`` redeem the ticket."""
        self._on_closed = on_closed

    def close(self) -> None:
        """Redeem the ticket. Idempotent. From destructors, too."""
        on_closed, self._on_closed = self._on_closed, None
        if on_closed is not None:
            on_closed()

    __del__ = close


def placed_prefix(
    session: MappedMemory, wanted: Wanted, held: TicketFields, on_closed: Callable[[], object]
) -> PlacedPrefix | None:
    """Return the prefix that lies at a ticket's places. None where a call is needed: they are not the chain's, or not
    all of it lies there any more. ``on_closed`` redeems the ticket."""
    places, exactness = held.places, EXACTNESSES[held.exactness]
    if len(places) != len(held.digests) or len(held.ticket) != TICKET_BYTES:
        return None
    if any(entry.index != number or entry.part or entry.is_arriving for number, entry in enumerate(places)):
        return None
    try:
        chunks = [
            read_chunk(session, wanted, entry, digest, exactness)
            for entry, digest in zip(places, held.digests, strict=True)
        ]
    except (DataLoss, InvalidRequest, Unavailable):
        return None
    if not all(map(_lies_whole, chunks)):
        return None
    prefix = PlacedPrefix(session, wanted, chunks, exactness)
    if prefix.token_count != held.token_count:
        return None
    prefix.redeem_with(on_closed)
    return prefix


def _lies_whole(chunk: Chunk) -> bool:
    """Return True when each extent after the first begins with a strip of the chunk: the header vouches only for the
    extent in which it lies."""
    layout, checksums = chunk.layout, chunk.header.checksums
    starts = [layout.header_bytes + slab.offset for slab in layout.slabs]
    for start, extent in zip(accumulate(each.size for each in chunk.extents), chunk.extents[1:], strict=False):
        if start not in starts or not verify_slab(extent, layout, starts.index(start), chunk.seeds, checksums, 0, 1):
            return False
    return True
