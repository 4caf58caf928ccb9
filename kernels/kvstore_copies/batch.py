"""Describes copies in words that the compiled code reads."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore_copies.compiled import compiled_code

AXES_MAX = 3
"""The most axes of rows, as the compiled code has them."""
HEADER_WORDS, BLOCK_WORDS = 5, 13
"""As the compiled code reads them. Where either changes, so does the number in its function's name."""
ROW_BYTES_MIN = 16
"""Shorter rows are left to torch and numpy."""
STREAM_BYTES = 16 << 20
"""From so many bytes on, stores pass the processor's caches by: so much does not stay in them."""
HELPED_BYTES = 4 << 20
"""From so many bytes on a thread helps: to wake it takes as long as to copy some 300 KB, and it comes 20 us later."""
TAKEN_BYTES = 64 << 10
"""The bytes that a thread takes at a time."""


class Blocks(NamedTuple):
    """Blocks of memory that look alike. ``addresses``: of the first byte of each; ``shape``: of each, in items;
    ``steps``: the bytes from one item to the next, per axis. ``owner`` keeps the memory."""

    addresses: Sequence[int] | NDArray[np.int64]
    shape: tuple[int, ...]
    steps: tuple[int, ...]
    owner: object

    @staticmethod
    def of(entries: NDArray[np.generic], axes: int = 1) -> Blocks:
        """Return the entries of an array's first ``axes`` axes as blocks."""
        begin, step = address_of(entries), entries.strides[0]
        if axes == 1 and step > 0:
            return Blocks(
                range(begin, begin + len(entries) * step, step), entries.shape[1:], entries.strides[1:], entries
            )
        addresses = np.array(begin, np.int64)
        for size, step in zip(entries.shape[:axes], entries.strides[:axes], strict=True):
            addresses = addresses[..., None] + np.arange(size, dtype=np.int64) * step
        return Blocks(addresses.reshape(-1), entries.shape[axes:], entries.strides[axes:], entries)

    @staticmethod
    def at(numbers: NDArray[np.intp], arrays: Sequence[NDArray[np.generic]]) -> Blocks | None:
        """Return the entries of these numbers of each of the arrays. None where the arrays have several strides."""
        first = arrays[0]
        if any((each.shape, each.strides) != (first.shape, first.strides) for each in arrays):
            return None
        begins = np.array([address_of(each) for each in arrays], np.int64)
        addresses = begins[:, None] + numbers.reshape(-1) * first.strides[0]
        return Blocks(addresses.reshape(-1), first.shape[1:], first.strides[1:], arrays)


def address_of(items: NDArray[Any]) -> int:
    """Return the address of an array's first item."""
    address: int = items.__array_interface__["data"][0]
    return address


class _Copy(NamedTuple):
    """The compiled functions that copy."""

    alone: Any
    together: Any


@cache
def _copy() -> _Copy | None:
    """Return the compiled functions; None where there are none, or those of another release."""
    names = ("kvstore_copy_1", "kvstore_copy_together_1")
    functions = [getattr(compiled_code(), name, None) for name in names]
    for each in functions:
        if each is None:
            return None
        each.argtypes, each.restype = [ctypes.c_void_p, ctypes.c_uint64], None
    return _Copy(*functions)


def is_compiled() -> bool:
    """Return True when copies are made by compiled code."""
    return _copy() is not None


