"""Finding room. The arena's capacity is a hard cap: a chunk comes in only when others made way."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.arena import Arena, Placement
from kvstore.catalog import NOWHERE
from kvstore.movement.residency import Residency
from kvstore.spec import MissReason, Tier
from kvstore.telemetry import Counters


class Capacity:
    """Room in the arena: allocates, giving up copies in the policy's order until it fits."""

    def __init__(
        self, arena: Arena, residency: Residency, counters: Counters, revoke_stale_leases: Callable[[], bool]
    ) -> None:
        self._arena = arena
        self._residency = residency
        self._counters = counters
        self._revoke_stale_leases = revoke_stale_leases

    def allocate(
        self, piece_bytes: tuple[int, ...], keep: frozenset[int], *, evict_unwritten: bool = True
    ) -> Placement | None:
        """Room for a chunk, or None when all that is left is held by children, pins, leases or ``keep``; without
        ``evict_unwritten`` also when only chunks that no lower tier has could go.

        Raises: InvalidRequest when the chunk could never fit.
        """
        while True:
            placement = self._arena.allocate(piece_bytes)
            if placement is not None:
                return placement
            byte_count = sum(piece_bytes)
            if self._demote(byte_count, keep) or (evict_unwritten and self._evict_some(byte_count, keep)):
                continue
            if not self._revoke_stale_leases():
                return None

    def _demote(self, byte_count: int, keep: frozenset[int]) -> bool:
        """Give up about ``byte_count`` bytes of what a lower tier has too. False when there is nothing of the kind."""
        table = self._residency.table

        def eligible(row: int) -> bool:
            return table.residencies[row] != NOWHERE and not table.is_held(row) and row not in keep

        if not self._residency.has_lower_tier:
            return False
        freed = 0
        for row in self._residency.arena_policy.victims(eligible):
            freed += table.arena[row].byte_count
            self._counters.add("demoted_chunks")
            self._residency.drop(row)
            if freed >= byte_count:
                break
        return freed > 0

    def _evict_some(self, byte_count: int, keep: frozenset[int]) -> bool:
        """Leaves first; then also chunks whose children the device has, though it gave up themselves: those children
        are of no use until their parent is stored again."""
        return self._evict(byte_count, keep, leaves=True) or self._evict(byte_count, keep, leaves=False)

    def _evict(self, byte_count: int, keep: frozenset[int], *, leaves: bool) -> bool:
        """Give up about ``byte_count`` bytes of what only memory has. False when nothing could go."""
        table = self._residency.table

        def eligible(row: int) -> bool:
            return not (leaves and table.child_counts[row]) and not table.is_held(row) and row not in keep

        freed = 0
        for row in self._residency.arena_policy.victims(eligible):
            freed += table.arena[row].byte_count
            self._counters.add("evicted_chunks")
            self._counters.add("evicted_bytes", table.arena[row].byte_count)
            self._residency.drop(row)
            self._residency.withdraw_if_gone(row, MissReason.EVICTED, Tier.DRAM)
            if freed >= byte_count:
                break
        return freed > 0
