"""Slabs of several chunks, which cross between the sidecar's memory and a GPU together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvstore.chunk import ChunkLayout, PartPlace, part_places
from kvstore.seams.mapping import Bytes
from kvstore_client.arrays import Tensor
from kvstore_client.cuda.mirror import DeviceBytes, HostRows, Mirror

PIECE_BYTES = 16 << 20
"""Bytes of scratch memory on the GPU per stream, but that a slab of one chunk may be larger. They cross the bus in
0.3 ms, in which the next piece is queued."""


class Slabs(NamedTuple):
    """Slabs that lie one behind the other in each of some chunks of one layout. ``memory`` begins with the first wanted
    strip of the first chunk's first slab; each next chunk's lies ``stride`` bytes further. ``first``, ``stop``: the
    wanted strips of a slab that is alone; None: up to its last."""

    layout: ChunkLayout
    numbers: Sequence[int]
    memory: Bytes
    chunk_count: int
    stride: int
    first: int = 0
    stop: int | None = None

    def mirror(self, device: object) -> Mirror:
        """Return scratch memory for them on a GPU."""
        first, last = self.layout.slabs[self.numbers[0]], self.layout.slabs[self.numbers[-1]]
        stop = last.strip_count if self.stop is None else self.stop
        offsets, lengths = self.layout.strip_offsets, self.layout.strip_lengths
        end = last.strip_first + stop - 1
        width = int(offsets[end]) + int(lengths[end]) - int(offsets[first.strip_first + self.first])
        return Mirror(HostRows(self.memory, self.stride, width, self.chunk_count), device)

    def parts(self, content: Mirror | DeviceBytes) -> Iterator[tuple[int, PartPlace, Tensor]]:
        """Yield each part of each slab: the place of its slab in ``numbers``, the part, and its content on the GPU,
        integers [chunks, heads, tokens, dim]. ``content``: the slabs there."""
        layout = self.layout
        begin = layout.slabs[self.numbers[0]].offset
        for place, number in enumerate(self.numbers):
            offset = layout.slabs[number].offset - begin
            for part in part_places(layout, number, self.chunk_count, self.stride, self.first, self.stop):
                yield place, part, content.view(part.shape, part.strides, offset + part.offset, layout.item_size)


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
