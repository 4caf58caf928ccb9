"""Removes copies: given up, removed, quarantined. A chunk that no tier holds any more becomes invisible."""

from __future__ import annotations

import logging

from kvstore.catalog import Catalog, Copies
from kvstore.errors import KVStoreError
from kvstore.spec import MissReason
from kvstore.telemetry import Counters
from kvstore.tiers import Residency

_log = logging.getLogger("kvstore.movement")


class Removal:
    """Takes copies out of the catalog, and has their tiers free the room."""

    def __init__(self, catalog: Catalog, counters: Counters) -> None:
        self._catalog = catalog
        self._table = catalog.table
        self._counters = counters

    def drop(self, copies: Copies, row: int, reason: MissReason, *, erase: bool = False) -> None:
        """Give up one tier's copies of a chunk; their room is free at once. With ``erase``, and for a value that may be
        replaced, they are erased instead: no start brings them back, and their room is free once that is done."""
        was_fastest = self._table.fastest(row) is copies
        copies.tier.remove(copies.take(row, reason), erase=erase or self._catalog.space_of(row).may_be_replaced)
        if was_fastest:
            self._fastest_left(copies, row, reason)

    def drop_spare(self, copies: Copies, row: int, residency: Residency) -> None:
        """Give up a further copy of a chunk, as ``drop`` does; the others stay."""
        copies.take_spare(row, residency)
        copies.tier.remove([residency], erase=self._catalog.space_of(row).may_be_replaced)

    def _fastest_left(self, copies: Copies, row: int, reason: MissReason) -> None:
        """Update the catalog after the fastest copy left: readers find a slower copy, or the chunk is gone."""
        fastest = self._table.fastest(row) or self._spared(row)
        if fastest is copies:
            self._catalog.show(row)
        elif fastest is not None:
            self._catalog.moved(row, fastest.kind)
        elif self._catalog.is_visible(row):
            self._catalog.withdraw(row, reason, copies.kind)
        else:
            self._catalog.forget_ghost(row)

    def _spared(self, row: int) -> Copies | None:
        """Make a spare the copy of a chunk that no tier has any more. Return its tier's copies; None: it has none."""
        for copies in self._table.copies:
            if spares := copies.spares.pop(row, None):
                spare = spares.pop()
                self._table.write_marks[row] = spare.mark
                copies.put(row, spare.residency, is_proven=spare.is_proven)
                copies.policy.stored(row, self._table.digests[row], *self._catalog.worth(row))
                if spares:
                    copies.spares[row] = spares
                return copies
        return None

    def remove(self, row: int, reason: MissReason, *, erase: bool = False) -> None:
        """Give up every copy of a chunk."""
        for copies in reversed(self._table.copies):  # the slowest first: watchers hear that it left, not that it moved
            if copies.keeps(row):
                self.drop(copies, row, reason, erase=erase)

    async def quarantine(self, copies: Copies, row: int, residency: Residency) -> bool:
        """Give up a copy that failed its check. Another tier's copy takes its place, or a spare copy. Spares stay until
        the chunk has been written anew and beyond: what was promised of the chunk may rest on one of them. False: there
        is no such copy any more, since it left under the check, or another reader met it first."""
        if copies.residency(row) != residency:
            return False
        self._counters.add("quarantined_chunks")
        _log.error(
            "a chunk fails its check",
            extra={"tier": copies.tier.name, "digest": self._table.digests[row].hex()},
        )
        was_fastest = self._table.fastest(row) is copies
        spares = copies.spares.pop(row, None)
        copies.take(row, MissReason.CORRUPT)
        if spares:
            copies.spares[row] = spares
        if was_fastest:
            self._fastest_left(copies, row, MissReason.CORRUPT)
        try:
            await copies.tier.quarantine(residency)
        except KVStoreError as error:
            _log.warning("its room could not be erased", extra={"reason": error.message})
        return True
