"""Remembers which memory holds a derived (inexact) cache, so that it is not stored as exact by oversight.

A fetch or a recompute that returns a DERIVED cache marks its memory here. A store without ``exactness`` is refused when
it is given such memory, in any form: slices, layers one by one, numpy's view of a tensor, the caller's own tensors or
pages it was fetched into. Copies and results in other memory (``torch.cat``, ``clone``, ``to``, arithmetic) are not
seen, nor are other processes: such callers must say ``exactness=Exactness.DERIVED``.

An exact fetch over all of it makes memory exact again. What a model computes there cannot be seen: then the store says
``exactness=Exactness.EXACT``. Marks keep no memory alive, and a process that fetches nothing derived pays nothing.
A mark ends with the array or tensor that was filled where that is a view of memory whose owner is not known
(``np.frombuffer``, ``torch.from_numpy``).
"""

from __future__ import annotations

import itertools
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InvalidRequest
from kvstore.spec import Exactness
from kvstore_client.arrays import Layer, Tensor, is_tensor
from kvstore_client.overlap import Span

Slots = NDArray[np.int64]
_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class _Mark:
    """One run of memory with a derived cache. ``slots``: the derived slots, where the memory is pages; None: all of
    it. ``owner``: the address of the object whose end ends the mark."""

    span: Span
    slots: Slots | None
    owner: int
    is_alive: Callable[[], bool]

    def meets(self, span: Span, slots: Slots | None) -> bool:
        """Return True when a tensor (of pages: these slots of it) shares derived bytes. Pages seen in another shape
        than they were fetched into count as a whole."""
        if not self.span.meets(span):
            return False
        alike = (self.span.start, self.span.geometry) == (span.start, span.geometry)
        if self.slots is None or slots is None or not alike:
            return True
        return bool(np.isin(slots, self.slots).any())

    def without(self, span: Span, slots: Slots | None) -> _Mark | None:
        """Return the rest of the mark after a tensor, or these slots of pages, were overwritten; None when nothing is
        left."""
        if self.slots is not None and slots is not None and self.span == span:
            left = np.setdiff1d(self.slots, slots)
            return replace(self, slots=left) if left.size else None
        ours, theirs = self.span.geometry, span.geometry
        covered = (self.span.device, self.span.start, ours.strides) == (span.device, span.start, theirs.strides)
        if self.slots is None and slots is None and covered and len(ours.shape) == len(theirs.shape):
            return None if all(a <= b for a, b in zip(ours.shape, theirs.shape, strict=True)) else self
        return self


_marks: dict[int, _Mark] = {}
"""Marks by number; later marks have higher numbers. Single operations on a dict need no lock, which a fork could leave
taken."""


def _known() -> list[tuple[int, _Mark]]:
    """Return all marks with their numbers. The numbers are listed first: making pairs allocates, so garbage collection
    may remove a mark in the middle."""
    return [(number, mark) for number in list(_marks) if (mark := _marks.get(number)) is not None]


def has_marks() -> bool:
    """Return True when any memory is marked."""
    return bool(_marks)


def now() -> int:
    """Return a number below those of all later marks."""
    return next(_numbers)


def _by_place(known: Iterable[tuple[int, _Mark]]) -> dict[tuple[str, int], list[tuple[int, _Mark]]]:
    """Return marks by device and first byte: a mark is only taken back by a tensor that begins where it does."""
    found: dict[tuple[str, int], list[tuple[int, _Mark]]] = {}
    for number, mark in known:
        found.setdefault((mark.span.device, mark.span.start), []).append((number, mark))
    return found


def mark_derived(planes: Iterable[Tensor], slots: Slots | None = None) -> None:
    """Mark these tensors (of pages: these slots of them) as derived. The new marks replace what they cover of older
    ones: marks of memory that is filled again and again do not add up."""
    known = _known()
    for number, mark in known:
        if not mark.is_alive():
            _marks.pop(number, None)
    older = _by_place(known)
    for plane in planes:
        number, span = next(_numbers), Span.of(plane)
        _marks[number] = mark = _Mark(span, slots, *_life_of(plane, number))
        _take_back(older, span, slots, mark.owner)


def _take_back(
    known: dict[tuple[str, int], list[tuple[int, _Mark]]], span: Span, slots: Slots | None, owner: int | None = None
) -> None:
    """Remove a tensor, or these slots of pages, from marks. ``owner``: only from marks of this owner, because the mark
    of a view may end before the memory does."""
    for number, mark in known.get((span.device, span.start), ()):
        if owner is not None and mark.owner != owner:
            continue
        left = mark.without(span, slots)
        if left is None:
            _marks.pop(number, None)
        elif left is not mark and number in _marks:
            _marks[number] = left


