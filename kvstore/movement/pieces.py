"""The pieces of a load: runs of a chunk's slabs that are read together, in the order in which readers want them. Pure.

A piece costs the service some 0.2 ms of its loop, however many bytes it has, and nobody uses it before all of it has
landed. A tier that would make one request of neighbouring pieces anyway (``SharedUse.piece_bytes_max``) gets larger
ones where a load has many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvstore.chunk import ChunkLayout
from kvstore.planning.loading.facts import PIECE_BYTES

PIECE_COUNT_MIN = 8
"""A load whose pieces are large has at least so many, so that a reader can begin long before all of it has landed."""


def piece_bytes_of(load_bytes: int, piece_bytes_max: int) -> int:
    """Return the bytes of a piece, for a load of so many bytes from a tier that takes pieces up to ``piece_bytes_max``
    (0: as small ones as any tier)."""
    return max(PIECE_BYTES, min(piece_bytes_max, load_bytes // PIECE_COUNT_MIN))


def pieces_in_order(layout: ChunkLayout, first: frozenset[int], piece_bytes: int) -> list[range]:
    """Return a chunk's pieces, those of the layers ``first`` first (none: all alike). The first one is small in any
    case: while it is read other chunks are being opened. A larger slab is a piece of its own."""
    slabs = layout.slabs
    wanted = [slab for slab, entry in enumerate(slabs) if not first or entry.layer in first]
    others = [slab for slab in range(len(slabs)) if slab not in set(wanted)]
    pieces: list[range] = []
    for part in (wanted, others):
        size = 0
        for number, slab in enumerate(part):
            size += slabs[slab].byte_count
            most = piece_bytes if len(pieces) > 1 else PIECE_BYTES
            if number and slab == part[number - 1] + 1 and size <= most:
                pieces[-1] = range(pieces[-1].start, slab + 1)
            else:
                pieces.append(range(slab, slab + 1))
                size = slabs[slab].byte_count
    return pieces


def later_pieces(chunks: Sequence[Sequence[range]]) -> Iterator[tuple[int, range]]:
    """Yield (chunk's position, piece) for the pieces after the first one of each chunk: the second ones of all chunks,
    then the third ones, so that a reader can begin with the first layers."""
    for number in range(1, max(map(len, chunks), default=0)):
        for position, pieces in enumerate(chunks):
            if number < len(pieces):
                yield position, pieces[number]
