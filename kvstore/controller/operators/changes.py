"""What operators have changed. Every change has a dry run, which makes the same plan and counts the same words."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import islice

import numpy as np

from kvstore.catalog import Copies
from kvstore.catalog.lineage import descend
from kvstore.controller.operators.selection import Chosen, Rows
from kvstore.controller.operators.turns import Turn, Turns
from kvstore.controller.operators.values import ChangeNews, Tally
from kvstore.controller.parts import Parts
from kvstore.movement import Fate, Step, Transit, Writes
from kvstore.seams import Clock

NEWS_S = 0.5
"""How often the caller hears how far it is."""
BATCH_COUNT = 64
"""Chunks that are moved or brought at once."""
BATCH_S_MAX = 120.0
"""A tier that takes a batch no sooner has failed to."""
WORDS = {
    Fate.REMOVED: "removed",
    Fate.WITH_PARENT: "removed with what it hung on",
    Fate.COPY_REMOVED: "copy removed",
    Fate.HELD: "held",
    Fate.KEPT: "kept for what hangs on it",
    Fate.GONE: "gone meanwhile",
}
DURABLE = "no longer durable"
"""Of those that were removed: they had been acknowledged as surviving the service. No word of its own in the total."""
FREED, HELD = "given up by faster tiers", "held"
STAYS = "has nowhere slower to go"
IN_MEMORY, BROUGHT, NO_ROOM, NO_SOURCE = "in memory already", "brought into memory", "no room", "no tier answers"
PINNED, UNPINNED = "pinned", "unpinned"


class Said:
    """When the caller hears how far it is."""

    def __init__(self, clock: Clock, tally: Tally) -> None:
        self._clock = clock
        self._tally = tally
        self._said_s = clock.monotonic()

    def due(self) -> Iterator[ChangeNews]:
        """News, if the last was some time ago."""
        if self._clock.monotonic() - self._said_s >= NEWS_S:
            self._said_s = self._clock.monotonic()
            yield ChangeNews(self._tally)


class Changes:
    """One tenant's. Nothing that is held (by a lease, a ticket, a move or a pin) is taken away."""

    def __init__(self, parts: Parts, turns: Turns) -> None:
        self._parts = parts
        self._catalog = parts.catalog
        self._table = parts.catalog.table
        self._movement = parts.movement
        self._turns = turns

    async def _picked(self, chosen: Chosen, turn: Turn) -> Rows:
        """All rows that are meant now. Some may be other chunks' by the time they are looked at again."""
        blocks = [rows async for rows in chosen.blocks(turn)]
        await turn.next()
        return np.concatenate(blocks) if blocks else np.empty(0, np.int64)

    def _size(self, row: int) -> int:
        return self._catalog.space_of(row).known_bytes(self._table.token_counts[row])

    # ------------------------------------------------------------ evict

    async def evict(self, chosen: Chosen, only: Copies | None, *, dry_run: bool) -> AsyncIterator[ChangeNews]:
        """Remove what is meant from one tier, or from all local ones."""
        turn, clearing = self._turns.begin(), self._movement.clearing
        plan = await clearing.plan(await self._picked(chosen, turn), only, turn.between)
        tally = Tally(len(plan))
        said = Said(self._parts.clock, tally)
        for place in range(len(plan)):
            await turn.between()
            byte_count = self._size(int(plan.rows[place]))
            if dry_run:
                fate, was_durable = Fate(plan.fates[place]), clearing.loses_durability(plan, place)
            else:
                fate, was_durable = clearing.do(plan, place)
            tally.add(WORDS[fate], byte_count)
            if was_durable:
                tally.add(DURABLE, byte_count)
            tally.done_count += 1
            for news in said.due():
                yield news
        yield ChangeNews(tally, is_last=True)

    # ------------------------------------------------------------ pins

    async def pin(self, chosen: Chosen, seconds: float, *, dry_run: bool) -> AsyncIterator[ChangeNews]:
        """Pin all that is meant, and what it hangs on, or nothing. Raises Exhausted past limits.pin_bytes_max."""
        pins, turn = self._parts.pins, self._turns.begin()
        rows = (await self._picked(chosen, turn)).tolist()
        digests = [self._table.digests[row] for row in rows]
        new: dict[int, int] = {}
        for row in rows:
            for above in pins.above(row):
                if above in new:
                    break
                new[above] = self._size(above)
            await turn.between()
        pins.check(sum(new.values()))
        tally = Tally(len(rows))
        pinned: list[int] = []
        try:
            for row, digest in zip(rows, digests, strict=True):
                await turn.between()
                tally.done_count += 1
                if self._table.digests[row] != digest or not self._table.is_resident(row):
                    tally.add(WORDS[Fate.GONE], 0)
                    continue
                if not dry_run:
                    is_new = row not in pins
                    pins.pin(row, seconds)
                    pinned += [row] if is_new else []
                tally.add(PINNED, self._size(row))
        except BaseException:  # it is full after all, or the caller went: all or nothing
            for row in pinned:
                pins.unpin(row)
            raise
        yield ChangeNews(tally, is_last=True)

    async def unpin(self, chosen: Chosen, *, dry_run: bool) -> AsyncIterator[ChangeNews]:
        """End the pins of what is meant. What another pinned chunk hangs on stays."""
        pins, turn = self._parts.pins, self._turns.begin()
        rows = [row for row in (await self._picked(chosen, turn)).tolist() if row in pins]
        tally = Tally(len(rows))
        for row in rows:
            await turn.between()
            tally.done_count += 1
            byte_count = self._size(row)
            if row in pins and (dry_run or pins.unpin(row)):
                tally.add(UNPINNED, byte_count)
        yield ChangeNews(tally, is_last=True)

    # ------------------------------------------------------------ move and drain

    async def send(
        self, chosen: Chosen, targets: Sequence[Writes], leaving: Sequence[Copies], stays: str, *, dry_run: bool
    ) -> AsyncIterator[ChangeNews]:
        """Write what is meant to the first of these tiers that takes it, and have the ``leaving`` ones give it up.
        ``stays``: what is said of a chunk that no target takes."""
        turn, relocation = self._turns.begin(), self._movement.relocation
        rows = [(row, self._table.digests[row]) for row in (await self._picked(chosen, turn)).tolist()]
        tally = Tally(len(rows))
        said = Said(self._parts.clock, tally)
        for first in range(0, len(rows), BATCH_COUNT):
            await turn.next()
            batch = [row for row, digest in rows[first : first + BATCH_COUNT] if self._is_visible(row, digest)]
            steps = [relocation.step(row, targets, leaving) for row in batch]
            tally.add(WORDS[Fate.GONE], 0, len(rows[first : first + BATCH_COUNT]) - len(batch))
            if not dry_run:
                await relocation.ask(steps)
                until_s = self._parts.clock.monotonic() + BATCH_S_MAX
                while not await relocation.wait(steps, NEWS_S) and self._parts.clock.monotonic() < until_s:
                    for news in said.due():
                        yield news
                await turn.next()
            for step in steps:
                self._sent(step, leaving, stays, tally, dry_run=dry_run)
            tally.done_count += len(rows[first : first + BATCH_COUNT])
            for news in said.due():
                yield news
        tally.counts = {what: count for what, count in tally.counts.items() if count}
        yield ChangeNews(tally, is_last=True)

    def _is_visible(self, row: int, digest: bytes) -> bool:
        return self._table.digests[row] == digest and self._catalog.is_visible(row)

    def _sent(
        self, step: Step, leaving: Sequence[Copies], stays: str, tally: Tally, *, dry_run: bool
    ) -> None:  # fmt: skip
        """Count what became of one chunk, and give it up where that is meant."""
        relocation, byte_count = self._movement.relocation, self._size(step.row)
        if step.to is None:
            tally.add(stays, byte_count)
            return
        if not dry_run and not relocation.is_there(step):
            tally.add(Transit.FAILED, byte_count)
            tally.problem = f"{step.to.target.name}: {step.to.reason or 'it did not take all in time'}"
            return
        tally.add(step.way, byte_count)
        is_freed = step.frees and (dry_run or relocation.free(step, leaving))
        if is_freed:
            tally.add(FREED, byte_count)
        elif step.frees or step.is_held:
            tally.add(HELD, byte_count)

    async def settle(self, writes: Sequence[Writes], *, dry_run: bool) -> AsyncIterator[ChangeNews]:
        """Wait until everything that waits for a slower tier is through."""
        total = sum(each.backlog_count for each in writes)
        tally = Tally(total)
        clock, left, since_s = self._parts.clock, total, self._parts.clock.monotonic()
        while left and not dry_run and clock.monotonic() - since_s < BATCH_S_MAX:
            await clock.sleep(NEWS_S)
            now = sum(each.backlog_count for each in writes)
            if now < left:
                since_s = clock.monotonic()
            left = min(left, now)
            tally.done_count = total - left
            yield ChangeNews(tally)
        if dry_run:
            left = 0
        if total - left:
            tally.add(Transit.WRITTEN, 0, total - left)
        if left:
            tally.add(Transit.FAILED, 0, left)
            tally.problem = "; ".join(f"{each.target.name}: {each.reason}" for each in writes if each.reason)
        tally.done_count = total
        yield ChangeNews(tally, is_last=True)

    # ------------------------------------------------------------ into memory

    async def bring(self, chosen: Chosen, *, dry_run: bool) -> AsyncIterator[ChangeNews]:
        """Have what is meant in memory, as much of it as memory holds beside what is held there. What of it is there
        stays there meanwhile."""
        turn, relocation = self._turns.begin(), self._movement.relocation
        rows = await self._root_first(await self._picked(chosen, turn), turn)
        tally = Tally(len(rows))
        said = Said(self._parts.clock, tally)
        room = self._parts.arena.capacity_bytes - await self._staying_bytes(turn)
        wanted: dict[int, None] = {}
        held = []
        try:
            for row in rows:
                await turn.between()
                size = self._size(row)
                if not self._catalog.is_visible(row):
                    tally.add(WORDS[Fate.GONE], 0)
                elif row in self._movement.memory:
                    room -= 0 if self._stays(row) else size
                    tally.add(IN_MEMORY, size)
                elif not size or not relocation.can_come(row):
                    tally.add(NO_SOURCE, size)
                elif size > room:
                    tally.add(NO_ROOM, size)
                else:
                    room -= size
                    wanted[row] = None
                    continue
                tally.done_count += 1
            for row in rows if not dry_run else ():
                if row in self._movement.memory or row in wanted:
                    self._table.hold(row)
                    held.append(row)
            for first in range(0, len(wanted), BATCH_COUNT):
                batch = list(islice(wanted, first, first + BATCH_COUNT))
                if not dry_run:
                    await relocation.bring(batch)
                for row in batch:
                    is_there = dry_run or row in self._movement.memory
                    tally.add(BROUGHT if is_there else NO_ROOM, self._size(row))
                tally.done_count += len(batch)
                for news in said.due():
                    yield news
        finally:
            for row in held:
                self._catalog.unhold(row)
        yield ChangeNews(tally, is_last=True)

    async def _root_first(self, rows: Rows, turn: Turn) -> list[int]:
        """Chunks of short chains first: where there is no room for all, none comes without what it hangs on."""
        count = len(self._table.digests)
        parents = np.array(self._table.parents[:count], np.int32)
        _, depths = await descend(parents, np.zeros(count, np.bool_), turn.between)
        ordered: list[int] = rows[np.argsort(depths[rows], kind="stable")].tolist()
        await turn.next()
        return ordered

    async def _staying_bytes(self, turn: Turn) -> int:
        """Of what no chunk that is brought in may take the place of in memory."""
        total = 0
        for row in list(self._movement.memory.rows()):
            await turn.between()
            if row in self._movement.memory and self._stays(row):
                total += self._size(row)
        return total

    def _stays(self, row: int) -> bool:
        """Whether a chunk stays in memory: somebody holds it, or no slower tier has it."""
        return self._table.is_held(row) or not any(row in copies for copies in self._table.copies[1:])

    # ------------------------------------------------------------ verify

    async def verify(self, chosen: Chosen, only: str, *, dry_run: bool) -> AsyncIterator[ChangeNews]:
        """Read every copy of what is meant again, of one tier or all, and check every strip. What fails is quarantined,
        and written again from memory where that has the chunk."""
        turn = self._turns.begin()
        rows = [(row, self._table.digests[row]) for row in (await self._picked(chosen, turn)).tolist()]
        tally = Tally(len(rows))
        said = Said(self._parts.clock, tally)
        for row, digest in rows:
            await turn.between()
            tally.done_count += 1
            if not self._is_visible(row, digest) or not self._size(row):
                tally.add(WORDS[Fate.GONE] if self._table.digests[row] != digest else "model not registered", 0)
                continue
            byte_count = self._size(row)
            self._table.hold(row)
            try:
                for name, look in self._movement.looks(row):
                    if only and name != only:
                        continue
                    tally.add(f"{name}: read", byte_count)
                    found = True if dry_run else await look()
                    if found is not True:
                        tally.add(f"{name}: {'damaged' if found is False else 'not read'}", byte_count)
                        self._blame(tally, name, digest, is_damaged=found is False)
                    for news in said.due():
                        yield news
            finally:
                self._catalog.unhold(row)
        yield ChangeNews(tally, is_last=True)

    def _blame(self, tally: Tally, name: str, digest: bytes, *, is_damaged: bool) -> None:
        """Name the first chunk whose copy failed."""
        if not tally.problem:
            what = "fails its check and is quarantined" if is_damaged else "was not given"
            tally.problem = f"the copy of chunk {digest.hex()} in {name} {what}"


def slower_than(parts: Parts, name: str) -> list[Writes]:
    """To the tiers that are slower than one that is there."""
    names = [each.target.name for each in parts.movement.all_writes]
    return parts.movement.all_writes[names.index(name) + 1 :]
