"""Removes chunks by an operator's word. A plan comes first and changes nothing; then the plan is carried out, children
before their parents.

Eviction makes room, and may leave chunks behind that cannot be found until their parent is stored again. An operator's
word leaves no such chunks: the descendants of a chunk that leaves the node go with it, and the ancestors of a held
chunk stay. A word about one tier gives up only that tier's copies, except for the descendants of a chunk that leaves
the node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from kvstore.catalog import NOWHERE, ROOT_ROW, ChunkTable, Copies, RowIdentity
from kvstore.catalog.lineage import Pause, descend, nearest
from kvstore.movement.removal import Removal
from kvstore.spec import MissReason
from kvstore.telemetry import Counters

CLIMB_COUNT = 1024
"""Rows that are passed between two pauses."""
SHORT_MAX = np.iinfo(np.int16).max


class Fate(IntEnum):
    """The outcome for one chunk. REMOVED: it was named, and is nowhere on the node any more. WITH_PARENT: its ancestor
    was removed, and it was, too. COPY_REMOVED: another tier still has it. HELD: it is in use. KEPT: one of its
    descendants stays. GONE: it left before its turn came. SPARED: its ancestor stays after all, as another tier has
    that one by now."""

    REMOVED = 0
    WITH_PARENT = 1
    COPY_REMOVED = 2
    HELD = 3
    KEPT = 4
    GONE = 5
    SPARED = 6


@dataclass(frozen=True, slots=True)
class Meant:
    """The chunks that the operator named, or that go with these, as they were when each was looked at: a row is still
    that chunk while its digest and the id of its namespace (``spaces``) are these."""

    rows: NDArray[np.int64]
    spaces: NDArray[np.int64]
    digests: list[bytes]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[tuple[int, RowIdentity]]:
        return map(self.at, range(len(self)))

    def at(self, place: int) -> tuple[int, RowIdentity]:
        """Return the row at a place, and the identity that the chunk had."""
        return int(self.rows[place]), (int(self.spaces[place]), self.digests[place])


@dataclass(frozen=True, slots=True)
class ClearingPlan:
    """The chunks that are touched, those with the longest chain above them first, and the planned fate of each.
    ``only``: the tier that gives its copies up; None: all local tiers. ``causes``: for each chunk, the row of the
    nearest named chunk that leaves the node, among its ancestors and itself; the count of rows where there is none."""

    only: Copies | None
    chunks: Meant
    fates: NDArray[np.uint8]
    causes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.chunks)


class Clearing:
    """Removes copies by an operator's word."""

    def __init__(self, table: ChunkTable, removal: Removal, counters: Counters) -> None:
        self._table = table
        self._removal = removal
        self._counters = counters

    async def plan(self, wanted: Meant, only: Copies | None, pause: Pause) -> ClearingPlan:
        """Plan the removal of these chunks' copies. Changes nothing."""
        await pause()
        table, count = self._table, len(self._table.digests)
        parents = np.array(table.parents[:count], np.int32)
        spaces, digests = table.space_ids(np.array(table.spaces[:count], np.uint16)), table.digests[:count]
        here, elsewhere = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        for copies in table.copies:
            has = np.array(copies.column[:count]) != NOWHERE
            has[list(copies.spares)] = True
            here |= has
            if only is not None and copies is not only:
                elsewhere |= has
        meant = await _marks(wanted, spaces, digests, pause) & here
        leaving = meant & ~elsewhere
        under, depths = await descend(parents, leaving, pause)
        causes = await nearest(parents, leaving, pause)
        held, stays = await self._staying(parents, pause)
        await pause()
        touched = np.flatnonzero(meant | (under & here))
        of = -depths[touched]
        short = of.astype(np.int16) if of.min(initial=0) >= -SHORT_MAX else of  # sorted ten times as fast
        touched = touched[np.argsort(short, kind="stable")]
        await pause()
        leaves = (under | ~elsewhere)[touched]
        fates = np.where(meant[touched], Fate.REMOVED, Fate.WITH_PARENT)
        fates = np.where(leaves, fates, Fate.COPY_REMOVED)
        fates = np.where(leaves & stays[touched], Fate.KEPT, fates)
        fates = np.where(held[touched], Fate.HELD, fates).astype(np.uint8)
        told: list[bytes] = []
        for start in range(0, len(touched), CLIMB_COUNT):
            await pause()
            told += [digests[row] for row in touched[start : start + CLIMB_COUNT].tolist()]
        return ClearingPlan(only, Meant(touched, spaces[touched], told), fates, causes[touched])

    async def _staying(self, parents: NDArray[np.int32], pause: Pause) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return two flags per row: the row is held; the row stays because it or a descendant is held."""
        held, stays = np.zeros(len(parents), np.bool_), np.zeros(len(parents), np.bool_)
        passed = 0
        for row in self._table.held():
            if row >= len(parents):  # this row was added after the columns were copied
                continue
            held[row] = True
            at = row
            while at != ROOT_ROW and not stays[at]:
                stays[at] = True
                at = int(parents[at])
                passed += 1
                if passed % CLIMB_COUNT == 0:
                    await pause()
        return held, stays

    def do(self, plan: ClearingPlan, place: int) -> tuple[Fate, bool]:
        """Carry out the plan for one chunk. Returns its fate, and True when it was acknowledged as durable on the node
        and is no more. Changes since the plan was made are respected: a chunk that is held by now stays, and so does a
        chunk that has children by now."""
        table, fate = self._table, Fate(plan.fates[place])
        row, identity = plan.chunks.at(place)
        is_it = table.identity(row) == identity
        if not is_it or not table.is_resident(row):
            return Fate.GONE, False
        if fate in (Fate.HELD, Fate.KEPT):
            return fate, False
        if table.is_held(row):
            return Fate.HELD, False
        if fate is Fate.COPY_REMOVED or (fate is Fate.REMOVED and self._is_elsewhere(plan, row)):
            return self._drop(plan.only, row)
        if fate is Fate.WITH_PARENT and self._is_elsewhere(plan, int(plan.causes[place])):
            return Fate.SPARED, False
        if table.child_counts[row]:
            return Fate.KEPT, False
        was_durable = self.is_durable(row)
        self._removal.remove(row, MissReason.EVICTED, erase=True)
        self._counters.add("operator_removed_chunks")
        self._counters.add("operator_removed_durable_chunks", int(was_durable))
        return fate, was_durable

    def _is_elsewhere(self, plan: ClearingPlan, row: int) -> bool:
        """True when a tier that gives nothing up has the chunk: it took the chunk after the plan was made."""
        return plan.only is not None and any(each.keeps(row) for each in self._table.copies if each is not plan.only)

    def _drop(self, copies: Copies | None, row: int) -> tuple[Fate, bool]:
        """Give up one tier's copy of a chunk that another tier has."""
        assert copies is not None
        others = [each for each in self._table.copies if each is not copies and each.keeps(row)]
        if not copies.keeps(row) or not others:
            return Fate.GONE, False
        was_durable = self.is_durable(row)
        self._removal.drop(copies, row, MissReason.EVICTED, erase=True)
        is_lost = was_durable and not self.is_durable(row)
        self._counters.add("operator_removed_durable_chunks", int(is_lost))
        return Fate.COPY_REMOVED, is_lost

    def loses_durability(self, plan: ClearingPlan, place: int) -> bool:
        """True when ``do`` would take a chunk's last copy that survives this process."""
        (row, _), fate = plan.chunks.at(place), Fate(plan.fates[place])
        if fate in (Fate.REMOVED, Fate.WITH_PARENT):
            return self.is_durable(row)
        return fate is Fate.COPY_REMOVED and self.is_durable(row) and not self.is_durable(row, plan.only)

    def is_durable(self, row: int, without: Copies | None = None) -> bool:
        """True when a proven copy on the node survives this process."""
        return any(copies.is_durable(row) for copies in self._table.copies if copies is not without)


async def _marks(
    wanted: Meant, spaces: NDArray[np.int64], digests: list[bytes], pause: Pause
) -> NDArray[np.bool_]:  # fmt: skip
    """Return a flag per row: True when it is one of these chunks."""
    found = np.zeros(len(digests), np.bool_)
    for start in range(0, len(wanted), CLIMB_COUNT):
        part = slice(start, start + CLIMB_COUNT)
        rows = wanted.rows[part]
        is_it = [digests[row] == digest for row, digest in zip(rows.tolist(), wanted.digests[part], strict=True)]
        found[rows[np.array(is_it, np.bool_) & (spaces[rows] == wanted.spaces[part])]] = True
        await pause()
    return found
