"""Least recently used, chain-aware."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)


class LeastRecentlyUsed(Generic[Name]):
    """A chain is touched from its deepest chunk to its root, so that a parent is always more recent than each of
    its children and the least recent chunk of all is a leaf. Use and removal cost O(1) per chunk."""

    def __init__(self) -> None:
        self._order: OrderedDict[Name, None] = OrderedDict()

    def used(self, chain: Sequence[Name]) -> None:
        for name in reversed(chain):
            self._order[name] = None
            self._order.move_to_end(name)

    def removed(self, name: Name) -> None:
        self._order.pop(name, None)

    def victims(self, eligible: Callable[[Name], bool]) -> Iterator[Name]:
        for name in list(self._order):
            if name in self._order and eligible(name):
                yield name
