"""Copies all layers of a dense fetch at once: prepared in few steps, and run in few operations.

Views cost more than bytes where a fetch is small: 256 tokens of 30 layers are 60 planes of 100 KB. Where the slabs of
the layers lie at one distance, one view is cut into all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from kvstore.chunk import STRIP_ALIGNMENT, ChunkLayout
from kvstore.seams import FaultPoints
from kvstore_client.arrays import Tensor, torch_module
from kvstore_client.planes.shared_memory.chunk import MappedRun

Pair = tuple[Tensor, Tensor]
"""(target, source) of one copy: two tensors of one shape and dtype."""


class Geometry(NamedTuple):
    """The places of some layers' planes in a chunk, in items from its first byte on."""

    begin: int
    layer_step: int
    strip_step: int
    dims: tuple[int, ...]


@lru_cache(maxsize=256)
def geometry_of(layout: ChunkLayout, layers: tuple[int, ...]) -> Geometry | None:
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
    return Geometry(begin // size, steps.pop() // size, strip // size, dims)


def pairs_of(
    planes: Sequence[Sequence[Tensor]],
    token_count: int,
    runs: Sequence[MappedRun],
    layers: tuple[int, ...],
    heads: range,
) -> list[Pair] | None:
    """Return all copies of these chunks into ``planes``, per layer K and V, each [heads, tokens, dim] with at least
    ``token_count`` tokens, all tensors of one dtype. None where copies must be made layer by layer: without torch;
    where slabs or chunks lie irregularly; and where a chunk ends behind ``token_count``, as a confused sidecar may say.
    The views are made from strides alone, without bounds, and would reach beyond their plane."""
    pairs: list[Pair] = []
    for run in runs:
        last = run.chunks[-1]
        if last.token_start + last.layout.token_count > token_count:
            return None
        found = _pairs(planes, run, layers, heads)
        if found is None:
            return None
        pairs.extend(found)
    return pairs


def _pairs(
    planes: Sequence[Sequence[Tensor]], run: MappedRun, layers: tuple[int, ...], heads: range
) -> list[Pair] | None:
    torch, first, count = torch_module(), run.chunks[0], len(run.chunks)
    layout = first.layout
    geometry = geometry_of(layout, layers)
    if torch is None or geometry is None or first.home is None or run.stride % layout.item_size:
        return None
    region, _, offset = first.home
    memory = torch.from_numpy(region[offset : offset + run.stride * (count - 1) + layout.total_bytes])
    memory = memory.view(planes[0][0].dtype)
    tokens, start = layout.token_count, first.token_start
    pairs: list[Pair] = []
    at = geometry.begin + heads.start * geometry.strip_step
    for which, dim in enumerate(geometry.dims):
        shape = (len(heads), count, tokens, dim)
        steps = (geometry.strip_step, run.stride // layout.item_size, dim, 1)
        sources = memory.as_strided((len(layers), *shape), (geometry.layer_step, *steps), at).unbind()
        targets = _token_runs([both[which] for both in planes], shape, start)
        pairs.extend(zip(targets, sources, strict=True))
        at += tokens * dim
    return pairs


def _token_runs(planes: Iterable[Tensor], shape: tuple[int, ...], start: int) -> Iterator[Tensor]:
    """Yield, of each plane, a view of its tokens from ``start`` on, [heads, chunks, tokens, dim]. Each view is made in
    one step, and planes of the same strides share the computed steps, because a view costs more than a small copy."""
    strides: tuple[int, ...] = ()
    for plane in planes:
        if strides != (found := plane.stride()):
            strides = found
            head, token, item = strides
            steps, skipped = (head, token * shape[2], token, item), token * start
        yield plane.as_strided(shape, steps, plane.storage_offset() + skipped)


def copy_pairs(faults: FaultPoints, pairs: Sequence[Pair]) -> None:
    """Run copies, in two operations, which release the GIL."""
    torch = torch_module()
    middle = len(pairs) // 2
    for some in (pairs[:middle], pairs[middle:]):
        if some:
            torch._foreach_copy_([target for target, _ in some], [source for _, source in some])
        faults.reach("fetch.copy.middle")
