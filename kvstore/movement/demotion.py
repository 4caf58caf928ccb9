"""Writes chunks that are about to leave the node to the shared tiers that are to have them then. Making room waits for
no shared tier: this runs ahead of it, and counts the chunks that it did not reach in time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from kvstore.catalog import Catalog, Copies
from kvstore.movement.levels import SharedWrites
from kvstore.seams import Clock
from kvstore.telemetry import Counters
from kvstore.tiers import WritePolicy

INTERVAL_S = 0.5
LOW_WATER = 1 / 8
"""Below this free share of a tier's capacity its next victims are looked for: as many as fill that share."""
AHEAD_BYTES_MAX = 256 << 20
"""Bytes of next victims that are on their way at once."""
PEEK_COUNT_MAX = 4096
"""The number of next victims that are looked at."""


class Demotions:
    """Runs ahead of the eviction from the node's slowest tier."""

    def __init__(self, catalog: Catalog, clock: Clock, counters: Counters, shared: Sequence[SharedWrites]) -> None:
        self._catalog = catalog
        self._table = catalog.table
        self._clock = clock
        self._counters = counters
        self._shared = shared
        self._ahead: dict[str, set[int]] = {}

    async def run(self) -> None:
        """Send chunks that are about to leave, for ever."""
        while True:
            await self._clock.sleep(INTERVAL_S)
            for shared in self._wanting():
                self.look(shared)

    def _wanting(self) -> list[SharedWrites]:
        return [each for each in self._shared if each.copies.write_policy is WritePolicy.DEMOTE]

    def look(self, shared: SharedWrites) -> None:
        """Queue the next victims that a shared tier lacks, where the slowest local tier has little room left. Changes
        no eviction order."""
        slowest, name = self._table.copies[-1], shared.copies.tier.name
        if not is_low(slowest):
            return
        ahead = {row for row in self._ahead.get(name, ()) if row in shared.writes}
        left_bytes = AHEAD_BYTES_MAX - sum(map(self._catalog.known_bytes, ahead))
        near_bytes = slowest.tier.statistics().capacity_bytes * LOW_WATER
        for row in islice(slowest.policy.victims(lambda _: True), PEEK_COUNT_MAX):
            if left_bytes <= 0 or near_bytes <= 0:
                break
            near_bytes -= self._catalog.known_bytes(row)
            if row not in ahead and shared.writes.ahead(row):
                ahead.add(row)
                left_bytes -= self._catalog.known_bytes(row)
        self._ahead[name] = ahead

    def leaves(self, row: int) -> None:
        """Count a chunk whose last local copy is about to go, and that was to be demoted but was not."""
        for shared in self._wanting():
            if row not in shared.copies and shared.target.admits(row):
                self._counters.add_of(shared.copies.tier.name, "undemoted_chunks")


def is_low(copies: Copies) -> bool:
    """Return True when a tier has little room left."""
    said = copies.tier.statistics()
    used_bytes = said.allocated_bytes + said.quarantined_bytes + said.overhead_bytes
    return said.capacity_bytes - used_bytes < said.capacity_bytes * LOW_WATER
