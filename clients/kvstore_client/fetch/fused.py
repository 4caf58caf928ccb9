"""Copies all layers of a dense fetch at once: prepared in few steps, and run in few operations.

Views cost more than bytes where a fetch is small: 256 tokens of 30 layers are 60 planes of 100 KB. Where the slabs of
the layers lie at one distance, one view is cut into all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.chunk import STRIP_ALIGNMENT, ChunkLayout
from kvstore.seams import FaultPoints
from kvstore.seams.memory import Bytes
from kvstore_client.arrays import Tensor, torch_module
from kvstore_client.planes.shared_memory.chunk import Chunk, MappedRun

Fused = Callable[[FaultPoints, int], Iterator[Callable[[], None]]]
"""All copies of a fetch, ready to run: a call yields them in so many pieces of about the same size."""
Copy = TypeVar("Copy")
KEPT_MAX = 64
"""The most runs of chunks whose views a session keeps: the views of a chunk of 32 layers take some 30 KiB."""


class PlaneGeometry(NamedTuple):
    """The places of some layers' planes in a chunk, in items from its first byte on."""

    begin: int
    layer_step: int
    strip_step: int
    dims: tuple[int, ...]


@lru_cache(maxsize=256)
def plane_geometry(layout: ChunkLayout, layers: tuple[int, ...]) -> PlaneGeometry | None:
    """Return the geometry; None where the slabs of these layers differ, or lie at different distances."""
    slabs = [layout.slabs[layout.slab_of_layer[layer]] for layer in layers]
    steps = {after.offset - before.offset for before, after in pairwise(slabs)} or {0}
    kinds = {(slab.dims, slab.strip_count) for slab in slabs}
    if layout.blocked or len(steps) > 1 or len(kinds) > 1:
        return None
    size, dims = layout.item_size, tuple(slabs[0].dims)
    strip = -(-layout.token_count * sum(dims) * size // STRIP_ALIGNMENT) * STRIP_ALIGNMENT
    begin = layout.header_bytes + slabs[0].offset
    if any(each % size for each in (begin, strip, *steps)) or min(steps) < 0:
        return None
    return PlaneGeometry(begin // size, steps.pop() // size, strip // size, dims)


class KeptViews:
    """Views of the planes of chunks in mapped memory, kept for the next fetch of the same chunks. Safe to share between
    threads. A chunk's place never changes, so its views stay right as long as the chunk itself is."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._known: dict[tuple[object, ...], tuple[Sequence[Chunk], list[Sequence[Tensor]]]] = {}
        self._is_over = False

    def of(self, run: MappedRun, layers: tuple[int, ...], heads: range, dtype: object) -> list[Sequence[Tensor]] | None:
        """Return as ``sources_of`` does."""
        key = (*map(id, run.chunks), layers, heads, dtype)
        with self._changing:
            known = self._known.pop(key, None)  # it keeps its chunks, so that no other chunk has their ids
            if known is not None:
                self._known[key] = known
                return known[1]
        made = sources_of(run, layers, heads, dtype)
        with self._changing:
            if made is not None and not self._is_over:
                self._known[key] = run.chunks, made
                if len(self._known) > KEPT_MAX:
                    del self._known[next(iter(self._known))]
        return made

    def clear(self) -> None:
        """Drop all views: the session ends, and its memory goes with the last of them."""
        with self._changing:
            self._is_over = True
            self._known.clear()


def copies_of(
    planes: Planes,
    token_count: int,
    runs: Sequence[MappedRun],
    layers: tuple[int, ...],
    heads: range,
    kept: KeptViews | None = None,
) -> Fused | None:
    """Return all copies of these chunks into ``planes``, each [heads, tokens, dim] with at least ``token_count``
    tokens, all tensors of one dtype. None where copies must be made layer by layer: without torch; where slabs or
    chunks lie irregularly; and where a chunk ends behind ``token_count``, as a confused sidecar may say. The views are
    made from strides alone, without bounds, and would reach beyond their plane. ``kept``: views of the chunks that
    earlier fetches made."""
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    make = sources_of if kept is None else kept.of
    for run in runs:
        first, last = run.chunks[0], run.chunks[-1]
        if last.token_start + last.layout.token_count > token_count:
            return None
        found = make(run, layers, heads, planes.sides[0][0].dtype)
        if found is None:
            return None
        for which, views in enumerate(found):
            shape, chunk_tokens = views[0].shape, first.layout.token_count
            targets.extend(planes.parts(which, shape, len(run.chunks), chunk_tokens, first.token_start))
            sources.extend(views)
    assert len(targets) == len(sources), "a copy for each view"
    return partial(_pairs_in_pieces, targets, sources)


class Planes(NamedTuple):
    """The destination of a dense fetch. ``sides``: all K, and all V, each a list over the layers. ``are_alike``: True
    when those of each side have one shape. ``halves``: the same planes, where those of each side are one tensor
    [layers, heads, tokens, dim]."""

    sides: Sequence[Sequence[Tensor]]
    are_alike: bool = False
    halves: Sequence[Tensor] = ()

    def at(self, positions: range) -> Planes:
        """Return the planes of some layers."""
        some = slice(positions.start, positions.stop)
        halves = [half[some] for half in self.halves]
        sides = [half[:1] for half in halves] if halves else [side[some] for side in self.sides]
        return Planes(sides, self.are_alike, halves)

    def parts(
        self, which: int, shape: Sequence[int], count: int, chunk_tokens: int, start: int
    ) -> Iterable[Tensor]:  # fmt: skip
        """Return, of each K or V, a view of the tokens of ``count`` chunks from token ``start`` on, of ``shape``."""
        if self.halves:
            return _block_runs(self.halves[which], shape, count, chunk_tokens, start)
        side = self.sides[which]
        looked_at = side[:1] if self.are_alike else side
        if count > 1 or start or any(plane.shape != shape for plane in looked_at):
            return token_runs(side, shape, count, chunk_tokens, start)
        return side


def sources_of(run: MappedRun, layers: tuple[int, ...], heads: range, dtype: object) -> list[Sequence[Tensor]] | None:
    """Return views of K, and of V, of these chunks in each layer: [heads, tokens, dim] of one chunk, and of several
    [heads, chunks, tokens, dim]. None as ``copies_of`` says."""
    torch, first, count = torch_module(), run.chunks[0], len(run.chunks)
    layout = first.layout
    geometry = plane_geometry(layout, layers)
    if torch is None or geometry is None or first.home is None or run.stride % layout.item_size:
        return None
    region, _, offset = first.home
    memory = region[offset : offset + run.stride * (count - 1) + layout.total_bytes]
    return strip_views(memory, layout, geometry, len(layers), heads, count, run.stride, 0, dtype)


def strip_views(
    memory: Bytes, layout: ChunkLayout, geometry: PlaneGeometry, layer_count: int, heads: range, count: int,
    stride: int, base: int, dtype: object,
) -> list[Sequence[Tensor]]:  # fmt: skip
    """Return views of K, and of V, as ``sources_of`` does, of ``count`` chunks in ``memory``, each ``stride`` bytes
    further. ``base``: the first chunk's byte that the memory begins with. torch refuses views beyond the memory."""
    items = torch_module().from_numpy(memory).view(dtype)
    found: list[Sequence[Tensor]] = []
    at = geometry.begin + heads.start * geometry.strip_step - base // layout.item_size
    for dim in geometry.dims:
        shape, steps = [len(heads), layout.token_count, dim], [geometry.strip_step, dim, 1]
        if count > 1:
            shape.insert(1, count)
            steps.insert(1, stride // layout.item_size)
        views = items.as_strided((layer_count, *shape), (geometry.layer_step, *steps), at)
        found.append(views.unbind())
        at += layout.token_count * dim
    return found


def token_runs(
    planes: Iterable[Tensor], shape: Sequence[int], count: int, chunk_tokens: int, start: int
) -> Iterator[Tensor]:
    """Yield, of each plane, a view of the tokens of ``count`` chunks from token ``start`` on, of ``shape``. Each view
    is made in one step, and planes of the same strides share the computed steps, because a view costs more than a small
    copy."""
    strides: tuple[int, ...] = ()
    for plane in planes:
        if strides != (found := plane.stride()):
            strides = found
            head, token, item = strides
            steps = (head, token * chunk_tokens, token, item) if count > 1 else strides
            skipped = token * start
        yield plane.as_strided(shape, steps, plane.storage_offset() + skipped)


def _block_runs(half: Tensor, shape: Sequence[int], count: int, chunk_tokens: int, start: int) -> Sequence[Tensor]:
    """Return as ``_token_runs`` does, of all planes of one tensor [layers, heads, tokens, dim], in one step."""
    layer, head, token, item = half.stride()
    steps = (head, token * chunk_tokens, token, item) if count > 1 else (head, token, item)
    views: Sequence[Tensor] = half.as_strided(
        (len(half), *shape), (layer, *steps), half.storage_offset() + token * start
    ).unbind()
    return views


def paged_sources(
    run: MappedRun, layers: tuple[int, ...], heads: range, page_tokens: int
) -> list[NDArray[np.generic]] | None:  # fmt: skip
    """Return K, and V, of these chunks as [layers, chunks, pages, page_tokens, heads, dim]. Views, within the run's
    memory. None where slabs or chunks lie irregularly."""
    first, count = run.chunks[0], len(run.chunks)
    layout = first.layout
    geometry = plane_geometry(layout, layers)
    if geometry is None or first.home is None:
        return None
    region, _, offset = first.home
    memory = region[offset : offset + run.stride * (count - 1) + layout.total_bytes]
    return page_views(memory, layout, geometry, len(layers), heads, count, run.stride, 0, page_tokens)


def page_views(
    memory: Bytes, layout: ChunkLayout, geometry: PlaneGeometry, layer_count: int, heads: range, count: int,
    stride: int, base: int, page_tokens: int,
) -> list[NDArray[np.generic]]:  # fmt: skip
    """Return K, and V, as ``paged_sources`` does, of ``count`` chunks in ``memory``, as ``strip_views`` does."""
    size, tokens = layout.item_size, layout.token_count
    found: list[NDArray[np.generic]] = []
    at = geometry.begin + heads.start * geometry.strip_step
    for dim in geometry.dims:
        shape = (layer_count, count, tokens // page_tokens, page_tokens, len(heads), dim)
        steps = (geometry.layer_step, 0, page_tokens * dim, dim, geometry.strip_step, 1)
        strides = [step * size for step in steps]
        strides[1] = stride
        found.append(np.ndarray(shape, f"u{size}", memory.data, at * size - base, strides))
        at += tokens * dim
    return found


def pieces_of(
    copies: Sequence[Copy], run: Callable[[Sequence[Copy]], None], faults: FaultPoints, count: int
) -> Iterator[Callable[[], None]]:  # fmt: skip
    """Yield copies in ``count`` pieces of about the same size; fewer where there are not so many."""
    return (partial(_run, run, copies[piece], faults) for piece in _cut(len(copies), count))


def _run(run: Callable[[Sequence[Copy]], None], copies: Sequence[Copy], faults: FaultPoints) -> None:
    run(copies)
    faults.reach("fetch.copy.middle")


def _pairs_in_pieces(
    targets: list[Tensor], sources: list[Tensor], faults: FaultPoints, count: int
) -> Iterator[Callable[[], None]]:  # fmt: skip
    """Yield as ``pieces_of`` does: copies of a source to the target at its place, two tensors of one shape and
    dtype."""
    return (partial(copy_pairs, targets[piece], sources[piece], faults) for piece in _cut(len(targets), count))


def copy_pairs(targets: list[Tensor], sources: list[Tensor], faults: FaultPoints) -> None:
    """Run copies in one operation, which releases the GIL."""
    torch_module()._foreach_copy_(targets, sources)
    faults.reach("fetch.copy.middle")


def _cut(total: int, count: int) -> Iterator[slice]:
    bounds = [total * number // count for number in range(count + 1)]
    return (slice(start, stop) for start, stop in pairwise(bounds) if start < stop)
