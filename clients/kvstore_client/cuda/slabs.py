"""Slabs of several chunks, which cross between the sidecar's memory and a GPU together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from kvstore.chunk import ChunkLayout, PartPlace, part_places

PIECE_BYTES = 16 << 20
"""Bytes of scratch memory on the GPU per stream, but that a slab of one chunk may be larger. They cross the bus in
0.3 ms, in which the next piece is queued."""


class Slabs(NamedTuple):
    """Slabs that lie one behind the other in each chunk of one layout. ``first``, ``stop``: the wanted strips of a slab
    that is alone; None: up to its last."""

    layout: ChunkLayout
    numbers: tuple[int, ...]
    first: int = 0
    stop: int | None = None

    @property
    def begin(self) -> int:
        """The first wanted byte, counted from a chunk's first slab."""
        slab = self.layout.slabs[self.numbers[0]]
        return int(self.layout.strip_offsets[slab.strip_first + self.first])

    @property
    def width(self) -> int:
        """Bytes from the first wanted one to the last."""
        last = self.layout.slabs[self.numbers[-1]]
        end = last.strip_first + (last.strip_count if self.stop is None else self.stop) - 1
        return int(self.layout.strip_offsets[end]) + int(self.layout.strip_lengths[end]) - self.begin

    def parts(self) -> tuple[tuple[int, PartPlace], ...]:
        """Return the parts of all slabs in one chunk, whose offsets count from the first wanted byte: (the place of the
        slab in ``numbers``, the part)."""
        return _parts_of(self)


@lru_cache(maxsize=256)
def _parts_of(slabs: Slabs) -> tuple[tuple[int, PartPlace], ...]:
    layout = slabs.layout
    base = layout.slabs[slabs.numbers[0]].offset
    return tuple(
        (place, part._replace(offset=part.offset + layout.slabs[number].offset - base))
        for place, number in enumerate(slabs.numbers)
        for part in part_places(layout, number, 1, 0, slabs.first, slabs.stop)
    )


def pieces(layout: ChunkLayout, numbers: Sequence[int], count: int, *, alone: bool) -> Iterator[tuple[range, range]]:
    """Yield pieces of at most PIECE_BYTES, where a chunk's slab is no larger: (places in ``numbers``, chunks).
    ``alone``: a piece has one slab."""
    start = 0
    while start < len(numbers):
        stop, byte_count = start + 1, layout.slabs[numbers[start]].byte_count
        while not alone and stop < len(numbers) and numbers[stop] == numbers[stop - 1] + 1:
            byte_count += layout.slabs[numbers[stop]].byte_count
            if byte_count * count > PIECE_BYTES:
                byte_count -= layout.slabs[numbers[stop]].byte_count
                break
            stop += 1
        step = max(1, PIECE_BYTES // byte_count)
        for chunk in range(0, count, step):
            yield range(start, stop), range(chunk, min(count, chunk + step))
        start = stop
