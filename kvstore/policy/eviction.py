"""The eviction interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol


class EvictionPolicy(Protocol):
    """Orders the chunks of one tier, by row number. A chain is always given root first."""

    def used(self, chain: Sequence[int]) -> None:
        """These chunks were stored or read, as one chain."""

    def superseded(self, row: int) -> None:
        """A chunk without children has become the most dispensable of all, until it is used again: another has all
        that it has. One that is not in this tier is ignored."""

    def removed(self, row: int) -> None:
        """The chunk is gone from this tier; its row number may come back as another chunk's."""

    def victims(self, eligible: Callable[[int], bool]) -> Iterator[int]:
        """Rows to remove, most dispensable first. ``eligible`` is asked anew before each is yielded; the caller
        calls ``removed`` for what it takes. Never yields a parent before its children when ``eligible`` refuses
        chunks that have children."""
