"""Tells where the planes of a dense cache lie in memory, for copies by compiled code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from operator import attrgetter, sub
from typing import Any, NamedTuple

from kvstore_copies import Alike, Blocks, Questions, address_of, alike_columns

from kvstore_client.arrays import Tensor, is_tensor, torch_module

_shape, _dtype, _is_cpu = map(attrgetter, ("shape", "dtype", "is_cpu"))


class PlacedPlanes(NamedTuple):
    """The planes of K, or of V: where each begins, the bytes from one head, token and item to the next, an item's
    bytes, and how many bytes each has at least from its begin on. ``owner`` keeps the memory."""

    addresses: Sequence[int]
    strides: tuple[int, ...]
    item_size: int
    room: int
    owner: object

    def blocks(self, shape: tuple[int, ...], start: int) -> Blocks | None:
        """Return some chunks' tokens from token ``start`` on, of ``shape``: [heads, chunks, tokens, dim]. None where
        they reach beyond a plane's memory: its storage may have been resized."""
        heads, count, tokens, dim = shape
        head, token, item = self.strides
        last = head * (heads - 1) + token * (start + count * tokens - 1) + item * (dim - 1)
        if last + self.item_size > self.room:
            return None
        skipped = token * start
        begins = [each + skipped for each in self.addresses] if start else self.addresses
        return Blocks(begins, shape, (head, token * tokens, token, item), self.owner)


def placed_planes(sides: Sequence[Sequence[Tensor]]) -> list[PlacedPlanes]:
    """Return where planes lie: K and V, each a list of as many tensors or arrays. Empty where those of a side differ,
    and for planes without plain memory of the CPU. Empty for subclasses, too, which may refuse to tell of their
    storage."""
    flat = [plane for side in sides for plane in side]
    if is_tensor(flat[0]):
        found = alike(list(zip(*sides, strict=True)), len(sides))
        return placed(found) if found else []
    if any(is_tensor(plane) for plane in flat) or any(
        plane.strides != side[0].strides for side in sides for plane in side
    ):
        return []
    return [
        PlacedPlanes(list(map(address_of, side)), side[0].strides, side[0].itemsize, sys.maxsize, side)
        for side in sides
    ]


def placed(found: Alike) -> list[PlacedPlanes]:
    """Return where tensors lie: those of each column as planes of their own. Empty where these have not three axes."""
    count, places = len(found.tensors) // len(found.rooms), []
    for start, room in zip(range(0, len(found.tensors), count), found.rooms, strict=True):
        first = found.tensors[start]
        steps, size = first.stride(), first.element_size()
        if len(steps) != 3:
            return []
        strides = (steps[0] * size, steps[1] * size, steps[2] * size)
        places.append(PlacedPlanes(found.addresses[start : start + count], strides, size, room, found.storages))
    return places


def alike(entries: Sequence[Sequence[Tensor]], width: int) -> Alike | None:
    """Return the tensors of ``entries``, each a plain tuple or list of ``width``, where all of them are plain and of
    one class, lie in the CPU's memory as they are (not yet to be negated), and those of each column have one dtype,
    shape and strides. None where they are not."""
    kinds, questions = _asked_of_torch()
    first = next(iter(entries), None)
    model: Any = first[0] if isinstance(first, tuple | list) and first else None
    kind = type(model)
    if kind not in kinds or not model.is_cpu:  # a GPU's are not asked one by one
        return None
    return alike_columns(entries, width, kind, questions) or _alike_by_torch(entries, width, kind, questions)


@cache
def _asked_of_torch() -> tuple[tuple[type, ...], Questions]:
    """Return the classes of plain tensors, and what these are asked. Conjugates have complex items: no cache has."""
    torch = torch_module()
    tensor, storage = torch.Tensor, torch.UntypedStorage
    questions = Questions(tensor.is_neg, tensor.untyped_storage, storage.data_ptr, storage.nbytes)
    return (tensor, torch.nn.Parameter), questions


def _alike_by_torch(
    entries: Sequence[Sequence[Tensor]], width: int, kind: Any, asked: Questions
) -> Alike | None:  # fmt: skip
    """Return what ``alike`` does, by torch alone."""
    if not set(map(type, entries)) <= {tuple, list} or set(map(len, entries)) != {width}:
        return None
    columns = list(zip(*entries, strict=True))
    flat = [each for column in columns for each in column]
    if set(map(type, flat)) != {kind} or any(map(asked.is_odd, flat)):
        return None
    parts = [slice(start, start + len(entries)) for start in range(0, len(flat), len(entries))]
    try:
        looks = [list(map(look, flat)) for look in (_shape, _dtype, _is_cpu, kind.stride)]
        if not all(looks[2]):
            return None
        if any(look[part].count(look[part.start]) != len(entries) for look in looks for part in parts):
            return None
        starts = list(map(kind.data_ptr, flat))
        storages = list(map(asked.storage, flat))
        ends = [asked.begin(each) + asked.size(each) for each in storages]
    except (RuntimeError, NotImplementedError):  # one has no strides, or no memory of its own
        return None
    in_order = sorted(starts)
    if not in_order[0]:
        return None
    apart = min(map(sub, in_order[1:], in_order), default=sys.maxsize)
    rooms = [min(map(sub, ends[part], starts[part])) for part in parts]
    return Alike(flat, starts, apart, rooms, storages)
