"""Least recently used, chain-aware."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.policy.eviction import ABSENT
from kvstore.spec import MissReason

_END = 0
"""The list's sentinel node: links of row r are kept at r + 1."""


class LeastRecentlyUsed:
    """Least recently used first. A request touches a chain from its deepest chunk to its root, so that a parent is
    always more recent than each of its children and the least recent chunk of all is a leaf.

    A linked list in two columns: use and removal cost O(1) and 8 bytes per row. A third one has each row's place in the
    list, for callers that want few rows out of very many: 8 bytes more.
    """

    def __init__(self) -> None:
        self._next = array("i", [_END])
        self._previous = array("i", [_END])
        self._places = array("q", [0])
        """Numbers that grow towards the recent end; 0: not in the list."""
        self._place_count = 0

    def requested(self, keys: Sequence[bytes], rows: Sequence[int], hit_count: int) -> None:
        """Move the rows to the recent end. Raises MemoryError, or BufferError while a view of a column exists; nothing
        has changed then."""
        following, previous, places = self._next, self._previous, self._places
        self._grow(max(rows, default=0) + 2)
        place = self._place_count
        for row in reversed(rows):
            if row == ABSENT:
                continue
            node = row + 1
            if following[node] != ABSENT:
                self._unlink(node)
            last = previous[_END]
            following[last] = previous[_END] = node
            previous[node], following[node] = last, _END
            place += 1
            places[node] = place
        self._place_count = place

    def admits(self, key: bytes, weight: int, cost: float) -> bool:
        """Admit every chunk."""
        return True

    def stored(self, row: int, key: bytes, weight: int, cost: float) -> None:
        self.requested((key,), (row,), 1)

    def _grow(self, count: int) -> None:
        """Grow all columns to at least ``count`` nodes. Their lengths may differ: a growth that failed can leave some
        columns longer. ``_next`` grows last: the others have every row that it has."""
        for column, empty in ((self._places, 0), (self._previous, ABSENT), (self._next, ABSENT)):
            if len(column) < count:
                column.extend([empty] * (count - len(column)))

    def superseded(self, row: int) -> None:
        node = row + 1
        if node < len(self._next) and self._next[node] != ABSENT:
            self._unlink(node)
            first = self._next[_END]
            self._next[_END] = self._previous[first] = node
            self._previous[node], self._next[node] = _END, first
            self._place_count += 1
            self._places[node] = -self._place_count

    def removed(self, row: int, reason: MissReason) -> None:
        node = row + 1
        if node < len(self._next) and self._next[node] != ABSENT:
            self._unlink(node)
            self._next[node] = ABSENT
            self._places[node] = 0

    def _unlink(self, node: int) -> None:
        before, after = self._previous[node], self._next[node]
        self._next[before] = after
        self._previous[after] = before

    def victims(self, eligible: Callable[[int], bool]) -> Iterator[int]:
        node = self._next[_END]
        while node != _END:
            after = self._next[node]
            if eligible(node - 1):
                yield node - 1
                if self._next[node] != ABSENT:
                    after = self._next[node]
                elif self._next[after] == ABSENT:
                    after = self._next[_END]  # the next node was removed, too: start again
            node = after

    def place(self, row: int) -> int:
        return self._places[row + 1] if row + 1 < len(self._places) else 0

    def in_order(self, rows: NDArray[np.int64], after: int | None, count_max: int) -> list[int]:
        places = np.frombuffer(self._places, np.int64)[rows + 1]
        if after is not None:
            rows, places = rows[places > after], places[places > after]
        if len(rows) > count_max:
            first = np.argpartition(places, count_max)[:count_max]
            rows, places = rows[first], places[first]
        found: list[int] = rows[np.argsort(places)].tolist()
        return found
