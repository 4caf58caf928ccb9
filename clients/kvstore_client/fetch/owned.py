"""Memory of a fetch's own, where the caller gives none: all layers in one run, each half of them in one tensor.

A view costs more than a small copy. Views of all layers together are made in one step; those of a plane that stands
alone take one step each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

from numpy.typing import NDArray

from kvstore.spec import item_size
from kvstore_client.arrays import Tensor, carve, destination, dtype_of, torch_module
from kvstore_client.copying import raw
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.halves import plane_shapes

ALIGNMENT = 64
Shape = tuple[int, int, int]


class OwnedHalves:
    """The planes of layers that are alike: per half (K and V, or E) one tensor [layers, heads, tokens, dim] of plain
    integers. Each plane begins at a multiple of ALIGNMENT bytes."""

    def __init__(self, halves: Sequence[Tensor]) -> None:
        self.halves = halves
        self.layers: list[tuple[Tensor, ...]] = list(zip(*(half.unbind() for half in halves), strict=True))
        self._shown: list[tuple[Tensor, ...]] = []
        self._shown_tokens = -1

    @classmethod
    def of(cls, wanted: Wanted, token_count: int) -> Self | None:
        """Return new memory for so many tokens; None without torch, and where layers differ."""
        torch = torch_module()
        shapes = [plane_shapes(wanted.spec, layer, token_count, wanted.heads_of(layer)) for layer in wanted.layers]
        if torch is None or any(shape != shapes[0] for shape in shapes) or not shapes:
            return None
        size = wanted.spec.item_size
        steps = [_aligned(math.prod(shape) * size) for shape in shapes[0]]
        memory = raw(destination(len(shapes) * sum(steps)).view(f"u{size}"))
        halves, begin = [], 0
        for (heads, tokens, dim), step in zip(shapes[0], steps, strict=True):
            strides = (step // size, tokens * dim, dim, 1)
            halves.append(memory.as_strided((len(shapes), heads, tokens, dim), strides, begin // size))
            begin += len(shapes) * step
        return cls(halves)

    def shown(self, position: int, token_count: int, dtype: str) -> tuple[Tensor, ...]:
        """Return the first ``token_count`` tokens of one layer's planes, as tensors of ``dtype``. All views are made at
        the first call, and detached: torch refuses gradients for one of several views that were made in one step."""
        if token_count != self._shown_tokens:
            views = [half.view(dtype_of(dtype))[:, :, :token_count].unbind() for half in self.halves]
            self._shown = [tuple(plane.detach() for plane in planes) for planes in zip(*views, strict=True)]
            self._shown_tokens = token_count
        return self._shown[position]


def owned_layers(wanted: Wanted, token_count: int) -> list[list[NDArray[Any]]]:
    """Return, per requested layer, its planes, all in one run of memory: for layers that differ, and without torch."""
    spec = wanted.spec
    shapes = [plane_shapes(spec, layer, token_count, wanted.heads_of(layer)) for layer in wanted.layers]
    planes = iter(_owned([shape for each in shapes for shape in each], spec.item_size))
    return [[next(planes) for _ in each] for each in shapes]


def owned_rows(wanted: Wanted, token_count: int) -> dict[int, NDArray[Any]]:
    """Return memory for E of each requested hidden layer, [1, tokens, hidden_size]."""
    if not wanted.hidden_layers:
        return {}
    shape = (1, token_count, wanted.spec.hidden_size)
    rows = _owned([shape] * len(wanted.hidden_layers), item_size(wanted.spec.hidden_dtype))
    return dict(zip(wanted.hidden_layers, rows, strict=True))


def _owned(shapes: Sequence[Shape], size: int) -> list[NDArray[Any]]:
    sizes = [_aligned(math.prod(shape) * size) for shape in shapes]
    memory = destination(sum(sizes))
    planes, offset = [], 0
    for shape, byte_count in zip(shapes, sizes, strict=True):
        planes.append(carve(memory, offset, shape, size))
        offset += byte_count
    return planes


def _aligned(byte_count: int) -> int:
    return -(-byte_count // ALIGNMENT) * ALIGNMENT
