"""Room in memory for a chunk that a store or a load is about to fill."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.arena import Arena, Placement
from kvstore.movement.eviction import Eviction


class Room:
    """Allocates in the arena, giving up copies until the chunk fits."""

    def __init__(self, arena: Arena, eviction: Eviction, revoke_stale: Callable[[], bool]) -> None:
        self._arena = arena
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

        def fits() -> bool:
            nonlocal placement
            placement = self._arena.allocate(piece_bytes)
            return placement is not None

        while placement is None:
            if not self._eviction.evict(lambda _: True, fits, keep, last_copies=evict_unwritten):
                if not self._revoke_stale():
                    return None
                placement = self._arena.allocate(piece_bytes)
        return placement
