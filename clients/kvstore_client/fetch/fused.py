"""Copies all layers of a dense fetch at once: prepared in few steps, and run in few operations.

Views cost more than bytes where a fetch is small: 256 tokens of 30 layers are 60 planes of 100 KB. Where the slabs of
the layers lie at one distance, they are one array. Compiled code copies it to all planes (``kvstore_copies``); without
it, torch copies views of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from sys import maxsize
from typing import NamedTuple, TypeVar

import numpy as np
from kvstore_copies import Batch, Blocks, batch_of, is_compiled
from numpy.typing import NDArray

from kvstore.chunk import STRIP_ALIGNMENT, ChunkLayout
from kvstore.seams import FaultPoints
from kvstore.seams.memory import Bytes
from kvstore_client.arrays import Tensor, is_tensor, settle_device, tell_graphs, torch_module
from kvstore_client.copying import plainly
from kvstore_client.fetch.in_memory import PlacedPlanes, placed_planes
from kvstore_client.planes.shared_memory.chunk import MappedRun


class Fused(NamedTuple):
    """All copies of a fetch, ready to run. A call of ``pieces`` yields them in so many pieces of about the same size.
    ``by_torch``: torch or numpy makes them; else compiled code does, on threads of its own choice."""

    pieces: Callable[[FaultPoints, int], Iterator[Callable[[], None]]]
    by_torch: bool = True


Copy = TypeVar("Copy")


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


def copies_of(
    planes: Planes, token_count: int, runs: Sequence[MappedRun], layers: tuple[int, ...], heads: range
) -> Fused | None:  # fmt: skip
    """Return all copies of these chunks into ``planes``, each [heads, tokens, dim] with at least ``token_count``
    tokens, all of one dtype. None where copies must be made layer by layer: where slabs or chunks lie irregularly;
    where a chunk ends behind ``token_count``, as a confused sidecar may say; and where there is neither compiled code
    nor torch. No bounds are checked behind this: the copies would reach beyond their plane."""
    for run in runs:
        last = run.chunks[-1]
        if last.token_start + last.layout.token_count > token_count:
            return None
    if is_compiled() and (fused := _in_a_batch(planes, runs, layers, heads)) is not None:
        return fused
    return plainly(_in_pairs, planes, runs, layers, heads)


def _in_a_batch(
    planes: Planes, runs: Sequence[MappedRun], layers: tuple[int, ...], heads: range
) -> Fused | None:  # fmt: skip
    """Return the copies in compiled code. None where the planes, or what is stored, do not suit it."""
    sides = planes.in_memory() if runs else []
    pairs: list[tuple[Blocks, Blocks]] = []
    for run in runs:
        sources = _source_blocks(run, layers, heads) if sides else None
        if sources is None:
            return None
        for side, source in zip(sides, sources, strict=True):
            target = side.blocks(source.shape, run.chunks[0].token_start)
            if target is None:
                return None
            pairs.append((target, source))
    batch = batch_of(pairs, runs[0].chunks[0].layout.item_size) if pairs else None
    if batch is None:
        return None
    planes.are_written()
    return in_calls(batch)


def in_calls(batch: Batch) -> Fused:
    """Return copies that compiled code makes."""
    return Fused(partial(_calls_of, batch), by_torch=False)


def _calls_of(batch: Batch, faults: FaultPoints, count: int) -> Iterator[Callable[[], None]]:
    """Yield the calls that make all copies."""
    for call in batch.calls(count):
        yield partial(_call, call, faults)


def _call(call: Callable[[], None], faults: FaultPoints) -> None:
    call()
    faults.reach("fetch.copy.middle")


def _in_pairs(
    planes: Planes, runs: Sequence[MappedRun], layers: tuple[int, ...], heads: range
) -> Fused | None:  # fmt: skip
    """Return the copies by torch, which copies many pairs of tensors in one operation. None without torch, and where
    its strides, which count items, cannot say how far chunks lie apart."""
    if torch_module() is None:
        return None
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    for run in runs:
        arrays = sources_of(run, layers, heads)
        if arrays is None or run.stride % run.chunks[0].layout.item_size:
            return None
        for which, source in enumerate(arrays):
            targets.extend(planes.parts(which, source.shape[1:], run.chunks[0].token_start))
            sources.extend(views_of(source, planes.sides[0][0].dtype))
    assert len(targets) == len(sources), "a copy for each view"
    return Fused(partial(_pairs_in_pieces, targets, sources))


def views_of(array: NDArray[np.generic], dtype: object) -> Sequence[Tensor]:
    """Return the entries of an array's first axis as tensors of the same memory. torch views them in one step."""
    views: Sequence[Tensor] = torch_module().from_numpy(array).view(dtype).unbind()
    return views


