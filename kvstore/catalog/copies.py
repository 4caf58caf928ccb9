"""One local tier's copies of the catalog's chunks: where each lies, and in which order they go."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.arena import Placement
from kvstore.policy import ABSENT, EvictionPolicy
from kvstore.spec import Durability, MissReason, Tier
from kvstore.tiers import LocalTier, Residency
from kvstore.tiers.dram import DramTier

NOWHERE = -1
"""In the place of a residency: this tier does not have the chunk."""
UNPROVEN = 1 << 62
"""Set in the column for a copy that a start met after a crash. Tiers' own numbers are smaller."""


class Spare(NamedTuple):
    """A further copy of a chunk. ``mark``: the first 8 bytes of its write's id."""

    residency: Residency
    mark: int
    is_proven: bool


class Copies:
    """A tier, its policy, and a column of residencies by row number.

    A copy that a scan met is *unproven*: it may be torn, or not there to stay, until it was read and renewed. A scan
    may meet a chunk more than once: the others are kept as ``spares``, each with the mark of its own write.

    Cost: 8 bytes per row of the table, and what the policy takes.
    """

    def __init__(self, tier: LocalTier, policy: EvictionPolicy) -> None:
        self.tier = tier
        self.policy = policy
        self.column = array("q")
        self.spares: dict[int, list[Spare]] = {}

    @property
    def kind(self) -> Tier:
        """The name of this tier in replies and events."""
        return self.tier.kind

    @property
    def durability(self) -> Durability:
        """The durability that a proven copy here gives."""
        return self.tier.durability

    def __contains__(self, row: int) -> bool:
        return self.column[row] != NOWHERE

    def have_all(self, rows: Sequence[int]) -> bool:
        """Return True when the tier has every one of these. Cost: 40 ns a row."""
        return not rows or min(map(self.column.__getitem__, rows)) != NOWHERE

    def rows(self) -> Iterator[int]:
        """The rows that are here now, in no order."""
        return iter(np.flatnonzero(np.frombuffer(self.column, np.int64) != NOWHERE).tolist())

    def residency(self, row: int) -> Residency:
        """Return the residency of the tier's copy; NOWHERE without one."""
        found = self.column[row]
        return found if found == NOWHERE else found & ~UNPROVEN

    def is_proven(self, row: int) -> bool:
        """Return True when there is a copy that survives whatever the tier survives: this process wrote it, or it was
        proven."""
        return not self.column[row] & UNPROVEN  # NOWHERE has the bit, too

    def prove(self, row: int) -> None:
        """The copy was read, and written anew."""
        self.column[row] &= ~UNPROVEN

    def where(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return those of the rows of which the tier has a copy."""
        return np.not_equal(np.frombuffer(self.column, np.int64)[rows], NOWHERE)

    def encodings(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the encodings of the copies of these rows, which are all here."""
        return self.tier.encodings(np.frombuffer(self.column, np.int64)[rows] & ~UNPROVEN)

    # ------------------------------------------------------------ copies come and go

    def put(self, row: int, residency: Residency, *, is_proven: bool = True) -> None:
        """The tier has the chunk now. The policy is told apart (``stored``)."""
        self.column[row] = residency if is_proven else residency | UNPROVEN

    def put_spare(self, row: int, residency: Residency, mark: int, *, is_proven: bool) -> None:
        """A scan met a further copy of a chunk that the tier has."""
        self.spares.setdefault(row, []).append(Spare(residency, mark, is_proven))

    def take(self, row: int, reason: MissReason) -> list[Residency]:
        """The chunk leaves this tier. Returns where it lies: the tier is to be told."""
        found = [self.residency(row), *(spare.residency for spare in self.spares.pop(row, ()))]
        self.column[row] = NOWHERE
        self.policy.removed(row, reason)
        return found

    def used(self, keys: Sequence[bytes], chain: Sequence[int]) -> None:
        """A chain was asked for, root first, and all of it was found somewhere."""
        rows = chain if self.have_all(chain) else [row if row in self else ABSENT for row in chain]
        self.policy.requested(keys, rows, len(rows))

    def order(self) -> list[int]:
        """The rows that are here, the first to go first."""
        return list(self.policy.victims(self.__contains__))


class MappedCopies(Copies):
    """The copies in memory that clients map: the fastest tier, where stores arrive and where readers look."""

    tier: DramTier

    def __init__(self, tier: DramTier, policy: EvictionPolicy) -> None:
        super().__init__(tier, policy)

    def placement(self, row: int) -> Placement:
        """Return the extents of a chunk that is here."""
        return self.tier.placement(self.column[row])

    def holds(self, row: int, placement: Placement) -> bool:
        """Return True when the chunk still lies there, and not elsewhere or nowhere."""
        return row in self and self.placement(row) is placement

    def put_placement(self, row: int, placement: Placement) -> None:
        """A chunk that a store or a load filled is here now."""
        self.put(row, self.tier.adopt(placement))
