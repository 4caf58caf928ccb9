"""What a tier promises."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.chunk import ChunkHeader, ChunkLayout, write_mark
from kvstore.errors import DataLoss
from kvstore.seams.memory import Bytes

Residency = int
"""Where a tier keeps one copy: the tier's own number, not negative, meaningless elsewhere."""


@dataclass(frozen=True, slots=True)
class ChunkName:
    """Which chunk is asked for. ``mark`` is the first 8 bytes of the write id the catalog knows; None: any write."""

    storage_key: bytes
    layout: ChunkLayout
    mark: int | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """One copy that a scan met."""

    residency: Residency
    header: ChunkHeader


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """A tier's account, in bytes: ``file_bytes`` = ``allocated_bytes`` + ``free_bytes`` + ``quarantined_bytes`` +
    ``overhead_bytes``, and never above ``capacity_bytes``. ``state`` is "up", "read-only" or "failing"."""

    name: str
    state: str
    capacity_bytes: int
    file_bytes: int
    allocated_bytes: int
    free_bytes: int
    quarantined_bytes: int
    overhead_bytes: int
    chunk_count: int
    read_bytes: int
    written_bytes: int
    verified_bytes: int


class StoredChunk(Protocol):
    """One copy, opened: its header was read and is the chunk that was asked for. Close it: the room it takes is not
    reused before."""

    @property
    def header(self) -> ChunkHeader: ...

    async def read(self, slabs: range, target: Sequence[Bytes]) -> None:
        """Fill ``target`` (one uint8 array per slab of the run, of the slab's raw size) with raw, verified bytes.

        Raises: DataLoss when a strip fails its check; Unavailable when the device fails. ``target`` then holds
        anything.
        """

    def close(self) -> None:
        """Idempotent."""


class Tier(Protocol):
    """A store of whole chunks. Calls may run concurrently; a cancelled call leaves the tier whole."""

    async def write(self, header: ChunkHeader, layout: ChunkLayout, pieces: Sequence[Bytes]) -> Residency:
        """Keep a raw chunk: ``pieces`` are its packed header and its slabs. When it returns the copy is as durable
        as this tier makes anything. ``pieces`` must not change meanwhile.

        Raises: Exhausted when there is no room (the caller evicts); Unavailable when the device refuses.
        """

    async def open(self, name: ChunkName, residency: Residency) -> StoredChunk:
        """Find one copy. Raises: DataLoss when what lies there is not that chunk; Unavailable as above."""

    async def remove(self, residencies: Sequence[Residency], *, erase: bool = False) -> None:
        """Give their room back. ``erase``: for ever, also for a rebuild that knows nothing but the device. Where that
        raises, the one it failed at and those after it are still the caller's."""

    def scan(self) -> AsyncIterator[Found]:
        """Every copy there is, by what the tier itself holds. A copy that cannot be read is left out."""

    def statistics(self) -> TierStatistics: ...


def check_header(name: ChunkName, header: ChunkHeader) -> ChunkHeader:
    """The place where a copy proves that it is the chunk that was asked for. Raises DataLoss."""
    if header.storage_key != name.storage_key:
        raise DataLoss("another chunk lies where this one should", reason="header")
    if name.mark is not None and write_mark(header.write_id) != name.mark:
        raise DataLoss("another write of the chunk lies where this one should", reason="write id")
    return header
