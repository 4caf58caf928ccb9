"""Stores of tensors of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvstore.seams.mapping import address_of
from kvstore.seams.memory import Bytes
from kvstore_client.arrays import Tensor
from kvstore_client.cuda.lanes import run_on
from kvstore_client.cuda.launches import GATHER
from kvstore_client.cuda.mirror import HostRows, Mirror
from kvstore_client.cuda.planes import GpuPlanes
from kvstore_client.cuda.slabs import Slabs, pieces
from kvstore_client.planes.store import Steps, Unit


def stored_from(planes: GpuPlanes, unit: Unit, memory: Bytes, count: int, stride: int) -> Steps:
    """Return the copies of a unit, and of the same slabs of the ``count - 1`` chunks behind it, as
    ``planes.store.StoreSource.fused`` describes: in one step, because the GPU makes them side by side by itself."""
    return Steps([partial(run_on, planes.gpu, _copies(planes, unit, memory, count, stride))], by_torch=False)


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
        mirror = Mirror([HostRows(memory, pitch, width, heads)], gpu)
        mirror.view(array.shape[1:], array.strides[1:], 0, array.itemsize).copy_(source())
        mirror.save()


def save_whole(gpu: Any, memory: Bytes, parts: Iterable[StripsPart]) -> None:
    """Queue the copies of all parts of the strips that ``memory`` has, in one run, on the current stream."""
    mirror = Mirror([HostRows(memory, 0, memory.size, 1)], gpu)
    for array, source in parts:
        offset = array.__array_interface__["data"][0] - address_of(memory)
        mirror.view(array.shape, array.strides, offset, array.itemsize)[0].copy_(source())
    mirror.save()


def _copies(planes: GpuPlanes, unit: Unit, memory: Bytes, count: int, stride: int) -> Iterator[Callable[[], None]]:
    layout, numbers = unit.layout, range(unit.slab_first, unit.slab_stop)
    for places, chunks in pieces(layout, numbers, count, alone=False):
        slabs = Slabs(layout, tuple(numbers[place] for place in places))
        begin = slabs.begin - unit.base + chunks.start * stride
        rows = HostRows(memory[begin:], stride, slabs.width, len(chunks))
        yield partial(_copy, planes, slabs, rows, unit.token_start + chunks.start * layout.token_count)


def _copy(planes: GpuPlanes, slabs: Slabs, rows: HostRows, token: int) -> None:
    """Queue the copies of some slabs of some chunks, the first of which begins at ``token``."""
    mirror = Mirror([rows], planes.gpu)
    step = slabs.layout.token_count
    tokens = token + step * np.arange(rows.row_count, dtype=np.int64)
    if not planes.launches.run(GATHER, slabs.numbers, slabs, mirror.addresses, tokens):
        for place, part in slabs.parts():
            content = mirror.view(part.shape[1:], part.strides[1:], part.offset, slabs.layout.item_size)
            planes.take(slabs.numbers[place], part, content, token, step)
    mirror.save()
