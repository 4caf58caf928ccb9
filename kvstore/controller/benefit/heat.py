"""The prefixes that were fetched most of late: a bounded account by the last chunk of each fetch.

Past the bound, the prefixes with the least heat give their heat to the branch above them. So a system prompt is as hot
as all the conversations that go on from it, however many they are and however short-lived.
Space saving by hierarchy, after "Finding Hierarchical Heavy Hitters in Data Streams" (Cormode et al., 2003), with two
departures: folded prefixes are never told apart again, and heat is halved every hour.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvstore.catalog import ROOT_ROW, Catalog, ChunkTable, Namespace
from kvstore.seams import Clock

PREFIX_COUNT_MAX = 512
"""Prefixes that are told apart; up to twice as many between two foldings."""
HALVED_S = 3600.0
HEAT_MIN = 0.01
"""A prefix that was fetched once is forgotten after some seven hours."""
FOLDED_CHUNKS_MAX = 4096
"""Chunks that one folding walks over: a millisecond. The heat that is not placed by then is dropped."""
WALKED_CHUNKS_MAX = 8192
"""Chunks that a tree is made of: some 3 ms. The hottest prefixes come first."""
Ending = tuple[int, bytes]
"""The end of a fetched prefix: the id of its namespace, and the digest of its last chunk."""


class HotPrefix(NamedTuple):
    """A run of chunks at whose end fetched prefixes branch or end. ``above``: the index of the run in front of this
    run in the same list; -1: there is none. ``row``: the catalog's row of the last chunk. ``token_count``: tokens of
    the whole prefix. ``heat``: fetches of the prefix and of all longer ones, each of which counts half as much every
    hour. ``own_heat``: the same of the fetches that ended with this run."""

    above: int
    row: int
    token_count: int
    heat: float
    own_heat: float


class Heat:
    """One tenant's account. Runs on the event loop's thread. Cost: a fraction of a microsecond per fetch, and a
    millisecond every ``PREFIX_COUNT_MAX`` fetches of prefixes that are not among the hot ones."""

    def __init__(self, catalog: Catalog, clock: Clock) -> None:
        self._catalog = catalog
        self._clock = clock
        self._heat: dict[Ending, float] = {}
        self._as_of_s = clock.monotonic()

    def add(self, space: Namespace, last: bytes, fetch_count: int = 1) -> None:
        """Count ``fetch_count`` fetches of the prefix that ends with the chunk ``last``."""
        ending = self._catalog.table.space_id(space.number), last
        self._heat[ending] = self._heat.get(ending, 0.0) + fetch_count
        if len(self._heat) > 2 * PREFIX_COUNT_MAX:
            self._cool()
            self._fold()

    def _cool(self) -> None:
        """Decay all heat to now, by half per hour, and forget prefixes below ``HEAT_MIN``."""
        now_s = self._clock.monotonic()
        share = 0.5 ** ((now_s - self._as_of_s) / HALVED_S)
        self._as_of_s = now_s
        self._heat = {ending: heat * share for ending, heat in self._heat.items() if heat * share >= HEAT_MIN}

    def _fold(self) -> None:
        """Keep the ``PREFIX_COUNT_MAX`` hottest prefixes; give the heat of the others to the branches above them."""
        ordered = sorted(self._heat, key=self._heat.__getitem__)
        walked = 0
        for ending in ordered[:-PREFIX_COUNT_MAX]:
            heat = self._heat.pop(ending)
            for row in self._ancestors(ending):
                walked += 1
                if walked > FOLDED_CHUNKS_MAX:
                    break
                if self._catalog.table.child_counts[row] > 1:
                    branch = ending[0], self._catalog.table.digests[row]
                    self._heat[branch] = self._heat.get(branch, 0.0) + heat
                    break

    def _ancestors(self, ending: Ending) -> Iterator[int]:
        """The rows above a chunk, its parent's first; none where it is not stored any more."""
        row = self._row(ending)
        while row != ROOT_ROW and (row := self._catalog.table.parents[row]) != ROOT_ROW:
            yield row

    def _row(self, ending: Ending) -> int:
        space = self._catalog.spaces.by_id(ending[0])
        return ROOT_ROW if space is None else space.index.get(ending[1], ROOT_ROW)

    def hottest(self, count: int) -> list[HotPrefix]:
        """Return the ``count`` hottest prefixes that are stored, as a tree: each prefix comes after the shorter one
        that it extends."""
        self._cool()
        tree = _Tree(self._catalog.table)
        for ending in sorted(self._heat, key=self._heat.__getitem__, reverse=True):
            row = self._row(ending)
            if row != ROOT_ROW and not tree.add(row, self._heat[ending]):
                break
        return tree.hottest(count)


class _Tree:
    """The chunks of some prefixes, and the heat of each chunk."""

    def __init__(self, table: ChunkTable) -> None:
        self._table = table
        self._own: dict[int, float] = {}
        self._heat: dict[int, float] = {}
        self._paths: list[list[int]] = []
        """The rows that each prefix added, its last chunk first."""

    def add(self, row: int, heat: float) -> bool:
        """Add a prefix by the row of its last chunk. False where it would exceed WALKED_CHUNKS_MAX: it is left out."""
        path, parents = [], self._table.parents
        above = row
        while above != ROOT_ROW and above not in self._heat:
            path.append(above)
            above = parents[above]
            if len(self._heat) + len(path) > WALKED_CHUNKS_MAX:
                return False
        self._own[row] = self._own.get(row, 0.0) + heat
        self._heat |= dict.fromkeys(path, 0.0)
        self._paths.append(path)
        return True

    def hottest(self, count: int) -> list[HotPrefix]:
        """See ``Heat.hottest``."""
        heat, parents = self._heat, self._table.parents
        for row, own in self._own.items():
            heat[row] += own
        branches: dict[int, int] = {}
        for path in reversed(self._paths):  # each path continues an earlier one
            for row in path:
                above = parents[row]
                if above != ROOT_ROW:
                    heat[above] += heat[row]
                    branches[above] = branches.get(above, 0) + 1
        ends = {row for row in heat if row in self._own or branches.get(row, 0) > 1}
        places: dict[int, int] = {}
        found: list[HotPrefix] = []
        tokens: dict[int, int] = {}
        fronts: dict[int, int] = {}
        for path in self._paths:
            for row in reversed(path):
                above = parents[row]
                tokens[row] = tokens.get(above, 0) + self._table.token_counts[row]
                fronts[row] = above if above in ends else fronts.get(above, ROOT_ROW)
        # A run is at least as hot as the runs below it, and has fewer tokens: this order has a run before those.
        for row in sorted(ends, key=lambda each: (-heat[each], tokens[each]))[:count]:
            places[row] = len(found)
            above = places.get(fronts[row], -1)
            found.append(HotPrefix(above, row, tokens[row], heat[row], self._own.get(row, 0.0)))
        return found
