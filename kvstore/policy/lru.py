"""Least recently used, chain-aware."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence

from kvstore.policy.eviction import ABSENT
from kvstore.spec import MissReason

_END = 0
"""The list's sentinel node: links of row r are kept at r + 1."""


class LeastRecentlyUsed:
    """Least recently used first. A request touches a chain from its deepest chunk to its root, so that a parent is
    always more recent than each of its children and the least recent chunk of all is a leaf.

    A linked list in two columns: use and removal cost O(1) and 8 bytes per row.
    """

    def __init__(self) -> None:
        self._next = array("i", [_END])
        self._previous = array("i", [_END])

    def requested(self, keys: Sequence[bytes], rows: Sequence[int], hit_count: int) -> None:
        """Move the rows to the recent end. Raises MemoryError, or BufferError while a view of a column exists; nothing
        has changed then."""
        following, previous = self._next, self._previous
        self._grow(max(rows, default=0) + 2)
        for row in reversed(rows):
            if row == ABSENT:
                continue
            node = row + 1
            if following[node] != ABSENT:
                self._unlink(node)
            last = previous[_END]
            following[last] = previous[_END] = node
            previous[node], following[node] = last, _END

    def admits(self, key: bytes, weight: int, cost: float) -> bool:
        """Admit every chunk."""
        return True

    def stored(self, row: int, key: bytes, weight: int, cost: float) -> None:
        self.requested((key,), (row,), 1)

    def _grow(self, count: int) -> None:
        """Grow both columns to at least ``count`` nodes. Their lengths may differ: a growth that failed can leave one
        column longer."""
        for column in (self._next, self._previous):
            if len(column) < count:
                column.extend([ABSENT] * (count - len(column)))

    def superseded(self, row: int) -> None:
        node = row + 1
        if node < len(self._next) and self._next[node] != ABSENT:
            self._unlink(node)
            first = self._next[_END]
            self._next[_END] = self._previous[first] = node
            self._previous[node], self._next[node] = _END, first

    def removed(self, row: int, reason: MissReason) -> None:
        node = row + 1
        if node < len(self._next) and self._next[node] != ABSENT:
            self._unlink(node)
            self._next[node] = ABSENT

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
