"""Makes room in a local tier. Its capacity is a hard cap: a chunk comes in only when others make way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvstore.catalog import ROOT_ROW, Catalog, Copies
from kvstore.movement.removal import Removal
from kvstore.seams import FaultPoints
from kvstore.spec import MissReason
from kvstore.telemetry import Counters
from kvstore.tiers import Residency

Eligible = Callable[[int], bool]


class Eviction:
    """Decides what leaves one tier: the policy gives the order, the tier says which copies would help.

    First go copies that a slower tier has too (demotion), with children or without. Then chunks without children. Last,
    where there is a slower tier, chunks whose children only that tier has: the children cannot be found until their
    parent is stored again.
    """

    def __init__(
        self, catalog: Catalog, copies: Copies, removal: Removal, leaves: Callable[[int], None], faults: FaultPoints,
        counters: Counters,
    ) -> None:  # fmt: skip
        """``leaves``: called for each chunk whose last local copy is about to go."""
        self._catalog = catalog
        self._table = catalog.table
        self._copies = copies
        self._removal = removal
        self._leaves = leaves
        self._faults = faults
        self._counters = counters

    def evict(
        self, helps: Callable[[Residency], bool], enough: Callable[[], bool], keep: frozenset[int] = frozenset(),
        *, last_copies: bool = True,
    ) -> bool:  # fmt: skip
        """See ``tiers.Evictor``. Chunks in ``keep`` and held chunks stay. Without ``last_copies`` only copies that a
        slower tier has too may go."""
        for may_go in self._passes(helps, last_copies=last_copies):

            def eligible(row: int, may_go: Eligible = may_go) -> bool:
                return may_go(row) and row not in keep and not self._table.is_held(row)

            for row in self._copies.policy.victims(eligible):
                self._give_up(row)
                if enough():
                    return True
        return False

    def evict_all(self, residencies: Sequence[Residency]) -> bool:
        """See ``tiers.Evictor``. Cost: looks at every row of the tier."""
        wanted, copies = set(residencies), self._copies
        rows = [row for row in copies.rows() if copies.residency(row) in wanted]
        if len(rows) < len(wanted) or any(map(self._table.is_held, rows)):
            return False
        for row in rows:
            self._give_up(row)
        return True

    def _passes(self, helps: Callable[[Residency], bool], *, last_copies: bool) -> Iterator[Eligible]:
        table, copies = self._table, self._copies
        slower = table.copies[table.copies.index(copies) + 1 :]

        def is_of_use(row: int) -> bool:
            """Return True when a row's room helps, or its parent's does: a child goes before its parent."""
            parent = table.parents[row]
            return helps(copies.residency(row)) or (
                parent != ROOT_ROW and parent in copies and helps(copies.residency(parent))
            )

        if slower:
            yield lambda row: any(row in each for each in slower) and helps(copies.residency(row))
        if last_copies:
            yield lambda row: not table.child_counts[row] and is_of_use(row)
        if last_copies and slower:
            yield lambda row: helps(copies.residency(row))

    def _give_up(self, row: int) -> None:
        self._faults.reach(f"{self._copies.tier.name}.evict")
        table, copies = self._table, self._copies
        if any(row in each for each in table.copies[table.copies.index(copies) + 1 :]):
            self._counters.add_of(copies.tier.name, "demoted_chunks")
        else:
            self._counters.add_of(copies.tier.name, "evicted_chunks")
            self._counters.add_of(copies.tier.name, "evicted_bytes", int(self._catalog.worth(row)[0]))
        if not any(row in each for each in table.copies if each is not self._copies):
            self._leaves(row)
        self._removal.drop(copies, row, MissReason.EVICTED)
