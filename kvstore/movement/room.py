"""Room in memory for a chunk that a store or a load is about to fill."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from kvstore.arena import Arena, Placement
from kvstore.catalog import MappedCopies
from kvstore.movement.eviction import Eviction

APART_COUNT = 16
"""Copies that go one by one once enough bytes are free, but apart, before neighbours go together."""


class Room:
    """Allocates in the arena, giving up copies until the chunk fits.

    Copies go one by one, in the policy's order. Where those that are next to go are smaller than what comes, and lie
    apart, nearly all of memory would go before some of them are neighbours: then the neighbours of one go with it,
    those first that a slower tier has, too.
    """

    def __init__(
        self, arena: Arena, memory: MappedCopies, eviction: Eviction, revoke_stale: Callable[[], bool]
    ) -> None:  # fmt: skip
        self._arena = arena
        self._memory = memory
        self._eviction = eviction
        self._revoke_stale = revoke_stale

    def allocate(
        self, piece_bytes: tuple[int, ...], keep: frozenset[int], *, evict_unwritten: bool = True
    ) -> Placement | None:
        """Return room for a chunk, or None when all that is left is held by children, leases or ``keep``. Without
        ``evict_unwritten`` also None when only chunks that no slower tier has could go.

        Raises: InvalidRequest when the chunk could never fit.
        """
        placement = self._arena.allocate(piece_bytes)
        apart_count = 0

        def fits() -> bool:
            nonlocal placement
            placement = self._arena.allocate(piece_bytes)
            return placement is not None

        def fits_or_lies_apart() -> bool:
            nonlocal apart_count
            apart_count += self._arena.has_bytes(sum(piece_bytes))
            return fits() or apart_count == APART_COUNT  # from then on one by one: no other way is left

        while placement is None:
            if self._eviction.evict(lambda _: True, fits_or_lies_apart, keep, last_copies=evict_unwritten):
                ways = product((False, True) if evict_unwritten else (False,), (sum(piece_bytes), max(piece_bytes)))
                for last_copies, byte_count in ways if placement is None else ():
                    if self._eviction.evict_runs(self._run_of(byte_count), fits, keep, last_copies=last_copies):
                        break
            elif self._revoke_stale():
                fits()
            else:
                return None
        return placement

    def _run_of(self, byte_count: int) -> Callable[[int], list[int] | None]:
        """Return a function that gives the rows without which ``byte_count`` bytes are free from a row's place on."""

        def rows_of(row: int) -> list[int] | None:
            slots = self._arena.run_from(self._memory.placement(row), byte_count)
            return None if slots is None else list(map(self._memory.row_at, slots))

        return rows_of
