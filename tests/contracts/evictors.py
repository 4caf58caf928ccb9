"""Who decides what leaves a tier, in tests of the tier alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvstore.tiers import LocalTier, Residency
from kvstore.tiers.contract import HelpingCopies


class KeepsAll:
    """Gives nothing up: a full tier says so."""

    def evict(
        self, helps: Callable[[Residency], bool], enough: Callable[[], bool], *, among: HelpingCopies | None = None
    ) -> bool:
        return False

    def evict_all(self, residencies: Sequence[Residency]) -> bool:
        return False


class OldestFirst:
    """Gives up what was told to be there, the oldest first, but for what is held."""

    def __init__(self) -> None:
        self.tier: LocalTier
        self.there: list[Residency] = []
        self.held: set[Residency] = set()
        self.gone: list[Residency] = []
        self.erases = False

    def evict(
        self, helps: Callable[[Residency], bool], enough: Callable[[], bool], *, among: HelpingCopies | None = None
    ) -> bool:
        there = np.array(self.there, np.int64)
        assert among is None or among(there).tolist() == [helps(each) for each in self.there]
        for residency in [each for each in self.there if each not in self.held and helps(each)]:
            self._evict(residency)
            if enough():
                return True
        return False

    def evict_all(self, residencies: Sequence[Residency]) -> bool:
        if not set(residencies) <= set(self.there) - self.held:
            return False
        for residency in residencies:
            self._evict(residency)
        return True

    def _evict(self, residency: Residency) -> None:
        self.there.remove(residency)
        self.gone.append(residency)
        self.tier.remove([residency], erase=self.erases)
