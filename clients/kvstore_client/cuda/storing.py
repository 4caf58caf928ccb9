"""Stores of tensors of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvstore.chunk import Part
from kvstore.seams.memory import Bytes
from kvstore_client.arrays import Tensor
from kvstore_client.copying import copy
from kvstore_client.cuda.lanes import run_on
from kvstore_client.cuda.mirror import HostRows, Mirror
from kvstore_client.cuda.slabs import Slabs, pieces
from kvstore_client.planes.store import Steps, Unit

Take = Callable[[int, Part, int, Tensor], None]
"""Brings a part of a slab, given by its number, of chunks from a token on into a tensor on the GPU, integers [chunks,
heads, tokens, dim]."""


def stored_from(device: Any, unit: Unit, memory: Bytes, count: int, stride: int, take: Take) -> Steps:
    """Return the copies of a unit, and of the same slabs of the ``count - 1`` chunks behind it, as
    ``planes.store.StoreSource.fused`` describes: in one step, because the GPU makes them side by side by itself."""
    copies = _copies(device, unit, memory, count, stride, take)
    return Steps([partial(run_on, device, copies)], by_torch=False)


def save_part(device: Any, target: NDArray[np.generic], source: Callable[[], Tensor]) -> None:
    """Copy a tensor of a GPU, [heads, tokens, dim] of plain integers, into staging, where the tokens of each head lie
    without gaps. ``source`` returns it: what it computes runs in order with the copy."""
    heads, tokens, dim = target.shape
    size = target.itemsize
    assert target.strides[1:] == (dim * size, size), "the tokens of each head lie without gaps"
    width = tokens * dim * size
    pitch = target.strides[0] if heads > 1 else width
    memory = as_strided(target[0].view(np.uint8), (pitch * (heads - 1) + width,), (1,))
    run_on(device, [partial(_save, device, HostRows(memory, pitch, width, heads), target, source)])


def _save(device: Any, rows: HostRows, target: NDArray[np.generic], source: Callable[[], Tensor]) -> None:
    mirror = Mirror(rows, device)
    copy(mirror.view(target), source())
    mirror.save()


def _copies(
    device: Any, unit: Unit, memory: Bytes, count: int, stride: int, take: Take
) -> Iterator[Callable[[], None]]:
    layout, numbers = unit.layout, range(unit.slab_first, unit.slab_stop)
    for places, chunks in pieces(layout, numbers, count, alone=False):
        some = [numbers[place] for place in places]
        begin = layout.slabs[some[0]].offset - unit.base + chunks.start * stride
        slabs = Slabs(layout, some, memory[begin:], len(chunks), stride)
        yield partial(_copy, device, slabs, unit.token_start + chunks.start * layout.token_count, take)


def _copy(device: Any, slabs: Slabs, token: int, take: Take) -> None:
    """Queue the copies of some slabs of some chunks, the first of which begins at ``token``."""
    mirror = slabs.mirror(device)
    for place, part, content in slabs.parts(mirror):
        take(slabs.numbers[place], part, token, content)
    mirror.save()