class Batch:
    """Copies of ``byte_count`` bytes. The compiled code's own thread helps with many. It keeps the owners of both ends'
    memory."""

    def __init__(self, words: array[int], slice_count: int, byte_count: int, owners: Sequence[object]) -> None:
        """``words``: as the compiled code reads them; its threads count there. ``slice_count``: the parts of the
        work."""
        self._words = words
        self._slice_count = slice_count
        self._owners = owners
        self.byte_count = byte_count

    def calls(self, count: int) -> list[Callable[[], None]]:
        """Return ``count`` calls that together copy all. Each copies what no other has taken: one part in ``count``, or
        two where a thread helps."""
        return [partial(self._run, -(-self._slice_count // count))] * count

    def _run(self, slice_count: int) -> None:
        copy = _copy()
        assert copy is not None, "there is no batch without it"
        (copy.together if self.byte_count >= HELPED_BYTES else copy.alone)(self._words.buffer_info()[0], slice_count)


def batch_of(pairs: Iterable[tuple[Blocks, Blocks]], item_bytes: int) -> Batch | None:
    """Return copies of sources to the targets at their places: ``pairs`` of (targets, sources) of one shape, which meet
    nowhere. None where there is no compiled code, or rows are too short or too irregular for it."""
    if _copy() is None:
        return None
    both = list(pairs)
    looks = tuple([(targets.shape, targets.steps, sources.shape, sources.steps) for targets, sources in both])
    frame = _frame(looks, tuple([len(end.addresses) for pair in both for end in pair]), item_bytes)
    if frame is None:
        return None
    words = frame.words[:]
    for pair in both:
        for end in pair:
            if isinstance(end.addresses, np.ndarray):
                words.frombytes(np.ascontiguousarray(end.addresses, np.int64).view(np.uint8).data)
            else:
                words.extend(end.addresses)
    return Batch(words, frame.slice_count, frame.byte_count, both)


class _Frame(NamedTuple):
    """The words of a batch without its addresses, which follow them; its parts, and its bytes."""

    words: array[int]
    slice_count: int
    byte_count: int


@lru_cache(maxsize=256)
def _frame(
    looks: tuple[tuple[tuple[int, ...], ...], ...], counts: tuple[int, ...], item_bytes: int
) -> _Frame | None:  # fmt: skip
    """Return the frame of a batch. ``looks``: per pair the shape and steps of targets and sources; ``counts``: their
    numbers. None as ``batch_of`` says. Cached: fetches of as many chunks have the same."""
    slice_count = byte_count = 0
    words, place = array("q", bytes(8 * HEADER_WORDS)), HEADER_WORDS + BLOCK_WORDS * len(looks)
    for (shape, steps, source_shape, row_steps), count, source_count in zip(
        looks, counts[::2], counts[1::2], strict=True
    ):
        if shape != source_shape or count != source_count:  # also under ``python -O``
            raise AssertionError("copies have a target of one shape for each source")
        rows = _rows(shape, steps, row_steps, item_bytes)
        if rows is None:
            return None
        sizes, target_steps, source_steps, row_bytes = rows
        words.extend((place, place + count, slice_count, *sizes, *target_steps, *source_steps, row_bytes))
        place += 2 * count
        slice_count += count * sizes[0]
        byte_count += count * prod(shape) * item_bytes
    at_once = max(1, slice_count * TAKEN_BYTES // max(1, byte_count))
    words[1:HEADER_WORDS] = array("q", (slice_count, at_once, byte_count >= STREAM_BYTES, len(looks)))
    return _Frame(words, slice_count, byte_count)


_Rows = tuple[Sequence[int], Sequence[int], Sequence[int], int]


@lru_cache(maxsize=256)
def _rows(
    shape: tuple[int, ...], target_steps: tuple[int, ...], source_steps: tuple[int, ...], item_bytes: int
) -> _Rows | None:
    """Return (sizes, target steps, source steps, row bytes) of AXES_MAX axes, outermost first, over rows that lie in
    one piece at both ends. None where no such rows, or too short ones, are there."""
    row_bytes = item_bytes
    axes: list[tuple[int, int, int]] = []
    given = (each for each in zip(shape, target_steps, source_steps, strict=True) if each[0] != 1)
    for size, target, source in sorted(given, key=lambda each: abs(each[1])):
        if not axes and target == source == row_bytes:
            row_bytes *= size
        elif axes and (target, source) == (axes[-1][0] * axes[-1][1], axes[-1][0] * axes[-1][2]):
            axes[-1] = (axes[-1][0] * size, *axes[-1][1:])
        else:
            axes.append((size, target, source))
    if row_bytes < ROW_BYTES_MIN or len(axes) > AXES_MAX or min(shape, default=1) < 1:
        return None
    outermost_first = [*reversed(axes), *[(1, 0, 0)] * (AXES_MAX - len(axes))]
    sizes, targets, sources = zip(*outermost_first, strict=True)
    return sizes, targets, sources, row_bytes
