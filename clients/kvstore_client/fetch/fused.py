"""One pass over all of a dense fetch: copies of all layers, made ready in few steps and run in few operations.

Views cost more than bytes where a fetch is small: 256 tokens of 30 layers are 60 planes of 100 KB. Where the slabs of
the layers lie at one distance, all their views are cut from one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from kvstore.chunk import STRIP_ALIGNMENT, ChunkLayout
from kvstore.seams import FaultPoints
from kvstore_client.arrays import Tensor, torch_module
from kvstore_client.planes.shared_memory.chunk import MappedRun

Pair = tuple[Tensor, Tensor]
"""Where something goes, and where it is: raw tensors of one shape."""


class Geometry(NamedTuple):
    """Where the planes of some layers lie in a chunk, in items from its first byte on."""

    begin: int
    layer_step: int
    strip_step: int
    dims: tuple[int, ...]


@lru_cache(maxsize=256)
def geometry_of(layout: ChunkLayout, layers: tuple[int, ...]) -> Geometry | None:
    """None where the slabs of these layers are not alike, or not at one distance."""
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
    planes: Sequence[Sequence[Tensor]], runs: Sequence[MappedRun], layers: tuple[int, ...], heads: range
) -> list[Pair] | None:
    """All copies of these chunks into raw ``planes``, per layer K and V, each [heads, tokens, dim]. None where they
    have to be made layer by layer: without torch, and where slabs or chunks do not lie regularly."""
    pairs: list[Pair] = []
    for run in runs:
        found = _pairs(planes, run, layers, heads)
        if found is None:
            return None
        pairs.extend(found)
    return pairs


def _pairs(
    planes: Sequence[Sequence[Tensor]], run: MappedRun, layers: tuple[int, ...], heads: range
) -> Iterator[Pair] | None:
    torch, first, count = torch_module(), run.chunks[0], len(run.chunks)
    layout = first.layout
    geometry = geometry_of(layout, layers)
    if torch is None or geometry is None or first.home is None or run.stride % layout.item_size:
        return None
    region, _, offset = first.home
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}[layout.item_size]
    memory = torch.from_numpy(region[offset : offset + run.stride * (count - 1) + layout.total_bytes]).view(integers)
    tokens, start = layout.token_count, first.token_start
    sources = []
    at = geometry.begin + heads.start * geometry.strip_step
    for dim in geometry.dims:
        shape = (len(layers), len(heads), count, tokens, dim)
        strides = (geometry.layer_step, geometry.strip_step, run.stride // layout.item_size, dim, 1)
        sources.append(memory.as_strided(shape, strides, at).unbind())
        at += tokens * dim
    return (
        (plane.narrow(1, start, count * tokens).view(len(heads), count, tokens, -1), source[number])
        for number, both in enumerate(planes)
        for plane, source in zip(both, sources, strict=True)
    )


def copy_pairs(faults: FaultPoints, pairs: Sequence[Pair]) -> None:
    """Run copies, in two operations that hold no lock of Python's meanwhile."""
    torch = torch_module()
    middle = len(pairs) // 2
    for some in (pairs[:middle], pairs[middle:]):
        if some:
            torch._foreach_copy_([target for target, _ in some], [source for _, source in some])
        faults.reach("fetch.copy.middle")
