"""Which memory holds a cache that is not exact, so that it is not kept as exact by oversight.

What a fetch or a recompute hands out as DERIVED is remembered here by where it lies. A store that does not say what it
keeps is refused when it is given such memory, by whatever name: slices, layers one by one, numpy's view of a tensor,
the caller's own tensors or pages it was fetched into. Not seen: what is computed or copied from it into other memory
(``torch.cat``, ``clone``, ``to``, arithmetic), and other processes. Who does that says what it stores:
``exactness=Exactness.DERIVED``.

An exact fetch over all of it makes memory exact again; what a model computes there cannot be seen: then the store says
``exactness=Exactness.EXACT``. Nothing is kept alive, and a process that fetches nothing derived pays nothing.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
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
    """One run of memory. ``slots``: of pages, those that hold it; None: all of it."""

    span: Span
    slots: Slots | None
    is_alive: Callable[[], bool]

    def meets(self, span: Span, slots: Slots | None) -> bool:
        """Whether a tensor (of pages: these slots of it) has some of it. Pages that are seen in another way than they
        were fetched into count as a whole."""
        if not self.span.meets(span):
            return False
        alike = (self.span.start, self.span.geometry) == (span.start, span.geometry)
        if self.slots is None or slots is None or not alike:
            return True
        return bool(np.isin(slots, self.slots).any())

    def without(self, span: Span, slots: Slots | None) -> _Mark | None:
        """What is left of it when a tensor, or these slots of pages, were written anew."""
        if self.slots is not None and slots is not None and self.span == span:
            left = np.setdiff1d(self.slots, slots)
            return replace(self, slots=left) if left.size else None
        ours, theirs = self.span.geometry, span.geometry
        covered = (self.span.device, self.span.start, ours.strides) == (span.device, span.start, theirs.strides)
        if self.slots is None and slots is None and covered and len(ours.shape) == len(theirs.shape):
            return None if all(a <= b for a, b in zip(ours.shape, theirs.shape, strict=True)) else self
        return self


_marks: dict[int, _Mark] = {}
"""By number, later ones higher. Single operations on a dict need no lock, which a fork could leave taken."""


def _known() -> list[tuple[int, _Mark]]:
    """All marks, with their numbers. Numbers first: to make pairs is to allocate, so that garbage collection may take a
    mark away in the middle."""
    return [(number, mark) for number in list(_marks) if (mark := _marks.get(number)) is not None]


def now() -> int:
    """A number below those of all marks that come later."""
    return next(_numbers)


def remember(planes: Iterable[Tensor], slots: Slots | None = None) -> None:
    """These tensors hold what is not exact; of pages, in these slots."""
    for number, mark in _known():
        if not mark.is_alive():
            _marks.pop(number, None)
    for plane in planes:
        number = next(_numbers)
        _marks[number] = _Mark(Span.of(plane), slots, _life_of(plane, number))


def written_anew(planes: Iterable[Tensor], slots: Slots | None = None, *, since: int | None = None) -> None:
    """These tensors hold what is exact, whatever they held before. ``since``: ``now``, when the writing began: what was
    marked after that was written over it, or beside it, and stays."""
    if not _marks:
        return
    for span in [Span.of(plane) for plane in planes]:
        for number, mark in _known():
            if since is not None and number > since:
                continue
            left = mark.without(span, slots)
            if left is None:
                _marks.pop(number, None)
            elif left is not mark:
                _marks[number] = left


def is_derived(planes: Iterable[Tensor], slots: Slots | None = None) -> bool:
    """Whether one of these tensors lies where something derived was put."""
    if not _marks:
        return False
    marks = [mark for mark in list(_marks.values()) if mark.is_alive()]
    return any(mark.meets(span, slots) for span in map(Span.of, planes) for mark in marks)


def check_exact(planes: Iterable[Tensor], name: str, slots: Slots | None = None) -> None:
    """Raises InvalidRequest where a store that does not say what it keeps is given what is not exact."""
    if is_derived(planes, slots):
        raise InvalidRequest(
            f"{name} lies in memory that holds a derived cache: store it with exactness=Exactness.DERIVED, or, if it "
            "was computed anew there, say exactness=Exactness.EXACT"
        )


def exactness_of(kv: Iterable[Layer]) -> Exactness:
    """What is known of a cache: by itself, or by where its planes lie."""
    known = getattr(kv, "exactness", Exactness.EXACT)
    planes = (plane for pair in kv if pair is not None for plane in (pair if isinstance(pair, Sequence) else (pair,)))
    return Exactness.DERIVED if known is not Exactness.EXACT or is_derived(planes) else Exactness.EXACT


def _life_of(plane: Tensor, number: int) -> Callable[[], bool]:
    """Whether the memory under a plane is still what it was."""
    if is_tensor(plane):
        from torch.multiprocessing import reductions

        made: Any = reductions.StorageWeakRef  # torch ships no types of it
        storage = made(plane.untyped_storage())
        return lambda: not storage.expired()
    owner = plane
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    reference = weakref.ref(owner, lambda _: _marks.pop(number, None))
    return lambda: reference() is not None


class LayeredKV(list[Any]):
    """A cache, layer by layer, that knows whether it is exact. So do its slices, its copies, and what it is joined
    with: one part that is derived makes the whole derived."""

    exactness: Exactness = Exactness.EXACT

    def __init__(self, planes: Iterable[Tensor] = (), exactness: Exactness = Exactness.EXACT) -> None:
        super().__init__(planes)
        self.exactness = exactness

    def _with(self, other: object) -> Exactness:
        derived = Exactness.DERIVED in (self.exactness, getattr(other, "exactness", Exactness.EXACT))
        return Exactness.DERIVED if derived else Exactness.EXACT

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        found = super().__getitem__(index)
        return LayeredKV(found, self.exactness) if isinstance(index, slice) else found

    def __add__(self, other: list[Any]) -> LayeredKV:
        return LayeredKV([*self, *other], self._with(other))

    def __radd__(self, other: list[Any]) -> LayeredKV:
        return LayeredKV([*other, *self], self._with(other))

    def __mul__(self, count: SupportsIndex) -> LayeredKV:
        return LayeredKV(super().__mul__(count), self.exactness)

    __rmul__ = __mul__

    def copy(self) -> LayeredKV:
        return LayeredKV(self, self.exactness)

    def extend(self, other: Iterable[Any]) -> None:
        self.exactness = self._with(other)
        super().extend(other)

    def __iadd__(self, other: Iterable[Any]) -> LayeredKV:
        self.extend(other)
        return self

    def __setitem__(self, index: Any, value: Any) -> None:
        self.exactness = self._with(value)
        super().__setitem__(index, value)
