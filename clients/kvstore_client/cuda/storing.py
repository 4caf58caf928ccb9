"""Stores of tensors of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvstore.chunk import PartPlace
from kvstore.seams.mapping import address_of
from kvstore.seams.memory import Bytes
from kvstore_client.arrays import Tensor
from kvstore_client.cuda.lanes import run_on
from kvstore_client.cuda.mirror import HostRows, Mirror
from kvstore_client.cuda.slabs import Slabs, pieces
from kvstore_client.planes.store import Steps, Unit

Take = Callable[[int, PartPlace, int, Tensor], None]
"""Brings a part of a slab, given by its number, of chunks from a token on into a tensor on the GPU, integers [chunks,
heads, tokens, dim]."""


def stored_from(gpu: Any, unit: Unit, memory: Bytes, count: int, stride: int, take: Take) -> Steps:
    """Return the copies of a unit, and of the same slabs of the ``count - 1`` chunks behind it, as
    ``planes.store.StoreSource.fused`` describes: in one step, because the GPU makes them side by side by itself."""
    copies = _copies(gpu, unit, memory, count, stride, take)
    return Steps([partial(run_on, gpu, copies)], by_torch=False)


class StripsPart(NamedTuple):
    """The place of a part of some strips in staging, [heads, tokens, dim], where the tokens of each head lie without
    gaps. ``source`` returns their content on the GPU: what it computes runs in order with the copy."""

    array: NDArray[np.generic]
    source: Callable[[], Tensor]


def save_strips(gpu: Any, parts: Iterable[StripsPart]) -> None:
    """Queue the copies of parts of strips, on the current stream."""
    for array, source in parts:
        heads, tokens, dim = array.shape
        width = tokens * dim * array.itemsize
        assert array.strides[1:] == (dim * array.itemsize, array.itemsize), "a head's tokens lie without gaps"
        pitch = array.strides[0] if heads > 1 else width
        memory = as_strided(array[0].view(np.uint8), (pitch * (heads - 1) + width,), (1,))
        mirror = Mirror(HostRows(memory, pitch, width, heads), gpu)
        mirror.view(array.shape, array.strides, 0, array.itemsize).copy_(source())
        mirror.save()


def save_whole(gpu: Any, memory: Bytes, parts: Iterable[StripsPart]) -> None:
    """Queue the copies of all parts of the strips that ``memory`` has, in one run, on the current stream."""
    mirror = Mirror(HostRows(memory, 0, memory.size, 1), gpu)
    for array, source in parts:
        offset = array.__array_interface__["data"][0] - address_of(memory)
        mirror.view((1, *array.shape), (0, *array.strides), offset, array.itemsize)[0].copy_(source())
    mirror.save()


def _copies(gpu: Any, unit: Unit, memory: Bytes, count: int, stride: int, take: Take) -> Iterator[Callable[[], None]]:
    layout, numbers = unit.layout, range(unit.slab_first, unit.slab_stop)
    for places, chunks in pieces(layout, numbers, count, alone=False):
        some = [numbers[place] for place in places]
        begin = layout.slabs[some[0]].offset - unit.base + chunks.start * stride
        slabs = Slabs(layout, some, memory[begin:], len(chunks), stride)
        yield partial(_copy, gpu, slabs, unit.token_start + chunks.start * layout.token_count, take)


def _copy(gpu: Any, slabs: Slabs, token: int, take: Take) -> None:
    """Queue the copies of some slabs of some chunks, the first of which begins at ``token``."""
    mirror = slabs.mirror(gpu)
    for place, part, content in slabs.parts(mirror):
        take(slabs.numbers[place], part, token, content)
    mirror.save()
