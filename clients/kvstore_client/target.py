"""Where a prefix goes: owned memory or the caller's tensors, and the copies into it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore.chunk import slab_parts
from kvstore.errors import InvalidRequest
from kvstore.seams import FaultPoints
from kvstore.spec import item_size
from kvstore_client.arrays import carve, checked, destination, is_writable, presented, settle_device
from kvstore_client.copying import copy, plane_run, raw
from kvstore_client.paged import Paged, PagedTarget, Pages
from kvstore_client.prefix import ChunkRun
from kvstore_client.remote.fetching import Strips
from kvstore_client.wanted import Wanted

ALIGNMENT = 64


class Target:
    """Where a prefix goes: one run of owned memory, or the caller's tensors."""

    def __init__(self, wanted: Wanted, token_count: int, given: list[Any] | None) -> None:
        """``given``: the caller's planes, from ``given_planes``. Raises InvalidRequest when one is too short."""
        spec = wanted.spec
        self._wanted = wanted
        self._is_callers = given is not None
        if given is None:
            self.planes = _owned(_shapes(wanted, token_count), spec.item_size)
        else:
            self.planes = given
            _check_room(given, token_count)
        shape = (1, token_count, spec.hidden_size)
        rows = _owned([shape] * len(wanted.hidden_layers), item_size(spec.hidden_dtype))
        self.hidden = dict(zip(wanted.hidden_layers, rows, strict=True))
        self._raw = [raw(plane) for plane in self.planes]
        self._raw_hidden = {layer: raw(plane) for layer, plane in self.hidden.items()}

    def shown(self, plane: Any, dtype: str) -> Any:
        """A plane as the caller knows it: its own tensor, or a view of ours."""
        return plane if self._is_callers else presented(plane, dtype)

    def copy_layer(self, position: int, runs: Sequence[ChunkRun], bad: set[int], faults: FaultPoints) -> None:
        """Copy one requested layer of each chunk. With verify, a chunk whose strips fail joins ``bad``."""
        layer = self._wanted.layers[position]
        planes = self._raw[2 * position : 2 * position + 2]
        for run in runs:
            faults.reach("fetch.copy.middle")
            self._copy_run(run, run.chunks[0].layout.slab_of_layer[layer], planes, bad)

    def copy_hidden(self, layer: int, runs: Sequence[ChunkRun], bad: set[int]) -> None:
        for run in runs:
            self._copy_run(run, 0, [self._raw_hidden[layer]], bad)

    def copy_strips(self, position: int, strips: Strips) -> None:
        """Copy strips of one requested layer, as a message brought them."""
        self._copy_strips(self._raw[2 * position : 2 * position + 2], strips)

    def copy_hidden_strips(self, layer: int, strips: Strips) -> None:
        self._copy_strips([self._raw_hidden[layer]], strips)

    def _copy_strips(self, planes: list[Any], strips: Strips) -> None:
        chunk = strips.chunk
        layout = chunk.layout
        head = 0 if layout.blocked else strips.first - self._wanted.head_start
        for part in slab_parts(layout, strips.slab, strips.memory, first=strips.first, stop=strips.stop):
            target = plane_run(planes[part.which], chunk.token_start, layout.token_count, 1, part)
            copy(target[:, head : head + part.array.shape[1]], raw(part.array))

    def _copy_run(self, run: ChunkRun, index: int, planes: list[Any], bad: set[int]) -> None:
        wanted, first = self._wanted, run.chunks[0]
        layout = first.layout
        start, stop = (0, None) if layout.blocked else (wanted.head_start, wanted.head_stop)
        if wanted.verify:
            for chunk in run.chunks:
                if not chunk.is_intact(index, wanted.head_start, wanted.head_stop):
                    bad.add(id(chunk))
        for part in slab_parts(layout, index, run.memory(index), len(run.chunks), run.stride):
            target = plane_run(planes[part.which], first.token_start, layout.token_count, len(run.chunks), part)
            copy(target, raw(part.array[:, start:stop]))


def _shapes(wanted: Wanted, token_count: int) -> list[tuple[int, int, int]]:
    layers = wanted.spec.layers
    return [
        (wanted.heads_of(layer), token_count, dim)
        for layer in wanted.layers
        for dim in (layers[layer].k_dim, layers[layer].v_dim)
    ]


def _owned(shapes: list[tuple[int, int, int]], size: int) -> list[Any]:
    sizes = [-(-int(np.prod(shape)) * size // ALIGNMENT) * ALIGNMENT for shape in shapes]
    memory = destination(sum(sizes))
    planes, offset = [], 0
    for shape, byte_count in zip(shapes, sizes, strict=True):
        planes.append(carve(memory, offset, shape, size))
        offset += byte_count
    return planes


def given_places(wanted: Wanted, into: Any) -> list[Any] | Pages | None:
    """``into``, checked before anything is sent: planes, pages, or None for memory of our own."""
    return Pages(wanted, into) if isinstance(into, Paged) else given_planes(wanted, into)


AnyTarget = Target | PagedTarget


def target_of(wanted: Wanted, token_count: int, given: list[Any] | Pages | None) -> AnyTarget:
    """Where ``token_count`` tokens go."""
    return PagedTarget(wanted, given, token_count) if isinstance(given, Pages) else Target(wanted, token_count, given)


def given_planes(wanted: Wanted, into: Any) -> list[Any] | None:
    """The planes of ``into``, checked before anything is sent. Raises InvalidRequest naming the one that is wrong."""
    if into is None:
        return None
    if not isinstance(into, Sequence) or len(into) != len(wanted.layers):
        found = len(into) if isinstance(into, Sequence) else type(into).__name__
        raise InvalidRequest(f"into must be one (K, V) per layer, {len(wanted.layers)} of them, not {found}")
    planes: list[Any] = []
    shapes = _shapes(wanted, 0)
    for number, pair in enumerate(into):
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise InvalidRequest(f"into[{number}] must be a pair (K, V)")
        for which, plane in enumerate(pair):
            name = f"into[{number}][{which}]"
            heads, _, dim = shapes[2 * number + which]
            room = tuple(getattr(plane, "shape", ()))
            shape = (heads, room[1] if len(room) == 3 else 0, dim)
            planes.append(checked(plane, shape, wanted.spec.cache_dtype, name))
            if not is_writable(plane):
                raise InvalidRequest(f"{name} is read-only, or runs backwards")
    settle_device(planes)
    return planes


def _check_room(planes: list[Any], token_count: int) -> None:
    for number, plane in enumerate(planes):
        if plane.shape[1] < token_count:
            raise InvalidRequest(
                f"into[{number // 2}][{number % 2}] has room for {plane.shape[1]} tokens, {token_count} are stored"
            )
