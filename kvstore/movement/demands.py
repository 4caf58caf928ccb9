"""Chunks that requests ask one tier to have, whatever its settings say."""

from __future__ import annotations

from typing import NamedTuple

from kvstore.catalog import ChunkTable, RowIdentity


class Demand(NamedTuple):
    """``is_once``: who demanded it is told if the tier does not take it, and does not want it there later."""

    identity: RowIdentity
    is_once: bool


class Demands:
    """Demanded chunks by row: for them the tier's mere word is not enough. A row may be another chunk's by now."""

    def __init__(self, table: ChunkTable) -> None:
        self._table = table
        self._rows: dict[int, Demand] = {}

    def __contains__(self, row: int) -> bool:
        return row in self._rows and self._rows[row].identity == self._table.identity(row)

    def add(self, row: int, *, is_once: bool) -> None:
        """Record a demand. Of several for one chunk, one that is not for once makes the chunk be tried again."""
        is_once = is_once and (row not in self or self._rows[row].is_once)
        self._rows[row] = Demand(self._table.identity(row), is_once)

    def are_once(self, row: int) -> bool:
        """Return True when all that demand this chunk are told if the tier does not take it."""
        return row in self and self._rows[row].is_once

    def forget(self, row: int) -> None:
        self._rows.pop(row, None)
