"""Finding room. The arena's capacity is a hard cap: a chunk comes in only when others made way."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.arena import Arena, Placement
from kvstore.catalog import Catalog, Record
from kvstore.policy import EvictionPolicy
from kvstore.spec import MissReason
from kvstore.telemetry import Counters


class Capacity:
    """Allocates, evicting leaves in the policy's order until it fits."""

    def __init__(
        self,
        arena: Arena,
        catalog: Catalog,
        policy: EvictionPolicy[Record],
        counters: Counters,
        revoke_stale_leases: Callable[[], bool],
    ) -> None:
        self._arena = arena
        self._catalog = catalog
        self._policy = policy
        self._counters = counters
        self._revoke_stale_leases = revoke_stale_leases

    def allocate(self, piece_bytes: tuple[int, ...], keep: frozenset[Record]) -> Placement | None:
        """Room for a chunk, or None when all that is left is held by children, pins, leases or ``keep``.

        Raises: InvalidRequest when the chunk could never fit.
        """
        while True:
            placement = self._arena.allocate(piece_bytes)
            if placement is not None:
                return placement
            if not self._evict_for(sum(piece_bytes), keep) and not self._revoke_stale_leases():
                return None

    def _evict_for(self, byte_count: int, keep: frozenset[Record]) -> bool:
        """Evict about ``byte_count`` bytes. False when nothing could go."""
        freed = 0
        for record in self._policy.victims(lambda each: not each.is_held and each not in keep):
            freed += record.placement.byte_count
            self.evict(record)
            if freed >= byte_count:
                break
        return freed > 0

    def evict(self, record: Record) -> None:
        """Remove one leaf for want of room."""
        self._counters.add("evicted_chunks")
        self._counters.add("evicted_bytes", record.placement.byte_count)
        self.remove(record, MissReason.EVICTED)

    def remove(self, record: Record, reason: MissReason) -> None:
        """Take one leaf out of the catalog and free its bytes, in that order."""
        self._catalog.withdraw(record, reason)
        self._policy.removed(record)
        self._arena.free(record.placement)
