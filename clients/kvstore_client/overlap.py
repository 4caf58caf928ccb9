"""Finds tensors that share memory: a fetch into two of them would leave in both only the last bytes written.

It compares addresses and reads nothing, so GPU tensors work too. Cost: about 1 us per tensor where they lie apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from kvstore.errors import InvalidRequest
from kvstore.seams.mapping import address_of
from kvstore_client.arrays import Tensor, is_tensor, is_writable

WORK_MAX = 100_000
"""The most work spent on one pair of interleaved tensors. Beyond it they count as sharing memory."""
_BASE = 1 << 60


class ByteGeometry(NamedTuple):
    """The bytes of a tensor, counted from its first: ``strides`` in bytes, none negative.

    ``byte_count``: from the first byte to the end of the last, gaps included; 0 where the tensor has no items.
    ``repeats``: True when two items may share bytes; no view that steps, slices or turns axes of a plain tensor does.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_size: int
    byte_count: int
    repeats: bool

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(shape: tuple[int, ...], steps: tuple[int, ...], item_size: int) -> ByteGeometry:
        """Return the geometry for ``steps``, strides in items. Cached: the planes of a model are alike."""
        return ByteGeometry.by_bytes(tuple(shape), tuple(step * item_size for step in steps), item_size)

    @staticmethod
    @lru_cache(maxsize=4096)
    def by_bytes(shape: tuple[int, ...], strides: tuple[int, ...], item_size: int) -> ByteGeometry:
        """As ``of``, with ``strides`` in bytes."""
        count = sum((size - 1) * step for size, step in zip(shape, strides, strict=True)) + item_size
        return ByteGeometry(shape, strides, item_size, 0 if 0 in shape else count, _repeats(shape, strides, item_size))


def _repeats(shape: tuple[int, ...], strides: tuple[int, ...], item_size: int) -> bool:
    reach = item_size
    for step, size in sorted((step, size) for step, size in zip(strides, shape, strict=True) if size > 1):
        if step < reach:
            return True
        reach += (size - 1) * step
    return False


class Span(NamedTuple):
    """The address range of a tensor on its device, with its geometry."""

    device: str
    start: int
    stop: int
    geometry: ByteGeometry

    @staticmethod
    def of(value: Tensor) -> Span:
        """Return the span of a tensor or an array."""
        if is_tensor(value):
            size = value.element_size()
            geometry = ByteGeometry.of(value.shape, value.stride(), size)
            device, start = "cpu" if value.is_cpu else str(value.device), int(value.data_ptr())
        else:
            shape, strides, before = value.shape, value.strides, 0
            if strides and min(strides) < 0:
                before = sum((size - 1) * step for size, step in zip(shape, strides, strict=True) if step < 0 and size)
                strides = tuple(map(abs, strides))
            geometry = ByteGeometry.by_bytes(shape, strides, value.itemsize)
            device, start = "cpu", address_of(value) + before
        return Span(device, start, start + geometry.byte_count, geometry)

    def meets(self, other: Span) -> bool:
        """Return True when the two have a byte in common."""
        if self.device != other.device or self.start >= other.stop or other.start >= self.stop:
            return False
        return _meet(self.geometry, other.geometry, other.start - self.start)


def overlapping(spans: Sequence[Span]) -> tuple[int, int] | None:
    """Return the indices of two spans that have a byte in common, or None."""
    order = sorted((span.device, span.start, span.stop, number) for number, span in enumerate(spans))
    if all(one[2] <= other[1] or one[0] != other[0] for one, other in pairwise(order)):
        return None  # the usual case: each ends before the next one begins
    beside: list[int] = []
    for device, start, stop, number in order:
        span = spans[number]
        beside = [each for each in beside if spans[each].device == device and spans[each].stop > start]
        found = next((each for each in beside if spans[each].meets(span)), None)
        if found is not None:
            return min(found, number), max(found, number)
        if stop > start:
            beside.append(number)
    return None


def check_targets(layers: Iterable[Sequence[Tensor]], name: str) -> None:
    """Raise InvalidRequest for planes that a fetch cannot fill: read-only or reversed ones, ones without memory, and
    ones that share memory."""
    spans: list[Span] = []
    numbers: list[int] = []
    for number, planes in enumerate(layers):
        for plane in planes:
            span = Span.of(plane)
            if not is_writable(plane) or span.geometry.repeats:
                raise InvalidRequest(
                    f"{name}[{number}] is read-only, runs backwards, or has items that share memory: fetch into "
                    "another array"
                )
            if not span.start and span.geometry.byte_count:
                raise InvalidRequest(
                    f"{name}[{number}] has no memory (its storage was freed): fetch into another tensor"
                )
            spans.append(span)
            numbers.append(number)
    check_apart(spans, [f"{name}[{number}]" for number in numbers])


def check_apart(spans: Sequence[Span], names: Sequence[str]) -> None:
    """Raise InvalidRequest when two of these destinations share memory."""
    found = overlapping(spans)
    if found is not None:
        one, other = (names[each] for each in found)
        both = f"{one} and {other} share" if one != other else f"two parts of {one} share"
        raise InvalidRequest(f"{both} memory, where only what came last would stay: give each its own")


@lru_cache(maxsize=4096)
def _meet(one: ByteGeometry, other: ByteGeometry, distance: int) -> bool:
    """Return True when two tensors at this distance share a byte. Cached: layers of one pool are alike."""
    work_max: Any = WORK_MAX  # numpy's types allow two named limits only
    try:
        return bool(np.shares_memory(_shown(one, 0), _shown(other, distance), max_work=work_max))
    except np.exceptions.TooHardError:
        return True


class _Shown:
    """An array interface with addresses only, for numpy's overlap test. Never read: there is no memory behind it."""

    def __init__(self, geometry: ByteGeometry, distance: int) -> None:
        self.__array_interface__ = {
            "version": 3, "typestr": f"|V{geometry.item_size}", "data": (_BASE + distance, True),
            "shape": geometry.shape, "strides": geometry.strides,
        }  # fmt: skip


def _shown(geometry: ByteGeometry, distance: int) -> Tensor:
    return np.asarray(_Shown(geometry, distance))
