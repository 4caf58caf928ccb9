"""Copies of chunks in a device's pool into pages on the same device."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore_client.arrays import Tensor, torch_module
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.planes.shared_memory.chunk import MappedRun
from kvstore_client.planes.shared_memory.pool import parts_of

PageRows = tuple[int | slice, slice]
"""Some of the pages of some chunks, where these are [chunks, pages of a chunk]."""


class NearPages(Protocol):
    """Pages on a device. ``on_device``: what is kept of them here."""

    page_size: int
    on_device: dict[tuple[int, int, int], list[tuple[PageRows, Tensor]] | None]

    def plane(self, position: int, which: int) -> Tensor:
        """Return K or V of one wanted layer as plain integers, [pages, page_size, heads, dim]."""

    def places_of(self, begin: int, chunk_tokens: int, count: int) -> list[tuple[PageRows, NDArray[np.intp]]] | None:
        """Return the places of ``count`` chunks of whole pages from token ``begin`` on."""


def put_run(wanted: Wanted, pages: NearPages, position: int, run: MappedRun) -> bool:
    """Copy one wanted layer of the chunks into whole pages, a half in one operation. False where tokens lie in parts of
    pages."""
    first, count = run.chunks[0], len(run.chunks)
    layout = first.layout
    places = None if layout.blocked else _places(pages, first.token_start, layout.token_count, count)
    if places is None:
        return False
    index, heads = layout.slab_of_layer[wanted.layers[position]], slice(wanted.head_start, wanted.head_stop)
    for part in parts_of(layout, index, run.memory(index), count, run.stride):
        strips: Tensor = part.array
        content = strips[:, heads].unflatten(2, (-1, pages.page_size)).permute(0, 2, 3, 1, 4)
        for some, numbers in places:
            pages.plane(position, part.which)[numbers] = content[some]
    return True


def _places(pages: NearPages, begin: int, chunk_tokens: int, count: int) -> list[tuple[PageRows, Tensor]] | None:
    """Return ``Pages.places_of``, with the numbers on the pages' device. Kept: they are the same for each layer."""
    key = begin, chunk_tokens, count
    if key not in pages.on_device:
        found, device = pages.places_of(*key), pages.plane(0, 0).device
        pages.on_device[key] = found and [
            (some, torch_module().from_numpy(np.array(numbers, np.int64)).to(device)) for some, numbers in found
        ]
    return pages.on_device[key]
