"""A chunk on its way to a slot, as the argument of a byte mover's job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvstore.chunk import (
    ChunkHeader,
    ChunkLayout,
    Sealing,
    StripMemory,
    sealed_header_bytes,
    slab_range,
    slab_runs,
    stored_run,
)
from kvstore.seams.memory import Bytes, joined
from kvstore.spec import CacheKind
from kvstore.tiers.nvme.io import IO_BYTES, seated, write_runs, write_sealed


def stored_header_bytes(layout: ChunkLayout, sealing: Sealing | None) -> int:
    """Return the size of a header as it is stored."""
    return layout.header_bytes if sealing is None else sealed_header_bytes(layout.strip_count)


@dataclass(frozen=True, eq=False)
class Outgoing:
    """``memory``: the packed header, and the encoded body. ``sealing``: the envelope that the copy gets."""

    header: ChunkHeader
    layout: ChunkLayout
    memory: Sequence[Bytes] = field(repr=False)
    sealing: Sealing | None

    @property
    def byte_count(self) -> int:
        """The bytes that the copy takes on the device."""
        packed = sum(piece.size for piece in self.memory)
        return packed - self.layout.header_bytes + stored_header_bytes(self.layout, self.sealing)

    @property
    def may_be_replaced(self) -> bool:
        return self.header.kind is CacheKind.OPAQUE

    def job(self, seat: int) -> tuple[Callable[..., None], tuple[object, ...]]:
        """Return the function that writes the copy, and its arguments after the engine, the file and the offset
        there."""
        if self.sealing is not None:
            header_bytes = stored_header_bytes(self.layout, self.sealing)
            return write_sealed, (
                header_bytes,
                self.sealing,
                seat,
                self.memory[0][: self.layout.header_bytes],
                self._runs(),
            )
        runs = joined(self.memory)
        return write_runs, (seated(runs, self.layout.header_bytes, seat) if self.may_be_replaced else runs,)

    def _runs(self) -> list[StripMemory]:
        """Return the body, cut where slabs end, in runs of about the size of one device request."""
        header, layout = self.header, self.layout
        key, write_id, runs = header.storage_key, header.write_id, list[StripMemory]()
        for slabs in _parts(layout):
            if header.stored is None:
                memory = self.memory[1 + slabs.start : 1 + slabs.stop]
                runs += slab_runs(layout, key, write_id, slabs, memory)
            else:
                start, size = slab_range(header, layout, slabs.start, slabs.stop)
                place = layout.header_bytes + start
                runs.append((self.memory[0][place : place + size], stored_run(header, layout, slabs)))
        return runs


def _parts(layout: ChunkLayout) -> Iterator[range]:
    """Yield runs of slabs of IO_BYTES together at most, or of one larger slab."""
    first = size = 0
    for number, slab in enumerate(layout.slabs):
        if size and size + slab.byte_count > IO_BYTES:
            yield range(first, number)
            first, size = number, 0
        size += slab.byte_count
    yield range(first, len(layout.slabs))
