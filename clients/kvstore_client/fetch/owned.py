"""Memory of a fetch's own, where the caller gives none: all layers in one run, each half of them in one tensor.

A view costs more than a small copy. Copies go to views of all layers, which are made in one step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvstore.spec import item_size
from kvstore_client.arrays import Tensor, destination, dtype_of, torch_module
from kvstore_client.copying import raw
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.halves import plane_shapes

ALIGNMENT = 64
_Shape = tuple[int, int, int]


class OwnedHalves:
    """The planes of layers that are alike, for copies: per half (K and V, or E) one tensor [layers, heads, tokens, dim]
    of plain integers. Each plane begins at a multiple of ALIGNMENT bytes."""

    def __init__(self, memory: NDArray[np.uint8], shapes: Sequence[_Shape], layer_count: int, size: int) -> None:
        """``shapes``: of a layer's planes. ``size``: bytes of an item."""
        self._memory = memory
        self._shapes = shapes
        items = raw(memory.view(f"u{size}"))
        self.halves: list[Tensor] = []
        self._begins: list[range] = []
        begin = 0
        for shape in shapes:
            _, tokens, dim = shape
            step = _aligned(math.prod(shape) * size)
            strides = (step // size, tokens * dim, dim, 1)
            self.halves.append(items.as_strided((layer_count, *shape), strides, begin // size))
            self._begins.append(range(begin, begin + layer_count * step, step or 1))
            begin += layer_count * step
        self.layers: list[tuple[Tensor, ...]] = list(zip(*(half.unbind() for half in self.halves), strict=True))

    @classmethod
    def of(cls, wanted: Wanted, token_count: int) -> Self | None:
        """Return new memory for so many tokens; None without torch, and where layers differ."""
        shapes = [plane_shapes(wanted.spec, layer, token_count, wanted.heads_of(layer)) for layer in wanted.layers]
        if torch_module() is None or not token_count or not shapes or any(shape != shapes[0] for shape in shapes):
            return None
        size = wanted.spec.item_size
        memory = destination(len(shapes) * sum(_aligned(math.prod(shape) * size) for shape in shapes[0]))
        return cls(memory, shapes[0], len(shapes), size)

    def arrays(self) -> Iterator[NDArray[np.generic]]:
        """Yield each plane as an array that lives as long as the memory does, for marks of what it holds."""
        for shape, begins, half in zip(self._shapes, self._begins, self.halves, strict=True):
            size = half.element_size()
            for begin in begins:
                yield self._memory[begin : begin + math.prod(shape) * size].view(f"u{size}").reshape(shape)

    def shown(self, position: int, token_count: int, dtype: str) -> list[Tensor]:
        """Return the first ``token_count`` tokens of one layer's planes, as tensors of ``dtype``. Each has a storage of
        its own, as callers expect: it is saved, resized and differentiated alone."""
        torch = torch_module()
        planes = []
        for shape, begins in zip(self._shapes, self._begins, strict=True):
            count = math.prod(shape)
            plane = torch.frombuffer(self._memory, dtype=dtype_of(dtype), count=count, offset=begins[position])
            plane = plane.view(shape)
            planes.append(plane if token_count == shape[1] else plane[:, :token_count])
        return planes


def owned_layers(wanted: Wanted, token_count: int) -> list[list[NDArray[np.generic]]]:
    """Return, per requested layer, its planes, all in one run of memory: for layers that differ, and without torch."""
    spec = wanted.spec
    shapes = [plane_shapes(spec, layer, token_count, wanted.heads_of(layer)) for layer in wanted.layers]
    planes = iter(owned_arrays([shape for each in shapes for shape in each], spec.item_size))
    return [[next(planes) for _ in each] for each in shapes]


def owned_rows(wanted: Wanted, token_count: int) -> dict[int, NDArray[np.generic]]:
    """Return memory for E of each requested hidden layer, [1, tokens, hidden_size]."""
    if not wanted.hidden_layers:
        return {}
    shape = (1, token_count, wanted.spec.hidden_size)
    rows = owned_arrays([shape] * len(wanted.hidden_layers), item_size(wanted.spec.hidden_dtype))
    return dict(zip(wanted.hidden_layers, rows, strict=True))


def owned_arrays(shapes: Sequence[tuple[int, ...]], size: int) -> list[NDArray[np.generic]]:
    """Return arrays of plain integers of ``size`` bytes, all in one run of memory, not initialised."""
    sizes = [_aligned(math.prod(shape) * size) for shape in shapes]
    memory = destination(sum(sizes))
    planes, offset = [], 0
    for shape, byte_count in zip(shapes, sizes, strict=True):
        planes.append(np.ndarray(shape, f"u{size}", memory.data, offset))
        offset += byte_count
    return planes


def _aligned(byte_count: int) -> int:
    return -(-byte_count // ALIGNMENT) * ALIGNMENT
