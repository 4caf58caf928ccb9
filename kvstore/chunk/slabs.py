"""Slabs of a stored copy on their way to memory: where their bytes go, and how they are verified. ``Making`` is the way
back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvstore.chunk.encoding import slab_range
from kvstore.chunk.header import ChunkHeader
from kvstore.chunk.layout import ChunkLayout
from kvstore.chunk.making import decode_slabs
from kvstore.chunk.strips import StripRun, settle_runs, slab_runs, strip_run
from kvstore.seams.memory import Bytes


class _Encoded(NamedTuple):
    """The slabs of an encoded copy."""

    header: ChunkHeader
    layout: ChunkLayout
    slabs: range


class StoredSlabs(NamedTuple):
    """Slabs that a byte mover reads and verifies: ``byte_count`` bytes as they are stored. ``target``: the memory for
    the raw bytes; without it they are only checked. Of a raw copy the mover gets ``strips``, which have the checksums
    ``expected``, and no layout: that would cost the service's loop more than all else of a job."""

    byte_count: int
    target: Sequence[Bytes] = ()
    strips: Sequence[StripRun] = ()
    expected: bytes = b""
    encoded: _Encoded | None = None

    @staticmethod
    def of(header: ChunkHeader, layout: ChunkLayout, slabs: range, target: Sequence[Bytes] = ()) -> StoredSlabs:
        """Return these slabs of a copy. ``target``: an array for each, of its raw size."""
        byte_count = slab_range(header, layout, slabs.start, slabs.stop)[1]
        if header.stored is not None:
            return StoredSlabs(byte_count, target, encoded=_Encoded(header, layout, slabs))
        key, write_id, places = header.storage_key, header.write_id, layout.strips_of(slabs)
        expected = header.checksums_of(*places)
        if not target:
            return StoredSlabs(byte_count, (), [strip_run(layout, key, write_id, *places, header.seal)], expected)
        runs = slab_runs(layout, key, write_id, slabs, target, header.seal)
        return StoredSlabs(byte_count, [data for data, _ in runs], [strips for _, strips in runs], expected)

    def room(self, allocate: Callable[[int], Bytes] | None = None) -> Sequence[Bytes]:
        """Return the memory that the stored bytes are read into, one array after the other. ``allocate``: makes new
        memory of so many bytes."""
        if self.encoded is None and self.target:
            return self.target
        return [allocate(self.byte_count) if allocate else np.empty(self.byte_count, np.uint8)]

    def are_right(self, room: Sequence[Bytes]) -> bool:
        """Blocking. Verify the bytes in the ``room``, and write them raw to the target. False when they do not match
        the header: the target then holds anything."""
        if self.encoded is None:
            return settle_runs(list(zip(room, self.strips, strict=True)), self.expected)
        header, layout, slabs = self.encoded
        target = self.target or [np.empty(layout.slabs[slab].byte_count, np.uint8) for slab in slabs]
        return decode_slabs(header, layout, slabs, room[0], target)
