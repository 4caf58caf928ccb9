"""A slab's bytes as the arrays an engine knows: zero-copy views, token runs by heads by dims."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.chunk.layout import BLOCK_TOKENS, STRIP_ALIGNMENT, ChunkLayout
from kvstore.seams.memory import Bytes

_UNSIGNED: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@dataclass(frozen=True, slots=True)
class Part:
    """A view of part of a slab, over a run of chunks: ``which`` 0 = K (or latent, or E), 1 = V (or the rope part).

    Shapes: ``array`` is [chunks, heads, token_stop - token_start, dim], unsigned integers of the cache's item size.
    ``token_start`` counts from each chunk's first token.
    """

    which: int
    token_start: int
    token_stop: int
    array: NDArray[Any]


class PartPlace(NamedTuple):
    """The place of a ``Part`` in a run of chunks' slabs: ``shape`` and ``strides`` (bytes) of its array, which begins
    at byte ``offset``."""

    which: int
    token_start: int
    token_stop: int
    offset: int
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]


def slab_parts(
    layout: ChunkLayout, slab_index: int, memory: Bytes, chunk_count: int = 1, stride: int = 0,
    first: int = 0, stop: int | None = None,
) -> list[Part]:  # fmt: skip
    """Return the parts of one slab of ``chunk_count`` chunks of one layout. ``memory`` begins with the first chunk's
    slab; each next chunk's slab lies ``stride`` bytes further. When only strips ``first .. stop`` are wanted (heads, or
    runs of tokens where the layer has no heads), ``memory`` begins with strip ``first``. Nothing is copied.

    Cost: one array view per part, about 1 us each; no loop over heads, tokens or chunks.
    """
    dtype = _UNSIGNED[layout.item_size]
    parts: list[Part] = []
    for each in part_places(layout, slab_index, chunk_count, stride, first, stop):
        array: NDArray[Any] = np.ndarray(each.shape, dtype, memory.data, each.offset, each.strides)
        parts.append(Part(each.which, each.token_start, each.token_stop, array))
    return parts


def part_places(
    layout: ChunkLayout, slab_index: int, chunk_count: int = 1, stride: int = 0, first: int = 0, stop: int | None = None
) -> list[PartPlace]:
    """Return the places of what ``slab_parts`` returns."""
    entry = layout.slabs[slab_index]
    size = layout.item_size
    blocked = layout.blocked
    stop = entry.strip_count if stop is None else stop
    steps = range(first * BLOCK_TOKENS, min(stop * BLOCK_TOKENS, layout.token_count), BLOCK_TOKENS) if blocked else (0,)
    places: list[PartPlace] = []
    place = 0
    for start in steps:
        tokens = min(BLOCK_TOKENS, layout.token_count - start) if blocked else layout.token_count
        strip = tokens * sum(entry.dims) * size
        aligned = -(-strip // STRIP_ALIGNMENT) * STRIP_ALIGNMENT
        offset = place
        for which, dim in enumerate(entry.dims):
            shape = (chunk_count, 1 if blocked else stop - first, tokens, dim)
            strides = (stride, aligned, dim * size, size)
            places.append(PartPlace(which, start, start + tokens, offset, shape, strides))
            offset += tokens * dim * size
        place += aligned
    return places