def written_anew(planes: Iterable[Tensor], slots: Slots | None = None, *, since: int | None = None) -> None:
    """Unmark these tensors: they now hold an exact cache. ``since``: the number from ``now`` when the writing began;
    later marks stay, because their cache was written over this one, or beside it."""
    if not _marks:
        return
    earlier = _by_place(each for each in _known() if since is None or each[0] <= since)
    for plane in planes:
        _take_back(earlier, Span.of(plane), slots)


def is_derived(planes: Iterable[Tensor], slots: Slots | None = None) -> bool:
    """Return True when one of these tensors lies in memory marked as derived. Cost: about a microsecond per mark, and
    per tensor: only those are compared whose bytes lie in one range."""
    if not _marks:
        return False
    spans = sorted(map(Span.of, planes), key=lambda span: (span.device, span.start))
    starts = [(span.device, span.start) for span in spans]
    stops = list(accumulate(((span.device, span.stop) for span in spans), max))
    for mark in list(_marks.values()):
        device, start, stop, _ = mark.span
        behind = bisect_left(starts, (device, stop))
        while behind and stops[behind - 1] > (device, start):
            behind -= 1
            if mark.meets(spans[behind], slots) and mark.is_alive():
                return True
    return False


def check_exact(planes: Iterable[Tensor], name: str, slots: Slots | None = None) -> None:
    """Raise InvalidRequest for derived memory, in a store that gives no exactness."""
    if is_derived(planes, slots):
        raise InvalidRequest(
            f"{name} lies in memory that holds a derived cache: store it with exactness=Exactness.DERIVED, or, if it "
            "was computed anew there, say exactness=Exactness.EXACT"
        )


def exactness_of(kv: Iterable[Layer]) -> Exactness:
    """Return a cache's exactness: DERIVED if the cache says so, or if one of its planes lies in derived memory."""
    known = getattr(kv, "exactness", Exactness.EXACT)
    planes = (plane for pair in kv if pair is not None for plane in (pair if isinstance(pair, Sequence) else (pair,)))
    return Exactness.DERIVED if known is not Exactness.EXACT or is_derived(planes) else Exactness.EXACT


def _life_of(plane: Tensor, number: int) -> tuple[int, Callable[[], bool]]:
    """Return the address of the memory's owner, and a function that is True while it still exists."""
    if is_tensor(plane):
        from torch.multiprocessing import reductions

        made: Any = reductions.StorageWeakRef  # torch ships no types of it
        owned = plane.untyped_storage()
        storage = made(owned)
        return int(owned._cdata), lambda: not storage.expired()
    owner = plane
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    if is_tensor(owner.base):  # numpy's view of a tensor may end before the tensor does
        return _life_of(owner.base, number)
    reference = weakref.ref(owner, lambda _: _marks.pop(number, None))
    return id(owner), lambda: reference() is not None


class LayeredKV(list[Layer]):
    """A list of layers that knows whether the cache is exact. So do its slices, its copies, and lists it is joined
    with: one derived part makes the whole derived."""

    exactness: Exactness = Exactness.EXACT

    def __init__(self, planes: Iterable[Tensor] = (), exactness: Exactness = Exactness.EXACT) -> None:
        super().__init__(planes)
        self.exactness = exactness

    def _with(self, other: object) -> Exactness:
        derived = Exactness.DERIVED in (self.exactness, getattr(other, "exactness", Exactness.EXACT))
        return Exactness.DERIVED if derived else Exactness.EXACT

    def __getitem__(self, index: SupportsIndex | slice) -> Layer:
        found = super().__getitem__(index)
        return LayeredKV(found, self.exactness) if isinstance(index, slice) else found

    def __add__(self, other: list[Layer]) -> LayeredKV:
        return LayeredKV([*self, *other], self._with(other))

    def __radd__(self, other: list[Layer]) -> LayeredKV:
        return LayeredKV([*other, *self], self._with(other))

    def __mul__(self, count: SupportsIndex) -> LayeredKV:
        return LayeredKV(super().__mul__(count), self.exactness)

    __rmul__ = __mul__

    def copy(self) -> LayeredKV:
        return LayeredKV(self, self.exactness)

    def extend(self, other: Iterable[Layer]) -> None:
        self.exactness = self._with(other)
        super().extend(other)

    def __iadd__(self, other: Iterable[Layer]) -> LayeredKV:
        self.extend(other)
        return self

    def __setitem__(self, index: SupportsIndex | slice, value: Layer) -> None:
        self.exactness = self._with(value)
        super().__setitem__(index, value)
