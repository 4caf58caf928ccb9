"""A slab's bytes as the arrays an engine knows: zero-copy views, token runs by heads by dims."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.chunk.layout import BLOCK_TOKENS, STRIP_ALIGNMENT, ChunkLayout
from kvstore.seams.memory import Bytes

_UNSIGNED: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@dataclass(frozen=True, slots=True)
class Part:
    """A view of part of a slab: ``which`` 0 = K (or latent, or E), 1 = V (or the rope part).

    Shapes: ``array`` is [heads, token_stop - token_start, dim], unsigned integers of the cache's item size.
    """

    which: int
    token_start: int
    token_stop: int
    array: NDArray[Any]


def slab_parts(layout: ChunkLayout, slab_index: int, slab: Bytes) -> list[Part]:
    """The parts of one slab. ``slab`` is its bytes, at least ``byte_count`` of them; nothing is copied.

    Cost: one array view per part, about 1 us each; no loop over heads or tokens.
    """
    entry = layout.slabs[slab_index]
    size = layout.item_size
    dtype = _UNSIGNED[size]
    parts: list[Part] = []
    if not layout.blocked:
        tokens = layout.token_count
        stride = -(-tokens * sum(entry.dims) * size // STRIP_ALIGNMENT) * STRIP_ALIGNMENT
        offset = 0
        for which, dim in enumerate(entry.dims):
            array: NDArray[Any] = np.ndarray(
                (entry.heads, tokens, dim), dtype, slab.data, offset, (stride, dim * size, size)
            )
            parts.append(Part(which, 0, tokens, array))
            offset += tokens * dim * size
        return parts
    place = 0
    for start in range(0, layout.token_count, BLOCK_TOKENS):
        stop = min(start + BLOCK_TOKENS, layout.token_count)
        offset = place
        for which, dim in enumerate(entry.dims):
            array = np.ndarray((1, stop - start, dim), dtype, slab.data, offset)
            parts.append(Part(which, start, stop, array))
            offset += (stop - start) * dim * size
        place += -(-(offset - place) // STRIP_ALIGNMENT) * STRIP_ALIGNMENT
    return parts
