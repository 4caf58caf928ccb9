"""Moves chunks by an operator's word: into memory, or to a slower tier, after which faster tiers give them up.

A chunk whose only local copies went to a shared tier leaves the node. Its descendants stay: they are found again as
soon as a fetch brings the chunk back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from kvstore.catalog import ChunkTable, Copies, MappedCopies, RowIdentity
from kvstore.movement.checks import Checks
from kvstore.movement.loads import Loads
from kvstore.movement.queue import Priority
from kvstore.movement.readbacks import loading_ended
from kvstore.movement.removal import Removal
from kvstore.movement.writes import Writes
from kvstore.spec import Durability, MissReason

PROVE_S_MAX = 10.0


class Transit(StrEnum):
    """The way in which a chunk gets to a tier. THERE: the tier has it; WRITTEN: it is written there; NOT_TAKEN: the
    tier does not take such chunks; FAILED: the tier did not take it in time."""

    THERE = "there already"
    WRITTEN = "written"
    NOT_TAKEN = "not taken there"
    FAILED = "failed"


class ChunkStep(NamedTuple):
    """The plan for one chunk. ``to`` is None where no tier takes it. ``frees``: faster copies go afterwards;
    ``is_held``: they would go, but the chunk is in use."""

    row: int
    identity: RowIdentity
    to: Writes | None
    way: Transit
    frees: bool
    is_held: bool


class Relocation:
    """Moves chunks by an operator's word."""

    def __init__(
        self, table: ChunkTable, memory: MappedCopies, loads: Loads, removal: Removal, checks: Checks
    ) -> None:  # fmt: skip
        self._table = table
        self._memory = memory
        self._loads = loads
        self._removal = removal
        self._checks = checks

    # ------------------------------------------------------------ down

    async def confirm(self, rows: Sequence[int], targets: Sequence[Writes]) -> None:
        """Have shared tiers among ``targets`` asked whether they still have what they once had of these chunks, which
        are about to leave the node. A tier is not asked for what an earlier target has: a question to S3 costs money,
        and a tier that gives no answer would be believed no more for nothing."""
        for each in targets:
            await each.target.confirm(rows)
            rows = [row for row in rows if not each.target.has(row)]

    def step(self, row: int, targets: Sequence[Writes], leaving: Sequence[Copies]) -> ChunkStep:
        """Plan how a chunk gets to the first of these tiers that has it, or else takes it; ``leaving`` are the tiers
        that give it up then. Changes nothing."""
        table = self._table
        to = next((each for each in targets if each.target.has(row)), None)
        way = Transit.THERE
        if to is None:
            to = next((each for each in targets if each.takes(row)), None)
            way = Transit.NOT_TAKEN if to is None else Transit.WRITTEN
        would_free = to is not None and any(copies.keeps(row) for copies in leaving)
        is_held = would_free and table.is_held(row)
        return ChunkStep(row, table.identity(row), to, way, would_free and not is_held, is_held)

    async def ask(self, steps: Sequence[ChunkStep]) -> None:
        """Have these chunks written. Copies that a crash left in the target count once they were read. A chunk that is
        to leave a device which takes no writes keeps its copy there until it is elsewhere."""
        table = self._table
        sent = [(each.row, each.to.target) for each in steps if each.to is not None]
        anew = frozenset(row for row, target in sent if target.is_local and row in self._memory)
        await self._checks.prove_all([row for row, _ in sent], PROVE_S_MAX, anew)
        for each in steps:
            if each.to is None or not self.is_it(each):
                continue
            if each.to.target.is_local:
                each.to.add(each.row, Priority.INTERACTIVE)
            elif table.is_resident(each.row):  # a demand makes a shared tier prove its word by a read
                each.to.demand(each.row, is_once=True)

    async def wait(self, steps: Sequence[ChunkStep], timeout_s: float) -> bool:
        """Wait for the chunks that were asked for, at most ``timeout_s`` seconds. Returns True when all of them are
        through."""
        rows: dict[Writes, list[int]] = {}
        for each in steps:
            if each.to is not None:
                rows.setdefault(each.to, []).append(each.row)
        return all(await asyncio.gather(*(to.through(own, timeout_s) for to, own in rows.items())))

    def is_it(self, step: ChunkStep) -> bool:
        """Return True when the row is still that chunk."""
        return self._table.identity(step.row) == step.identity

    def is_there(self, step: ChunkStep) -> bool:
        """Return True when the target tier certainly has the chunk."""
        return step.to is not None and self.is_it(step) and step.to.target.is_proven(step.row)

    def there_count(self, steps: Sequence[ChunkStep]) -> int:
        """Count the chunks that their target tier certainly has."""
        return sum(map(self.is_there, steps))

    def loses_durability(self, step: ChunkStep, leaving: Sequence[Copies]) -> bool:
        """Return True when the service has acknowledged that the chunk survives a restart, and no tier would guarantee
        that once ``leaving`` give it up: an engine that other nodes can read may drop the chunk the next moment."""
        assert step.to is not None
        durable = [copies for copies in self._table.copies if copies.is_durable(step.row)]
        is_all = bool(durable) and all(copies in leaving for copies in durable)
        return is_all and step.to.target.durability is Durability.SHARED

    def free(self, step: ChunkStep, leaving: Sequence[Copies]) -> bool:
        """Give up the copies of these tiers, the slowest first. False where the chunk is held by now. The caller knows
        that the target tier has the chunk."""
        row = step.row
        if self._table.is_held(row):
            return False
        for copies in reversed(leaving):
            if copies.keeps(row):
                self._removal.drop(copies, row, MissReason.EVICTED)
        return True

    # ------------------------------------------------------------ up

    async def bring(self, rows: Sequence[int], timeout_s: float) -> bool:
        """Bring these chunks, which the caller holds, into memory; chunks that no slower tier has do not make way.
        False: some were still on their way after ``timeout_s`` seconds, and go on."""
        loadings, _ = self._loads.begin(rows, frozenset(rows), evict_unwritten=False)
        try:
            async with asyncio.timeout(timeout_s):
                for loading in loadings:
                    if loading is not None:
                        await loading_ended(loading)
        except TimeoutError:
            return False
        return True

    def can_come(self, row: int) -> bool:
        """Return True when memory lacks the chunk and a tier that answers has it."""
        return row not in self._memory and self._loads.has_source(row)
