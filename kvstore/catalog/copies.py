"""One local tier's copies of the catalog's chunks: the place of each, and the order in which they are evicted."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.arena import Placement
from kvstore.policy import ABSENT, EvictionPolicy
from kvstore.spec import Durability, MissReason, Tier
from kvstore.tiers import LocalTier, Residency
from kvstore.tiers.dram import DramTier

NOWHERE = -1
"""Stands in place of a residency: this tier does not have the chunk."""
UNPROVEN = 1 << 62
"""The bit in the column that marks an unproven copy. Tiers' own numbers are smaller."""


class Spare(NamedTuple):
    """A further copy of a chunk. ``mark``: the first 8 bytes of its write's id."""

    residency: Residency
    mark: int
    is_proven: bool


class Copies:
    """A tier, its policy, and a column of residencies by row number.

    A copy that a scan found is *unproven* until it was read and written anew: it may be torn, or may not survive the
    next crash. A scan may find several copies of a chunk: the others are kept as ``spares``, each with the mark of its
    own write. A promise may rest on any of them, so a spare outlasts a copy that fails its check.

    Cost: 8 bytes per row of the table, and what the policy takes.
    """

    def __init__(self, tier: LocalTier, policy: EvictionPolicy) -> None:
        self.tier = tier
        self.policy = policy
        self.column = array("q")
        self.spares: dict[int, list[Spare]] = {}

    @property
    def kind(self) -> Tier:
        """The kind of tier, as replies and events name it."""
        return self.tier.kind

    @property
    def durability(self) -> Durability:
        """The durability level that a proven copy here gives."""
        return self.tier.durability

    def __contains__(self, row: int) -> bool:
        return self.column[row] != NOWHERE

    def keeps(self, row: int) -> bool:
        """True when the tier has the chunk, or a spare of it: then the chunk outlasts every other copy."""
        return row in self or row in self.spares

    def have_all(self, rows: Sequence[int]) -> bool:
        """True when the tier has all of these rows. Cost: 40 ns a row."""
        return not rows or min(map(self.column.__getitem__, rows)) != NOWHERE

    def rows(self) -> Iterator[int]:
        """Return the rows that the tier has now, in no order."""
        return iter(np.flatnonzero(np.frombuffer(self.column, np.int64) != NOWHERE).tolist())

    def residency(self, row: int) -> Residency:
        """Return the tier's number for the place of the chunk's copy; NOWHERE where it has none."""
        found = self.column[row]
        return found if found == NOWHERE else found & ~UNPROVEN

    def is_proven(self, row: int) -> bool:
        """True when the copy is as durable as the tier: this process wrote it, or it was proven."""
        return not self.column[row] & UNPROVEN  # NOWHERE has the bit, too

    def is_durable(self, row: int) -> bool:
        """True when the copy survives this process for certain."""
        return self.durability >= Durability.LOCAL and self.is_proven(row)

    def prove(self, row: int) -> None:
        """Mark the copy as proven: it was read, and written anew."""
        self.column[row] &= ~UNPROVEN

    def where(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return for each row whether the tier has it."""
        return np.not_equal(np.frombuffer(self.column, np.int64)[rows], NOWHERE)

    def places(self) -> NDArray[np.int64]:
        """Return ``residency`` of every row of the table; negative where the tier has none."""
        return np.frombuffer(self.column, np.int64) & ~UNPROVEN

    def at(self, residencies: Sequence[Residency]) -> list[int]:
        """Return the rows whose copies have these places, in no order. Cost: 10 ns per row of the table where the
        places are neighbours."""
        if not residencies:
            return []
        wanted, places = np.array(residencies, np.int64), self.places()
        near = np.flatnonzero((places >= wanted.min()) & (places <= wanted.max()))
        found: list[int] = near[np.isin(places[near], wanted)].tolist()
        return found

    def spares_at(self, residencies: Sequence[Residency]) -> list[tuple[int, Residency]]:
        """Return the spares that have these places, each with its row."""
        wanted = set(residencies)
        return [
            (row, each.residency) for row, of_row in self.spares.items() for each in of_row if each.residency in wanted
        ]

    def encodings(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the encoding of each row's copy. The tier must have all of these rows."""
        return self.tier.encodings(np.frombuffer(self.column, np.int64)[rows] & ~UNPROVEN)

    # ------------------------------------------------------------ copies come and go

    def put(self, row: int, residency: Residency, *, is_proven: bool = True) -> None:
        """Take note that the tier has the chunk now. The caller tells the policy (``stored``) itself."""
        self.column[row] = residency if is_proven else residency | UNPROVEN

    def put_spare(self, row: int, residency: Residency, mark: int, *, is_proven: bool) -> None:
        """Take note that a scan found a further copy of a chunk that the tier has."""
        self.spares.setdefault(row, []).append(Spare(residency, mark, is_proven))

    def take_spare(self, row: int, residency: Residency) -> None:
        """Remove a spare, whose place the caller must have the tier free."""
        left = [each for each in self.spares.pop(row) if each.residency != residency]
        if left:
            self.spares[row] = left

    def take(self, row: int, reason: MissReason) -> list[Residency]:
        """Remove a chunk from this tier's column and policy, and its spares. Return the places of all of them, which
        the caller must have the tier free."""
        found = [spare.residency for spare in self.spares.pop(row, ())]
        if row in self:
            found.append(self.residency(row))
            self.column[row] = NOWHERE
            self.policy.removed(row, reason)
        return found

    def used(self, keys: Sequence[bytes], chain: Sequence[int]) -> None:
        """Tell the policy that a chain was asked for, root first, all of which some tier has."""
        rows = chain if self.have_all(chain) else [row if row in self else ABSENT for row in chain]
        self.policy.requested(keys, rows, len(rows))

    def order(self) -> list[int]:
        """Return the rows that the tier has, in the order in which the policy would evict them."""
        return list(self.policy.victims(self.__contains__))


class MappedCopies(Copies):
    """The copies in memory that clients map: the fastest tier, where stores arrive and where readers look."""

    tier: DramTier

    def __init__(self, tier: DramTier, policy: EvictionPolicy) -> None:
        super().__init__(tier, policy)
        self.on_leaving: list[Callable[[int], None]] = []
        """Called with each row that is about to leave memory."""
        self._rows = array("i")
        """By residency: the row whose copy has it, or had it last."""

    def take(self, row: int, reason: MissReason) -> list[Residency]:
        """See ``Copies.take``."""
        for told in self.on_leaving:
            told(row)
        return super().take(row, reason)

    def placement(self, row: int) -> Placement:
        """Return the place of a chunk that is in memory."""
        return self.tier.placement(self.column[row])

    def holds(self, row: int, placement: Placement) -> bool:
        """True when the chunk still lies at this placement."""
        return row in self and self.placement(row) is placement

    def put_placement(self, row: int, placement: Placement) -> None:
        """Take note that a chunk, filled by a store or a load, is in memory now."""
        residency = self.tier.adopt(placement)
        self._rows.extend([ABSENT] * (residency + 1 - len(self._rows)))
        self._rows[residency] = row
        self.put(row, residency)

    def row_at(self, residency: Residency) -> int:
        """Return the row whose copy has this place; ABSENT for a place that no chunk of the catalog has."""
        row = self._rows[residency] if residency < len(self._rows) else ABSENT
        return row if row != ABSENT and self.column[row] == residency else ABSENT
