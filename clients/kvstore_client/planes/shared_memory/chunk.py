"""Chunks in the sidecar's memory, mapped here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from kvstore_copies import address_of

from kvstore.chunk import ChunkHeader, ChunkLayout, verify_slab
from kvstore.errors import DataLoss
from kvstore.seams.memory import Bytes
from kvstore_client.planes.parts import kept_seeds


@dataclass(frozen=True, eq=False)
class Chunk:
    """One resident part of a chunk: views of its pieces, and the generation that must not change under a copy."""

    part: int
    token_start: int
    layout: ChunkLayout
    extents: list[Bytes]
    slot: int
    generation: int
    header: ChunkHeader
    home: tuple[Bytes, int, int] | None
    """(region bytes, region index, offset) when the chunk lies in one extent."""
    is_provisional: bool = False
    """True while its store is in flight: its checksums are not known yet."""
    near: Chunk | None = None
    """The copy of it in the sidecar's pool on the device that the bytes go to; its ``extents`` are that device's."""

    @cached_property
    def address(self) -> int:
        """The address of its first byte."""
        return address_of(self.extents[0])

    def slab(self, index: int) -> Bytes:
        """Return the bytes of one slab."""
        start = self.layout.header_bytes + self.layout.slabs[index].offset
        for extent in self.extents:
            if start < extent.size:
                return extent[start : start + self.layout.slabs[index].byte_count]
            start -= extent.size
        raise DataLoss("the chunk's extents end before its slabs", reason="extents")

    def is_intact(self, index: int, head_start: int, head_stop: int | None) -> bool:
        """Return True when the strips of a slab (those of a run of heads, where it has heads) match the header's
        checksums. Chunks of a store in flight count as intact: they are checked at its commit."""
        if self.is_provisional:
            return True
        first, stop = (0, None) if self.layout.blocked else (head_start, head_stop)
        count = None if stop is None else stop - first
        return verify_slab(self.slab(index), self.layout, index, self.seeds, self.header.checksums, first, count)

    @property
    def seeds(self) -> list[int]:
        return kept_seeds(self.header.storage_key, self.layout, self.header.write_id)


class MappedRun(NamedTuple):
    """Chunks of one layout, in token order, that lie at a constant distance: copied in one call per part."""

    chunks: list[Chunk]
    stride: int

    def memory(self, slab_index: int) -> Bytes:
        """Return memory that begins with the first chunk's slab and reaches beyond the last's, where chunks lie in one
        extent; else the one chunk's slab."""
        first = self.chunks[0]
        if first.home is None:
            return first.slab(slab_index)
        region, _, offset = first.home
        return region[offset + first.layout.header_bytes + first.layout.slabs[slab_index].offset :]


def runs_of(chunks: Sequence[Chunk]) -> list[MappedRun]:
    """Group neighbours that lie at a constant distance in one region."""
    runs: list[MappedRun] = []
    for chunk in chunks:
        if runs and (stride := _stride(runs[-1], chunk)):
            runs[-1].chunks.append(chunk)
            runs[-1] = MappedRun(runs[-1].chunks, stride)
        else:
            runs.append(MappedRun([chunk], 0))
    return runs


def _stride(run: MappedRun, chunk: Chunk) -> int:
    """Return the distance at which ``chunk`` continues ``run``, or 0."""
    last = run.chunks[-1]
    if last.home is None or chunk.home is None or last.home[1] != chunk.home[1] or last.layout is not chunk.layout:
        return 0
    distance = chunk.home[2] - last.home[2]
    follows = chunk.token_start == last.token_start + last.layout.token_count
    return distance if follows and distance > 0 and run.stride in (0, distance) else 0
