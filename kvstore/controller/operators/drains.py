"""Drains of the service: no new stores, and all that waits for slower tiers is written, so that it can be stopped."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType

from kvstore.controller.operators.changes import BATCH_S_MAX, LOOK_AGAIN_S
from kvstore.controller.operators.turns import Turn, Turns
from kvstore.controller.operators.values import Tally
from kvstore.controller.parts import Parts
from kvstore.controller.stores import Claims, Reservations
from kvstore.movement import Transit, Writes
from kvstore.movement.queue import Priority

STORES_REFUSED = "an operator drains the service (kvstore drain --service --end has it take stores again)"
NONE_ASKED: Mapping[int, Writes] = MappingProxyType({})
STORING, ALONE = "still being stored", "in memory alone"
"""Chunks of stores that did not end in time, and chunks that a stop would lose."""


class Drains:
    """The drains of one tenant's service."""

    def __init__(self, parts: Parts, claims: Claims, reservations: Reservations, turns: Turns) -> None:
        self._parts = parts
        self._table = parts.catalog.table
        self._movement = parts.movement
        self._claims = claims
        self._reservations = reservations
        self._turns = turns

    @property
    def problem(self) -> str:
        """The reason why the service takes no stores; empty while it takes them."""
        return self._claims.refusal

    def resume(self) -> None:
        """Take stores again."""
        self._claims.refusal = ""

    async def stores(self, tally: Tally, *, dry_run: bool) -> None:
        """Refuse new stores until ``resume``, wait until those in flight have ended and every chunk that a stop would
        lose is written where a tier takes it, and count the chunks that it would lose all the same."""
        if not dry_run:
            self._claims.refusal = STORES_REFUSED
        turn, total, alone = self._turns.begin(), self._movement.backlog_count, Tally()
        asked: dict[int, Writes] = {}
        ending = {each.tier.name for each in self._movement.shared_tiers.tiers if each.ends_with_us}
        async for row in self._lost(turn):
            if not any(row in each for each in self._movement.all_writes if each.target.name not in ending):
                if (to := self._write(row, alone, dry_run=dry_run)) is not None:
                    asked[row] = to
        await self.settle(tally, total, asked, dry_run=dry_run)
        tally.add(STORING, self._reservations.reserved_bytes, self._storing)
        if not dry_run:
            alone = Tally()
            async for row in self._lost(turn):
                alone.add(ALONE, self._parts.catalog.known_bytes(row))
        for what, count in alone.counts.items():
            tally.add(what, alone.byte_counts[what], count)
        tally.refuses_stores = bool(self.problem)  # another operator may have ended it

    def _write(self, row: int, alone: Tally, *, dry_run: bool) -> Writes | None:
        """Have a chunk written to the first local tier that takes it; count it as ``alone`` where none does, or where
        that one refused it lately and a dry run tries nothing. Return the tier that is to have it."""
        to = next((each for each in self._movement.writes if each.takes(row)), None)
        if to is None or (dry_run and row in to.parked):
            alone.add(ALONE, self._parts.catalog.known_bytes(row))
            return None
        if not dry_run:
            to.add(row, Priority.INTERACTIVE)
        return to

    async def _lost(self, turn: Turn) -> AsyncIterator[int]:
        """Give the rows of the chunks in memory that a stop loses, in steps."""
        memory = self._movement.memory
        await turn.next()
        for row in list(memory.rows()):
            await turn.between()
            if row in memory and self._parts.catalog.is_visible(row) and not self._survives(row):
                yield row
        turn.end()

    def _survives(self, row: int) -> bool:
        """Return True when a tier certainly has the chunk after a stop."""
        return any(copies.is_durable(row) for copies in self._table.copies) or any(
            shared.is_seen(row) and not shared.ends_with_us for shared in self._movement.shared_tiers.tiers
        )

    async def settle(
        self, tally: Tally, total: int = 0, asked: Mapping[int, Writes] = NONE_ASKED, *, dry_run: bool
    ) -> None:
        """Wait until the tiers have written all chunks of their backlogs, and in a drain until all stores have ended.
        ``total``: chunks of the backlogs; ``asked``: the rows that the run adds to them, also where they are written
        by now. A chunk that a tier refuses leaves its backlog: it is tried again later, and has failed as far as a
        drain goes. A dry run knows of those that were refused lately."""
        movement, clock = self._movement, self._parts.clock
        refused = await self._refused(asked)
        left = movement.backlog_count
        total = max(total + len(asked), left) + refused
        tally.total_count, since_s = total, clock.monotonic()
        now = least = (left, self._storing)
        while any(now) and not dry_run and clock.monotonic() - since_s < BATCH_S_MAX:
            await clock.sleep(LOOK_AGAIN_S)
            now = (movement.backlog_count, self._storing)
            if now < least:  # what comes and goes is no progress
                least, since_s = now, clock.monotonic()
            left = min(left, now[0])
            tally.done_count = total - left
        failed = refused if dry_run else min(total, left + await self._refused())
        tally.add(Transit.WRITTEN, 0, total - failed)
        tally.add(Transit.FAILED, 0, failed)
        if failed:
            tally.problem = "; ".join(
                f"{each.target.name}: {each.reason}" for each in movement.all_writes if each.reason
            )
        tally.done_count = total

    async def _refused(self, asked: Mapping[int, Writes] = NONE_ASKED) -> int:
        """Count the chunks that tiers refused, still lack, and do not try again yet, but those ``asked`` of them."""
        turn, count = self._turns.begin(), 0
        for writes in self._movement.all_writes:
            for row in list(writes.parked):
                await turn.between()
                is_here = self._table.is_resident(row) and self._parts.catalog.is_visible(row)
                is_lacking = writes.takes(row) and not writes.target.has(row) and row not in writes
                count += is_here and is_lacking and asked.get(row) is not writes
        turn.end()
        return count

    @property
    def _storing(self) -> int:
        """Chunks that stores in flight still write; 0 while new stores come: nobody waits for all of them."""
        return self._reservations.chunk_count if self._claims.refusal else 0
