"""Pieces of a cache, in an engine's order, gathered in staging until they are whole strips."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.chunk import ChunkLayout, slab_parts
from kvstore.chunk.layout import STRIP_ALIGNMENT
from kvstore.errors import InvalidRequest
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.arrays import Tensor, settle_device
from kvstore_client.copying import Copier, copy, raw
from kvstore_client.cuda import common_gpu
from kvstore_client.cuda.lanes import run_on
from kvstore_client.cuda.storing import StripsPart, save_strips, save_whole
from kvstore_client.fetch.paged import Pages
from kvstore_client.planes.store import StagingRun

FILL_BYTES_MAX = 32 << 20
"""Bytes of a fill of several strips: what the sidecar's byte movers copy at a time, and half of what gRPC takes."""


class StripRange(NamedTuple):
    """Some heads of one layer of one chunk: consecutive strips."""

    entry: int
    slab: int
    head_start: int
    head_stop: int


class Pile:
    """Strips that are being gathered in staging. ``there``: the tokens gathered so far."""

    def __init__(self, strips: StripRange, layout: ChunkLayout, run: StagingRun) -> None:
        self.first, self.count = strip_range(layout, strips)
        self._strip_bytes = -(-int(layout.strip_lengths[self.first]) // STRIP_ALIGNMENT) * STRIP_ALIGNMENT
        """Bytes from one strip to the next: in a slab all strips but the last are as long."""
        self.run = run
        self.strips = strips
        self.layout = layout
        self.there: NDArray[np.bool_] = np.zeros(layout.token_count, np.bool_)
        first, stop = (0, None) if layout.blocked else (strips.head_start, strips.head_stop)
        memory = run.memory[run.offset : run.offset + run.byte_count]  # excludes the next run
        self.parts = slab_parts(layout, strips.slab, memory, first=first, stop=stop)
        self.memory = memory
        self.byte_count = strips_bytes(layout, strips)

    def fills(self) -> Iterator[tuple[pb.Fill, StagingRun]]:
        """Yield its strips as fills, each with its part of the run: all of them may be too large for one message."""
        step = max(1, FILL_BYTES_MAX // self._strip_bytes)
        for first in range(0, self.count, step):
            count, start = min(step, self.count - first), first * self._strip_bytes
            stop = start + count * self._strip_bytes if first + count < self.count else self.run.byte_count
            run = self.run._replace(offset=self.run.offset + start, byte_count=stop - start)
            yield pb.Fill(
                chunk=self.strips.entry, strip_first=self.first + first, strip_count=count,
                staging_id=run.staging_id, staging_offset=run.offset,
            ), run  # fmt: skip


def strip_range(layout: ChunkLayout, strips: StripRange) -> tuple[int, int]:
    """Return (first, count) of the strips: all of a slab that is cut by tokens, not by heads."""
    slab = layout.slabs[strips.slab]
    if layout.blocked:
        return slab.strip_first, slab.strip_count
    return slab.strip_first + strips.head_start, strips.head_stop - strips.head_start


def strips_bytes(layout: ChunkLayout, strips: StripRange) -> int:
    """Return the bytes from the first of the strips to the end of the last."""
    first, count = strip_range(layout, strips)
    last = first + count - 1
    return int(layout.strip_offsets[last]) + int(layout.strip_lengths[last]) - int(layout.strip_offsets[first])


class Dense:
    """Tokens of one layer, dense: ``planes`` are [heads, tokens, dim]."""

    def __init__(self, planes: Sequence[Tensor]) -> None:
        settle_device(planes)
        self._planes = [raw(plane) for plane in planes]
        self.gpu = common_gpu(planes)
        self.token_count = int(planes[0].shape[1])

    def copy(self, target: NDArray[np.generic], which: int, token: int) -> None:
        """Fill ``target``, [heads, tokens, dim], with the tokens of one half from ``token`` on."""
        copy(raw(target), self.on_gpu(which, token, target.shape[1]))

    def on_gpu(self, which: int, token: int, count: int) -> Tensor:
        """Return what ``copy`` copies, where it lies."""
        return self._planes[which][:, token : token + count]


class FromPages:
    """Tokens of one layer, the one at ``position``, in an engine's pages. Every token must have a slot."""

    def __init__(self, pages: Pages, position: int = 0) -> None:
        if (pages.slots < 0).any():
            raise InvalidRequest("slots: a token without a place cannot be stored: put runs without gaps")
        self.pages = pages
        self.gpu = pages.gpu
        self._position = position
        self.token_count = len(pages.slots)

    def on_gpu(self, which: int, token: int, count: int) -> Tensor:
        """Return what ``copy`` copies, gathered on the GPU: queued on the current stream."""
        return self.pages.slots_on_gpu.tokens(self.pages.plane(self._position, which), token, token + count)

    def copy(self, target: NDArray[np.generic], which: int, token: int, heads: slice = slice(None)) -> None:
        """Copy as ``Dense.copy`` does, these ``heads`` of the pages."""
        self.pages.exchange(self._position, which, target, token, heads, are_targets=False)


PutTokens = tuple[Pile, int, int, int]
"""(a pile, start and stop of the tokens of its chunk that come, the place of the chunk's first token in the source)."""


def gather(source: Dense | FromPages, work: Sequence[PutTokens], copier: Copier, timeout_s: float) -> None:
    """Copy tokens into piles, all of one layer. Raises the error of a failed copy; DeadlineExceeded while one may still
    be running."""
    if source.gpu is not None:
        run_on(source.gpu, [partial(_save, source, *one) for one in work])
    else:
        copier.share(partial(_copy_one, source), work, sum(pile.run.byte_count for pile, *_ in work), timeout_s)


def _copy_one(source: Dense | FromPages, one: PutTokens) -> None:
    for array, which, token in _places_of(*one):
        source.copy(array, which, token)


def _save(source: Dense | FromPages, pile: Pile, start: int, stop: int, offset: int) -> None:
    """Queue the same from a GPU, on the current stream."""
    places = _places_of(pile, start, stop, offset)
    parts = [StripsPart(array, partial(source.on_gpu, which, token, array.shape[1])) for array, which, token in places]
    if (start, stop) == (0, pile.layout.token_count):
        save_whole(source.gpu, pile.memory[: pile.byte_count], parts)
    else:
        save_strips(source.gpu, parts)


def _places_of(pile: Pile, start: int, stop: int, offset: int) -> Iterator[tuple[NDArray[np.generic], int, int]]:
    """Yield the places in staging of the tokens that come, [heads, tokens, dim], each with its half, and its first
    token's place in the source."""
    for part in pile.parts:
        first, last = max(start, part.token_start), min(stop, part.token_stop)
        if first < last:
            yield part.array[0, :, first - part.token_start : last - part.token_start], part.which, offset + first
