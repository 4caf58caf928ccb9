"""Tells where the planes of a dense cache lie in memory, for copies by compiled code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import islice
from operator import add, sub
from typing import NamedTuple

from kvstore_copies import Blocks, address_of, alike_addresses

from kvstore_client.arrays import Tensor, is_tensor, torch_module


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
    """Return where planes lie: K and V, each a list of as many tensors or arrays. Empty where those of a side have
    several strides, and for planes without plain memory of the CPU. Empty for subclasses, too, which may refuse to tell
    of their storage."""
    flat = [plane for side in sides for plane in side]
    if is_tensor(flat[0]):
        torch = torch_module()
        if not set(map(type, flat)) <= {torch.Tensor, torch.nn.Parameter}:
            return []
        try:
            told = alike_addresses(flat, len(sides))
            return placed_at(sides, flat, told[0] if told else _addresses(sides))
        except (RuntimeError, NotImplementedError):  # one has no memory of its own
            return []
    if any(is_tensor(plane) for plane in flat) or any(
        plane.strides != side[0].strides for side in sides for plane in side
    ):
        return []
    return [
        PlacedPlanes(list(map(address_of, side)), side[0].strides, side[0].itemsize, sys.maxsize, side)
        for side in sides
    ]


def placed_at(
    sides: Sequence[Sequence[Tensor]], flat: Sequence[Tensor], addresses: Sequence[int]
) -> list[PlacedPlanes]:
    """Return the same of plain tensors. ``flat``: all of them; ``addresses``: where each of these begins, empty where
    that is not known. Raises RuntimeError or NotImplementedError where one has no memory of its own."""
    if not addresses:
        return []
    kind, size = torch_module(), flat[0].element_size()
    storages = list(map(kind.Tensor.untyped_storage, flat))
    ends = map(add, map(kind.UntypedStorage.data_ptr, storages), map(kind.UntypedStorage.nbytes, storages))
    rooms, start, found = map(sub, ends, addresses), 0, []
    for side in sides:
        steps, part = side[0].stride(), slice(start, start := start + len(side))
        if len(steps) != 3:
            return []
        strides = (steps[0] * size, steps[1] * size, steps[2] * size)
        found.append(PlacedPlanes(addresses[part], strides, size, min(islice(rooms, len(side))), storages))
    return found


def _addresses(sides: Sequence[Sequence[Tensor]]) -> list[int]:
    """Return where tensors begin, if all are the CPU's and have the strides of the first of their side. Empty where
    they are not, and where one has no memory."""
    addresses: list[int] = []
    for planes in sides:
        strides = planes[0].stride()
        if not all(plane.is_cpu and plane.stride() == strides for plane in planes):
            return []
        addresses.extend(map(torch_module().Tensor.data_ptr, planes))
    return addresses if all(addresses) else []
