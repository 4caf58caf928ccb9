"""The place of a chunk in the arena: extents, spans and pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.seams.memory import Bytes


class Extent(NamedTuple):
    """A run of bytes in one region. 4 KiB-aligned."""

    region: int
    offset: int
    byte_count: int


class ExtentSpan(NamedTuple):
    """One extent's bytes: pieces ``piece_first .. piece_stop`` lie in it, back to back."""

    piece_first: int
    piece_stop: int
    data: Bytes


@dataclass(frozen=True, slots=True)
class Placement:
    """A resident chunk's extents (concatenated: its pieces), its generation slot and the value it must keep."""

    slot: int
    generation: int
    extents: tuple[Extent, ...]
    pieces: Sequence[Bytes] = field(repr=False, compare=False)
    """Views of the pieces, in order; a piece never spans extents."""
    spans: Sequence[ExtentSpan] = field(repr=False, compare=False)
    """The extents again, as bytes, each with the pieces that lie in it."""

    @property
    def byte_count(self) -> int:
        return sum(extent.byte_count for extent in self.extents)