class Planes(NamedTuple):
    """The destination of a dense fetch. ``sides``: all K, and all V, each a list over the layers. ``halves``: the
    same planes, where those of each side are one tensor [layers, heads, tokens, dim]. ``placed``: where they lie,
    for copies that are made at once: later the caller may have resized their storage."""

    sides: Sequence[Sequence[Tensor]]
    halves: Sequence[Tensor] = ()
    placed: Sequence[PlacedPlanes] = ()

    def at(self, positions: range) -> Planes:
        """Return the planes of some layers."""
        some = slice(positions.start, positions.stop)
        halves = [half[some] for half in self.halves]
        sides = [half[:1] for half in halves] if halves else [side[some] for side in self.sides]
        return Planes(sides, halves)

    def parts(self, which: int, shape: Sequence[int], start: int) -> Iterable[Tensor]:
        """Return, of each K or V, a view of some chunks' tokens from token ``start`` on, of ``shape``: [heads, chunks,
        tokens, dim]."""
        if not self.halves:
            return token_runs(self.sides[which], shape, start)
        half = self.halves[which]
        layer, head, token, item = half.stride()
        steps = (layer, head, token * shape[2], token, item)
        views: Sequence[Tensor] = half.as_strided(
            (len(half), *shape), steps, half.storage_offset() + token * start
        ).unbind()  # fmt: skip
        return views

    def in_memory(self) -> Sequence[PlacedPlanes]:
        """Return where the planes lie. Empty as ``placed_planes`` says."""
        if not self.halves:
            return self.placed or placed_planes(self.sides)
        found = []
        for half in self.halves:
            size, begin = half.element_size(), half.data_ptr()
            layer, *strides = (stride * size for stride in half.stride())
            addresses = range(begin, begin + len(half) * layer, layer or 1)
            found.append(PlacedPlanes(addresses, tuple(strides), size, maxsize, half))  # our own, as long as it must be
        return found

    def are_written(self) -> None:
        """Tell torch that others than torch write the caller's tensors."""
        if self.halves or not is_tensor(self.sides[0][0]):
            return
        tell_graphs([plane for side in self.sides for plane in side])


def _placed(run: MappedRun, layers: tuple[int, ...]) -> tuple[PlaneGeometry, Bytes] | None:
    """Return where planes lie in each chunk, and the memory from the first chunk's begin to the last one's end, as far
    as its region has it. None where slabs or chunks lie irregularly."""
    first = run.chunks[0]
    geometry = plane_geometry(first.layout, layers)
    if geometry is None or first.home is None:
        return None
    region, _, offset = first.home
    return geometry, region[offset : offset + run.stride * (len(run.chunks) - 1) + first.layout.total_bytes]


def _source_blocks(run: MappedRun, layers: tuple[int, ...], heads: range) -> list[Blocks] | None:
    """Return K, and V, of these chunks as blocks [heads, chunks, tokens, dim], one for each layer. None as
    ``copies_of`` says, and where they would reach beyond the memory."""
    placed, first, count = _placed(run, layers), run.chunks[0], len(run.chunks)
    layout, found = first.layout, []
    if placed is None or placed[1].size < run.stride * (count - 1) + layout.total_bytes:
        return None
    geometry, memory = placed
    size, tokens, head_count, layer_count = layout.item_size, layout.token_count, len(heads), len(layers)
    at = first.address + (geometry.begin + heads.start * geometry.strip_step) * size
    step = geometry.layer_step * size
    for dim in geometry.dims:
        addresses = range(at, at + layer_count * step, step) if step else [at] * layer_count
        steps = (geometry.strip_step * size, run.stride, dim * size, size)
        found.append(Blocks(addresses, (head_count, count, tokens, dim), steps, memory))
        at += tokens * dim * size
    return found


def sources_of(
    run: MappedRun, layers: tuple[int, ...], heads: range
) -> list[NDArray[np.generic]] | None:  # fmt: skip
    """Return K, and V, of these chunks as [layers, heads, chunks, tokens, dim]: views. None as ``copies_of`` says."""
    placed = _placed(run, layers)
    if placed is None:
        return None
    geometry, memory = placed
    layout, count = run.chunks[0].layout, len(run.chunks)
    return strip_arrays(memory, layout, geometry, len(layers), heads, count, run.stride, 0)


def strip_arrays(
    memory: Bytes, layout: ChunkLayout, geometry: PlaneGeometry, layer_count: int, heads: range, count: int,
    stride: int, base: int,
) -> list[NDArray[np.generic]]:  # fmt: skip
    """Return K, and V, as ``sources_of`` does, of ``count`` chunks in ``memory``, each ``stride`` bytes further.
    ``base``: the first chunk's byte that the memory begins with. numpy refuses views beyond the memory."""
    size, found = layout.item_size, []
    at = geometry.begin + heads.start * geometry.strip_step
    for dim in geometry.dims:
        shape = (layer_count, len(heads), count, layout.token_count, dim)
        strides = [step * size for step in (geometry.layer_step, geometry.strip_step, 0, dim, 1)]
        strides[2] = stride
        found.append(np.ndarray(shape, f"i{size}", memory.data, at * size - base, strides))
        at += layout.token_count * dim
    return found


def token_runs(planes: Iterable[Tensor], shape: Sequence[int], start: int) -> Iterator[Tensor]:
    """Yield, of each plane, a view of some chunks' tokens from token ``start`` on, of ``shape``: [heads, chunks,
    tokens, dim]. Each view is made in one step, and planes of the same strides share the computed steps, because a view
    costs more than a small copy."""
    strides: tuple[int, ...] = ()
    for plane in planes:
        if strides != (found := plane.stride()):
            strides = found
            head, token, item = strides
            steps, skipped = (head, token * shape[2], token, item), token * start
        yield plane.as_strided(shape, steps, plane.storage_offset() + skipped)


def in_pages(strips: NDArray[np.generic], page_tokens: int) -> NDArray[np.generic]:
    """Return strips, [layers, heads, chunks, tokens, dim], as [layers, chunks, pages, page_tokens, heads, dim]: a
    view."""
    layers, heads, count, tokens, dim = strips.shape
    by_token = strips.transpose(0, 2, 3, 1, 4)
    return by_token.reshape(layers, count, tokens // page_tokens, page_tokens, heads, dim)


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
    """Run copies in one operation, which releases the GIL. They have ended on return, also those to a GPU."""
    torch_module()._foreach_copy_(targets, sources)
    if any(target.is_cuda for target in targets):
        settle_device(targets)
    faults.reach("fetch.copy.middle")


def _cut(total: int, count: int) -> Iterator[slice]:
    bounds = [total * number // count for number in range(count + 1)]
    return (slice(start, stop) for start, stop in pairwise(bounds) if start < stop)
