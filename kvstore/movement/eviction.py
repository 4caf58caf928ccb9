"""Makes room in a local tier. Its capacity is a hard cap: a chunk comes in only when others make way."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvstore.catalog import ROOT_ROW, Catalog, ChunkTable, Copies
from kvstore.movement.removal import Removal
from kvstore.policy import ABSENT
from kvstore.seams import FaultPoints
from kvstore.spec import MissReason
from kvstore.telemetry import Counters
from kvstore.tiers import Residency
from kvstore.tiers.contract import HelpingCopies

Eligible = Callable[[int], bool]
LOOK_COUNT = 256
"""Copies that stay and are passed one by one, before all of the tier are looked at together: 0.1 ms."""
AHEAD_COUNT, AHEAD_COUNT_MAX = 1024, 65_536
"""Victims that are chosen together then: more, where few of those chosen before could go."""
RUNS_TRIED = 16
"""Runs of neighbours that cannot go, one after the other, before copies go one by one again."""
NEED_COUNT_MAX = 64
"""Needs for which chosen victims are remembered."""


class _TooMany(Exception):
    """``LOOK_COUNT`` copies in a row stay."""


@dataclass(frozen=True)
class _Pass:
    """One way to make room. ``may_go``: whether a row goes now. ``are_candidates``: for all rows, whether they go now,
    or once their children went."""

    number: int
    may_go: Eligible
    are_candidates: Callable[[], NDArray[np.bool_]]


class _Below:
    """Tells, during one eviction, which chunks hang on those of a tier. Nothing comes into a tier meanwhile.

    Cost: nothing for a chunk without children; for the first one that has some, a pass over the columns of faster tiers
    and a sort of what they have (2 ms where the table has a million rows and memory ten thousand); then 2 us per chunk
    below, and 1 us for a chunk that has children elsewhere: very many of them may come before one that can go.
    """

    def __init__(self, table: ChunkTable, copies: Copies) -> None:
        self._table = table
        place = table.copies.index(copies)
        self._faster, self._others = table.copies[:place], table.copies[place:]

    @cached_property
    def _children(self) -> tuple[list[int], list[int]]:
        """The chunks of faster tiers, and the parent of each, by which they are sorted."""
        count = len(self._table.digests)  # columns are longer after a growth that failed
        rows = np.flatnonzero(np.logical_or.reduce([each.places()[:count] >= 0 for each in self._faster]))
        parents = np.frombuffer(self._table.parents, np.int32)[rows]
        order = np.argsort(parents, kind="stable")
        return rows[order].tolist(), parents[order].tolist()

    def of(self, row: int) -> list[int] | None:
        """Return all chunks below one, parents before children. None where one of them is held, or is not in faster
        tiers alone."""
        found = [row]
        for each in found:  # it grows meanwhile
            if self._table.child_counts[each]:
                children = self._free_children(each)
                if len(children) < self._table.child_counts[each]:
                    return None
                found += children
        return found[1:]

    def _free_children(self, row: int) -> list[int]:
        if not self._faster:
            return []
        rows, parents = self._children
        return [
            each
            for each in rows[bisect_left(parents, row) : bisect_right(parents, row)]
            if any(each in copies for copies in self._faster)  # else it went with another chunk of this eviction
            and not any(copies.keeps(each) for copies in self._others)
            and not self._table.is_held(each)
        ]


class Eviction:
    """Decides what leaves one tier: the policy gives the order, the tier says which copies would help.

    First go copies that a slower tier has too (demotion), with children or without. Then chunks without children, and
    chunks whose children only faster tiers have. Such children stay where a faster tier has their parent, too; else
    they go with it: they were not used after it, and nobody would find them. Last, where there is a slower tier, chunks
    whose children only that tier has: the children cannot be found until their parent is stored again.

    Where very many copies that stay come first in the policy's order (a slower tier takes nothing, or another model's
    chunks fill a device), the next victims are chosen together and remembered: walking past a million copies for each
    victim would take the loop half a second.
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
        self._chosen: dict[tuple[int, HelpingCopies | None], deque[tuple[int, int]]] = {}
        """By pass and need: the next victims, each with its place in the policy's order when it was chosen."""

    def evict(
        self, helps: Callable[[Residency], bool], enough: Callable[[], bool], keep: frozenset[int] = frozenset(),
        *, last_copies: bool = True, among: HelpingCopies | None = None,
    ) -> bool:  # fmt: skip
        """See ``tiers.Evictor``. Chunks in ``keep`` and held chunks stay. Without ``last_copies`` only copies that a
        slower tier has too may go."""
        below = _Below(self._table, self._copies)
        for each in self._passes(helps, below, among, last_copies=last_copies):

            def eligible(row: int, may_go: Eligible = each.may_go) -> bool:
                return may_go(row) and row not in keep and not self._table.is_held(row)

            for row in self._victims(each, among, eligible):
                if not any(copies.keeps(row) for copies in self._table.copies if copies is not self._copies):
                    self._give_up_all(below.of(row) or ())
                self._give_up(row)
                if enough():
                    return True
        return False

    def evict_runs(
        self, run_of: Callable[[int], Sequence[int] | None], enough: Callable[[], bool],
        keep: frozenset[int] = frozenset(), *, last_copies: bool = True,
    ) -> bool:  # fmt: skip
        """Give up copies and their neighbours until ``enough`` is true, which is asked after each run. ``run_of``: the
        rows without which a run of room is free that begins at a row's copy, ABSENT for what the catalog does not know;
        None where there is no such run. A run goes whole or not at all, and no chunk of it leaves children behind: a
        slower tier has it, or its children go with it. Returns whether ``enough`` came true; False after
        ``RUNS_TRIED`` runs in a row that cannot go."""
        refused = 0
        for row in self._copies.policy.victims(self._copies.__contains__):
            rows = run_of(row)
            if rows is None or not self._may_go_together(rows, keep, last_copies=last_copies):
                refused += 1
                if refused == RUNS_TRIED:
                    break
                continue
            for each in rows:
                self._give_up(each)
            refused = 0
            if enough():
                return True
        return False

    def _may_go_together(self, rows: Sequence[int], keep: frozenset[int], *, last_copies: bool) -> bool:
        table, copies = self._table, self._copies
        slower = table.copies[table.copies.index(copies) + 1 :]
        if any(row == ABSENT or row in keep or table.is_held(row) for row in rows):
            return False
        alone = [row for row in rows if not any(row in each for each in slower)]
        children = Counter(table.parents[row] for row in rows)
        return not alone or (last_copies and all(table.child_counts[row] == children[row] for row in alone))

    def evict_all(self, residencies: Sequence[Residency]) -> bool:
        """See ``tiers.Evictor``. A chunk whose other copy is not proven leaves the tier: what was acknowledged of it
        may be the very copy that goes. Cost: looks at every row of the tier."""
        rows, spares = self._copies.at(residencies), self._copies.spares_at(residencies)
        touched = [*rows, *(row for row, _ in spares)]
        if len(touched) < len(set(residencies)) or any(map(self._table.is_held, touched)):
            return False
        doubtful = {row for row, _ in spares if not self._copies.is_proven(row)}
        for row, residency in spares:
            if row not in doubtful:
                self._removal.drop_spare(self._copies, row, residency)
        for row in dict.fromkeys([*rows, *doubtful]):
            self._give_up(row)
        return True

    # ------------------------------------------------------------ who goes

    def _passes(
        self, helps: Callable[[Residency], bool], below: _Below, among: HelpingCopies | None, *, last_copies: bool
    ) -> Iterator[_Pass]:
        table, copies = self._table, self._copies
        slower = table.copies[table.copies.index(copies) + 1 :]

        def is_of_use(row: int) -> bool:
            """Return True when a row's room helps, or its parent's does: a child goes before its parent."""
            parent = table.parents[row]
            return helps(copies.residency(row)) or (
                parent != ROOT_ROW and parent in copies and helps(copies.residency(parent))
            )

        def helping() -> NDArray[np.bool_]:
            places = self._places(copies)
            return places >= 0 if among is None else among(places)

        def also_there() -> NDArray[np.bool_]:
            is_below = np.logical_or.reduce([self._places(each) >= 0 for each in slower])
            return np.logical_and(helping(), is_below)

        def of_use() -> NDArray[np.bool_]:
            helps_itself = helping()
            parents = np.frombuffer(table.parents, np.int32)[: len(helps_itself)]
            with_parent = np.append(helps_itself, False)[parents]  # ROOT_ROW names the last
            found: NDArray[np.bool_] = (helps_itself | with_parent) & (self._places(copies) >= 0)
            return found

        if slower:
            yield _Pass(0, lambda row: any(row in each for each in slower) and helps(copies.residency(row)), also_there)
        if last_copies:
            yield _Pass(1, lambda row: is_of_use(row) and below.of(row) is not None, of_use)
        if last_copies and slower:
            yield _Pass(2, lambda row: helps(copies.residency(row)), helping)

    def _victims(self, each: _Pass, among: HelpingCopies | None, eligible: Eligible) -> Iterator[int]:
        """Yield the rows that go in this pass, in the policy's order. Those that were chosen together before go first:
        what can go only since then (a superseded tail, too) goes after them, so up to ``AHEAD_COUNT`` victims late; up
        to ``AHEAD_COUNT_MAX`` where few of the first ones could go."""
        chosen = self._chosen.get((each.number, among), deque())
        yield from self._of_chosen(chosen, eligible)
        passed = 0

        def one_by_one(row: int) -> bool:
            nonlocal passed
            goes = eligible(row)
            passed = 0 if goes else passed + 1
            if passed > LOOK_COUNT:
                raise _TooMany
            return goes

        try:
            yield from self._copies.policy.victims(one_by_one)
            return
        except _TooMany:
            pass  # the next victims are chosen together
        after: int | None = None
        count = AHEAD_COUNT
        while rows := self._copies.policy.in_order(self._candidates(each), after, count):
            chosen = deque((row, self._copies.policy.place(row)) for row in rows)
            if len(self._chosen) >= NEED_COUNT_MAX:
                self._chosen.clear()
            self._chosen[each.number, among] = chosen
            after, count = chosen[-1][1], min(2 * count, AHEAD_COUNT_MAX)  # few of them went
            yield from self._of_chosen(chosen, eligible)

    def _places(self, copies: Copies) -> NDArray[np.int64]:
        return copies.places()[: len(self._table.digests)]

    def _candidates(self, each: _Pass) -> NDArray[np.int64]:
        found = each.are_candidates()
        found[self._table.held()] = False
        return np.flatnonzero(found)

    def _of_chosen(self, chosen: deque[tuple[int, int]], eligible: Eligible) -> Iterator[int]:
        """Yield those of the chosen victims that may go, and were not used since."""
        while chosen:
            row, place = chosen.popleft()
            if self._copies.policy.place(row) == place and eligible(row):
                yield row

    def _give_up(self, row: int) -> None:
        self._give_up_in(self._copies, row)

    def _give_up_all(self, rows: Sequence[int]) -> None:
        """Give up every copy of these chunks, the last one first: ``rows`` has parents before their children."""
        for row in reversed(rows):
            for copies in reversed(self._table.copies):
                if copies.keeps(row):
                    self._give_up_in(copies, row)

    def _give_up_in(self, copies: Copies, row: int) -> None:
        table = self._table
        self._faults.reach(f"{copies.tier.name}.evict")
        if any(each.keeps(row) for each in table.copies[table.copies.index(copies) + 1 :]):
            self._counters.add_of(copies.tier.name, "demoted_chunks")
        else:
            self._counters.add_of(copies.tier.name, "evicted_chunks")
            self._counters.add_of(copies.tier.name, "evicted_bytes", self._catalog.known_bytes(row))
        if not any(each.keeps(row) for each in table.copies if each is not copies):
            self._leaves(row)
        self._removal.drop(copies, row, MissReason.EVICTED)
