"""Enters a local tier's copies into the catalog at a start, and lists them at a clean stop."""

from __future__ import annotations

import numpy as np

from kvstore.catalog import ROOT_ROW, Catalog, Copies
from kvstore.keys import DIGEST_BYTES, ROOT_DIGEST
from kvstore.tiers import IndexColumns, Recovered


def adopt(catalog: Catalog, copies: Copies, found: Recovered) -> int:
    """Enter a tier's copies into the catalog. Returns the number of chunks. A further copy of a chunk is a spare. A
    copy of another write than the one that a faster tier has is given up. Cost: about 3 us each."""
    table, columns = catalog.table, found.columns
    spaces = {number: catalog.spaces.get(*columns.names[number]) for number in set(columns.spaces.tolist())}
    rows: list[int] = []
    place = 0
    for residency, mark, count, number, is_proven, stored_s in zip(
        columns.residencies.tolist(), columns.marks.tolist(), columns.token_counts.tolist(), columns.spaces.tolist(),
        found.is_proven.tolist(), columns.times.tolist(), strict=True,
    ):  # fmt: skip
        stop = place + DIGEST_BYTES
        space, digest, parent = spaces[number], columns.digests[place:stop], columns.parents[place:stop]
        place = stop
        if digest == ROOT_DIGEST:
            continue
        known = space.index.get(digest)
        if known is not None and known in copies:
            copies.put_spare(known, residency, mark, is_proven=is_proven)
            continue
        if known is not None and table.write_marks[known] != mark:
            copies.tier.remove([residency], erase=space.may_be_replaced)
            continue
        row = catalog.row_of(space, digest, parent, count) if known is None else known
        copies.put(row, residency, is_proven=is_proven)
        if known is None:
            table.write_marks[row] = mark
            table.stored_s[row] = stored_s
            catalog.publish(row)
            table.uses[row] = 1  # the store that wrote it
        rows.append(row)
    _order(catalog, copies, rows)
    return len(rows)


def _order(catalog: Catalog, copies: Copies, rows: list[int]) -> None:
    """Give the policy the recency that the columns have; within each run of a chain the end comes before the
    beginning."""
    table = catalog.table
    for row in rows:
        copies.policy.stored(row, table.digests[row], *catalog.worth(row))
    run: list[int] = []
    for row in rows:
        if run and table.parents[row] != run[-1]:
            copies.used([table.digests[each] for each in run], run)
            run = []
        run.append(row)
    copies.used([table.digests[each] for each in run], run)


def held_by(catalog: Catalog, copies: Copies) -> Recovered:
    """Return a tier's copies for its snapshot: the least recently used first, spares last."""
    table = catalog.table
    found = [(row, copies.residency(row), table.write_marks[row], copies.is_proven(row)) for row in copies.order()]
    found += [(row, *spare) for row, spares in copies.spares.items() for spare in spares]
    rows = [row for row, _, _, _ in found]
    parents = [table.parents[row] for row in rows]
    numbers = [table.spaces[row] for row in rows]
    spaces = {number: catalog.spaces.numbered[number] for number in dict.fromkeys(numbers)}
    places = {number: place for place, number in enumerate(spaces)}
    columns = IndexColumns(
        [(space.fingerprint, space.provenance, space.exactness) for space in spaces.values()],
        np.array([residency for _, residency, _, _ in found], np.int64),
        np.array([mark for _, _, mark, _ in found], np.uint64),
        np.array([table.token_counts[row] for row in rows], np.int32),
        np.array([places[number] for number in numbers], np.uint16),
        b"".join(table.digests[row] for row in rows),
        b"".join(ROOT_DIGEST if parent == ROOT_ROW else table.digests[parent] for parent in parents),
        np.array([table.stored_s[row] for row in rows], np.uint32),
    )
    return Recovered(columns, np.array([is_proven for _, _, _, is_proven in found], np.bool_))
