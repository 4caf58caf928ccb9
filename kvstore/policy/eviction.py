"""The eviction interface."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Protocol, TypeVar

Name = TypeVar("Name", bound=Hashable)


class EvictionPolicy(Protocol[Name]):
    """Orders names of resident chunks. A chain is always given root first."""

    def used(self, chain: Sequence[Name]) -> None:
        """These chunks were stored or read, as one chain."""

    def removed(self, name: Name) -> None:
        """The chunk is gone."""

    def victims(self, eligible: Callable[[Name], bool]) -> Iterator[Name]:
        """Names to remove, most dispensable first. ``eligible`` is asked anew before each is yielded; the caller
        calls ``removed`` for what it takes. Never yields a parent before its children when ``eligible`` refuses
        chunks that have children."""
