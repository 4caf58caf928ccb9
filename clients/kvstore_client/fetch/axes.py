"""K and V in an engine's tensors, whatever the order of their axes.

The tensors of a model are alike, and a step for each of them costs more than the bytes of a small fetch: tensors that
look like the first one are as right as it is, and need no check of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InvalidRequest
from kvstore_client.arrays import Tensor, check_dtype, check_memory, is_tensor, kind_of, raw_array
from kvstore_client.copying import raw
from kvstore_client.cuda import lanes
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.overlap import Span, check_targets, overlapping

AXES = ("kv", "page", "slot", "head", "dim")
Halves = tuple[Tensor, Tensor]
Arrays = tuple[NDArray[np.generic], NDArray[np.generic]] | None
"""K and V of one layer as numpy arrays; None for a GPU's."""


class Axes(NamedTuple):
    """The axes of an engine's tensors. ``order``: those that are there, in the order of AXES; ``missing``: the places
    of the others in AXES."""

    names: tuple[str, ...]
    order: tuple[int, ...]
    missing: tuple[int, ...]

    @staticmethod
    def of(layout: str) -> Axes:
        """Return the axes that a layout names. Raises InvalidRequest."""
        names = tuple(layout.split())
        if len(set(names)) != len(names) or not set(names) <= set(AXES) or not {"page", "slot", "dim"} <= set(names):
            raise InvalidRequest(
                f"layout {layout!r}: name each axis once, of {', '.join(AXES)}; page, slot and dim must be there"
            )
        order = tuple(names.index(name) for name in AXES if name in names)
        return Axes(names, order, tuple(place for place, name in enumerate(AXES) if name not in names))

    def split(self, tensors: Sequence[Tensor], k_dim: int) -> Halves:
        """Return K and V of one layer, [pages, page_size, heads, dim] each. Views."""
        if len(tensors) == 2:
            return self._ordered(tensors[0])[0], self._ordered(tensors[1])[0]
        view = self._ordered(tensors[0])
        if "kv" in self.names:
            return view[0], view[1]
        return view[0, ..., :k_dim], view[0, ..., k_dim:]

    def _ordered(self, tensor: Tensor) -> Tensor:
        """Return a view with all of AXES; a missing axis has one entry."""
        view = tensor.permute(self.order) if is_tensor(tensor) else tensor.transpose(self.order)
        for place in self.missing:
            view = view[(slice(None),) * place + (None,)]
        return view


class PageViews(NamedTuple):
    """Checked tensors of pages. ``layers``: per wanted layer, K and V as strided views [pages, page_size, heads, dim].
    ``arrays``: the same as plain integers. ``given``: the tensors themselves. ``are_alike``: True when all of them have
    one geometry, and the first one was checked for all."""

    layers: list[Halves]
    arrays: list[Arrays]
    given: list[Tensor]
    are_alike: bool

    @staticmethod
    def of(wanted: Wanted, layers: Sequence[Tensor], layout: str) -> PageViews:
        """Return the views. Raises InvalidRequest naming the tensor that does not fit."""
        axes = Axes.of(layout)
        looks = set(map(_look, layers))
        are_alike = len(looks) == 1 and None not in looks and len(wanted.kept) == 1
        for layer, each in zip(wanted.layers[:1] if are_alike else wanted.layers, layers, strict=False):
            _check(wanted, layer, each, axes)
        views: list[Halves] = []
        arrays: list[Arrays] = []
        for layer, each in zip(wanted.layers, layers, strict=True):
            tensors, k_dim = _tensors(each), wanted.spec.layers[layer].k_dim
            views.append(halves := axes.split(tensors, k_dim))
            plain = list(map(_array, tensors))
            if any(array is None for array in plain):
                arrays.append(None)
            else:
                is_same = all(one is other for one, other in zip(plain, tensors, strict=True))
                arrays.append(halves if is_same else axes.split(plain, k_dim))
        return PageViews(views, arrays, list(chain.from_iterable(map(_tensors, layers))), are_alike)

    @property
    def gpu(self) -> Any | None:
        """The GPU on which all of the tensors lie; None where there is none."""
        if self.are_alike and lanes.gpu_of(self.given[0]) is None:  # tensors that are alike are all a GPU's, or none is
            return None
        return lanes.common_gpu(self.given)

    def check_writable(self) -> None:
        """Raise InvalidRequest for views that cannot be written, or that share memory. Where tensors are alike and lie
        apart, the views of the first layer are looked at for all."""
        lie_apart = self.are_alike and overlapping(list(map(Span.of, self.given))) is None
        check_targets(self.layers[:1] if lie_apart else self.layers, "layers")


def _tensors(given: Tensor) -> list[Tensor]:
    return list(given) if isinstance(given, Sequence) else [given]


def _look(given: Tensor) -> tuple[object, ...] | None:
    """Return everything that decides if a layer's tensors are right, but where they lie. None for tensors that need a
    check of their own."""
    looks: list[object] = []
    for value in _tensors(given):
        if type(value) is np.ndarray:
            looks.append((value.shape, value.strides, value.dtype, value.flags.writeable))
        elif (kind := kind_of(value)) is not None:
            looks.append((value.stride(), kind))
        else:
            return None
    return (isinstance(given, Sequence), *looks)


def _check(wanted: Wanted, layer: int, given: Tensor, axes: Axes) -> None:
    """Raise InvalidRequest where one layer's tensors are not K and V of the model."""
    spec = wanted.spec.layers[layer]
    names, dims, heads = axes.names, (spec.k_dim, spec.v_dim), wanted.heads_of(layer)
    if isinstance(given, Sequence) and (len(given) != 2 or "kv" in names):
        raise InvalidRequest(f"layers[{layer}]: a pair (K, V) has two tensors and no axis kv")
    tensors, what = _tensors(given), f"layers of layer {layer}"
    for tensor in tensors:
        check_memory(tensor, what)
        check_dtype(tensor, wanted.spec.cache_dtype, what)
        if len(tensor.shape) != len(names):
            raise InvalidRequest(f"{what} has {len(tensor.shape)} axes, its layout names {len(names)}")
    if "kv" in names and (entries := tensors[0].shape[names.index("kv")]) != 2:
        raise InvalidRequest(f"layer {layer}: axis kv has {entries} entries, K and V are two")
    for plane, dim, half in zip(axes.split(tensors, spec.k_dim), dims, "KV", strict=True):
        if plane.shape[2:] != (heads, dim):
            raise InvalidRequest(
                f"layer {layer}: {half} has {tuple(plane.shape[2:])} as (heads, dim), the model and heads= say "
                f"{(heads, dim)}"
            )


def _array(tensor: Tensor) -> NDArray[np.generic] | None:
    """Return a CPU's tensor as an array of plain integers: the same memory, read-only where the tensor is."""
    array: NDArray[np.generic]
    if is_tensor(tensor):
        return None if tensor.is_cuda else raw(tensor).numpy()
    array = tensor if tensor.dtype.kind == "u" else raw_array(tensor)
    return array
