"""Operators' changes to chunks. Every change has a dry run, which makes the same plan and counts the same words."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import islice

import numpy as np

from kvstore.catalog import Copies, RowIdentity
from kvstore.catalog.lineage import descend
from kvstore.controller.operators.looks import Looks
from kvstore.controller.operators.selection import Chosen
from kvstore.controller.operators.turns import Turn, Turns
from kvstore.controller.operators.values import Tally
from kvstore.controller.parts import Parts
from kvstore.movement import ChunkStep, Fate, Meant, Transit, Writes
from kvstore.spec import Durability

BATCH_COUNT = 64
"""Chunks that are moved or brought at once."""
UNDONE_AT_ONCE = 256
"""Holds, or pins, that are given back in one step of the loop."""
LOOK_AGAIN_S = 0.5
"""Seconds between two looks at how many of them have arrived."""
BATCH_S_MAX = 120.0
"""A change ends when no chunk has arrived for so long. The remaining chunks are counted as not tried."""
WORDS = {
    Fate.REMOVED: "removed",
    Fate.WITH_PARENT: "removed with what it hung on",
    Fate.COPY_REMOVED: "copy removed",
    Fate.HELD: "held",
    Fate.KEPT: "kept for what hangs on it",
    Fate.GONE: "gone meanwhile",
    Fate.SPARED: "stays with what it hangs on",
}
DURABLE = "no longer durable"
"""Removed chunks that had been acknowledged as surviving the service. They count a second time, beside "removed"."""
FREED, BY_A_PIN = "given up by faster tiers", "held by a pin"
STAYS = "has nowhere slower to go"
NOT_TRIED = "not tried"
LATE = "it did not take all in time"
LEFT = "some left the node before they were written: their last copy failed its check, as the log says, or was evicted"
IN_MEMORY, BROUGHT, NO_ROOM, NO_SOURCE = "in memory already", "brought into memory", "no room", "no tier answers"
PINNED, UNPINNED = "pinned", "unpinned"


class Changes:
    """Changes of one tenant's chunks. A held chunk (by a lease, a ticket, a move or a pin) is never removed. A change
    counts in the ``tally`` that it is given, which is read meanwhile."""

    def __init__(self, parts: Parts, turns: Turns) -> None:
        self._parts = parts
        self._catalog = parts.catalog
        self._table = parts.catalog.table
        self._movement = parts.movement
        self._turns = turns
        self._pinning = asyncio.Lock()
        self._to_undo: list[tuple[int, float | None]] = []  # the rest of a pin that was given up

    async def _picked(self, chosen: Chosen, turn: Turn) -> Meant:
        """Return all selected chunks. A row may belong to another chunk by the time of its use: users compare the
        identity."""
        rows, spaces = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        digests: list[bytes] = []
        async for block in chosen.blocks(turn):
            rows.append(block)
            spaces.append(self._table.space_ids(np.frombuffer(self._table.spaces, np.uint16)[block]))
            digests += [self._table.digests[row] for row in block.tolist()]
        await turn.next()
        return Meant(np.concatenate(rows), np.concatenate(spaces), digests)

    def _is_it(self, row: int, identity: RowIdentity) -> bool:
        """True when the row is still that chunk, and some tier of the node has it."""
        return self._table.identity(row) == identity and self._table.is_resident(row)

    def _word(self, row: int, fate: Fate) -> str:
        """Return the word for a chunk's fate. A pin, its own or a descendant's, does not end by itself, as other holds
        do."""
        return BY_A_PIN if fate is Fate.HELD and self._parts.pins.is_kept(row) else WORDS[fate]

    # ------------------------------------------------------------ evict

    async def evict(self, tally: Tally, chosen: Chosen, only: Copies | None, *, dry_run: bool) -> None:
        """Remove the selected chunks from the tier ``only``, or from all local ones."""
        turn, clearing = self._turns.begin(), self._movement.clearing
        plan = await clearing.plan(await self._picked(chosen, turn), only, turn.between)
        tally.total_count = len(plan)
        for place in range(len(plan)):
            await turn.between()
            row, _ = plan.chunks.at(place)
            byte_count = self._catalog.known_bytes(row)
            if dry_run:
                fate, was_durable = Fate(plan.fates[place]), clearing.loses_durability(plan, place)
            else:
                fate, was_durable = clearing.do(plan, place)
            tally.add(self._word(row, fate), byte_count)
            if was_durable:
                tally.add(DURABLE, byte_count)
            tally.done_count += 1

    # ------------------------------------------------------------ pins

    async def pin(self, tally: Tally, chosen: Chosen, seconds: float, *, dry_run: bool) -> None:
        """Pin all selected chunks with their ancestors, or none; one request after the other: what is undone of one was
        not pinned by another since. Raises Exhausted past limits.pin_bytes_max."""
        pins, turn = self._parts.pins, self._turns.begin()
        meant = await self._picked(chosen, turn)
        tally.total_count = len(meant)
        new: dict[int, int] = {}
        pinned: list[tuple[int, float | None]] = []
        async with self._pinning:
            while self._to_undo:
                await turn.next()
            try:
                for row, identity in meant:
                    await turn.between()
                    for above in pins.above(row) if self._is_it(row, identity) else ():
                        if above in new:
                            break
                        new[above] = self._catalog.known_bytes(above)
                pins.check(sum(new.values()))
                for row, identity in meant:
                    await turn.between()
                    tally.done_count += 1
                    if not self._is_it(row, identity):
                        tally.add(WORDS[Fate.GONE], 0)
                        continue
                    if not dry_run:
                        pinned.append((row, pins.until_s(row)))
                        pins.pin(row, seconds)
                    tally.add(PINNED, self._catalog.known_bytes(row))
            except BaseException:  # the limit was reached after all, or the caller went: all or nothing
                self._undo(pinned)
                raise

    def _undo(self, pinned: list[tuple[int, float | None]]) -> None:
        """Give these rows the pins they had before, some in each step of the loop, also where the caller has gone. Each
        row comes with the time its pin would have ended; None: it had none."""
        for row, until_s in pinned[:UNDONE_AT_ONCE]:
            self._parts.pins.restore(row, until_s)
        del pinned[:UNDONE_AT_ONCE]
        self._to_undo = pinned
        if pinned:
            asyncio.get_running_loop().call_soon(self._undo, pinned)

    async def unpin(self, tally: Tally, chosen: Chosen, *, dry_run: bool) -> None:
        """End the pins of the selected chunks, also of chunks that left all tiers in spite of them. An ancestor of
        another pinned chunk stays kept."""
        pins, turn = self._parts.pins, self._turns.begin()
        await turn.next()
        rows = []
        for row in pins.rows():
            await turn.between()
            if row in pins and chosen.names(row):
                rows.append(row)
        tally.total_count = len(rows)
        for row in rows:
            await turn.between()
            tally.done_count += 1
            byte_count = self._catalog.known_bytes(row)
            if row in pins and (dry_run or pins.unpin(row)):
                tally.add(UNPINNED, byte_count)

    # ------------------------------------------------------------ move and drain

    async def send(
        self, tally: Tally, chosen: Chosen, targets: Sequence[Writes], leaving: Sequence[Copies], stays: str, *,
        dry_run: bool,
    ) -> None:  # fmt: skip
        """Write each selected chunk to the first of the ``targets`` that takes it, and have the ``leaving`` tiers give
        it up. ``stays``: the word that counts a chunk that no target takes."""
        turn, relocation = self._turns.begin(), self._movement.relocation
        meant = await self._picked(chosen, turn)
        tally.total_count = len(meant)
        clock = self._parts.clock
        arrived_s = clock.monotonic()
        for first in range(0, len(meant), BATCH_COUNT):
            await turn.next()
            places = range(first, min(first + BATCH_COUNT, len(meant)))
            if not dry_run:
                there_yet = [row for row, identity in map(meant.at, places) if self._catalog.is_here(row, identity)]
                await relocation.confirm([row for row in there_yet if self._catalog.known_bytes(row)], targets)
            batch = [row for row, identity in map(meant.at, places) if self._catalog.is_here(row, identity)]
            steps = [relocation.step(row, targets, leaving) for row in batch]
            tally.add(WORDS[Fate.GONE], 0, len(places) - len(batch))
            if not dry_run:
                await relocation.ask(steps)
                there, is_through = relocation.there_count(steps), False
                while not is_through and clock.monotonic() - arrived_s < BATCH_S_MAX:
                    is_through = await relocation.wait(steps, LOOK_AGAIN_S)
                    there, before = relocation.there_count(steps), there
                    arrived_s = clock.monotonic() if there > before else arrived_s
                await turn.next()
                if there == sum(each.to is not None for each in steps):  # nothing is missing
                    arrived_s = clock.monotonic()
            for step in steps:
                self._sent(step, leaving, stays, tally, dry_run=dry_run)
            tally.done_count += len(places)
            if clock.monotonic() - arrived_s >= BATCH_S_MAX and not dry_run:
                tally.add(NOT_TRIED, 0, len(meant) - places.stop)
                break

    def _sent(
        self, step: ChunkStep, leaving: Sequence[Copies], stays: str, tally: Tally, *, dry_run: bool
    ) -> None:  # fmt: skip
        """Count the outcome for one chunk, and have the ``leaving`` tiers give it up where the step says so."""
        relocation, byte_count = self._movement.relocation, self._catalog.known_bytes(step.row)
        if step.to is None:
            tally.add(stays, byte_count)
            return
        if not dry_run and not relocation.is_there(step):
            tally.add(Transit.FAILED, byte_count)
            is_here = self._is_it(step.row, step.identity)
            tally.problem = f"{step.to.target.name}: {step.to.reason or (LATE if is_here else LEFT)}"
            return
        tally.add(step.way, byte_count)
        loses = step.frees and relocation.loses_durability(step, leaving)
        is_freed = step.frees and (dry_run or relocation.free(step, leaving))
        if is_freed:
            tally.add(FREED, byte_count)
            if loses:
                tally.add(DURABLE, byte_count)
        elif step.frees or step.is_held:
            tally.add(self._word(step.row, Fate.HELD), byte_count)

    # ------------------------------------------------------------ into memory

    async def bring(self, tally: Tally, chosen: Chosen, *, dry_run: bool) -> None:
        """Bring the selected chunks into memory, as many as fit beside the chunks that must stay there. Selected chunks
        that are in memory already stay there meanwhile."""
        turn, relocation = self._turns.begin(), self._movement.relocation
        meant = await self._picked(chosen, turn)
        order = await self._root_first(meant, turn)
        tally.total_count = len(meant)
        room = self._parts.arena.capacity_bytes - await self._staying_bytes(turn)
        wanted: dict[int, None] = {}
        held: list[int] = []
        try:
            for row, identity in map(meant.at, order):
                await turn.between()
                if not self._catalog.is_here(row, identity):
                    tally.add(WORDS[Fate.GONE], 0)
                    tally.done_count += 1
                    continue
                size = self._catalog.known_bytes(row)
                if row in self._movement.memory:
                    room -= 0 if self._stays(row) else size
                    tally.add(IN_MEMORY, size)
                    self._hold(row, held, dry_run=dry_run)
                elif not size or not relocation.can_come(row):
                    tally.add(NO_SOURCE, size)
                elif size > room:
                    tally.add(NO_ROOM, size)
                else:
                    room -= size
                    wanted[row] = None
                    self._hold(row, held, dry_run=dry_run)
                    continue
                tally.done_count += 1
            for first in range(0, len(wanted), BATCH_COUNT):
                batch = list(islice(wanted, first, first + BATCH_COUNT))
                is_late = not dry_run and not await relocation.bring(batch, BATCH_S_MAX)
                for row in batch:
                    what = BROUGHT if dry_run else self._brought(row, is_late=is_late)
                    tally.add(what, self._catalog.known_bytes(row))
                tally.done_count += len(batch)
                if is_late and not any(row in self._movement.memory for row in batch):
                    tally.problem = f"no chunk came within {BATCH_S_MAX:.0f} s: see kvstore tiers"
                    tally.add(NOT_TRIED, 0, len(wanted) - first - len(batch))
                    break
        finally:
            self._let_go(held)

    def _brought(self, row: int, *, is_late: bool) -> str:
        """Return the word for the outcome of bringing one chunk into memory."""
        if row in self._movement.memory:
            return BROUGHT
        if not self._movement.relocation.can_come(row):
            return NO_SOURCE
        return Transit.FAILED if is_late else NO_ROOM

    def _hold(self, row: int, held: list[int], *, dry_run: bool) -> None:
        if not dry_run:
            self._table.hold(row)
            held.append(row)

    def _let_go(self, held: list[int]) -> None:
        """Undo the holds, some in each step of the loop, also where the caller has gone."""
        for row in held[:UNDONE_AT_ONCE]:
            self._catalog.unhold(row)
        del held[:UNDONE_AT_ONCE]
        if held:
            asyncio.get_running_loop().call_soon(self._let_go, held)

    async def _root_first(self, meant: Meant, turn: Turn) -> list[int]:
        """Return the places of the chunks in ``meant``, the least deep first: where there is no room for all, no chunk
        comes without its parent."""
        count = len(self._table.digests)
        parents = np.array(self._table.parents[:count], np.int32)
        _, depths = await descend(parents, np.zeros(count, np.bool_), turn.between)
        await turn.next()
        order: list[int] = np.argsort(depths[meant.rows], kind="stable").tolist()
        await turn.next()
        return order

    async def _staying_bytes(self, turn: Turn) -> int:
        """Return the bytes of the chunks that stay in memory whatever is brought in."""
        total = 0
        for row in list(self._movement.memory.rows()):
            await turn.between()
            if row in self._movement.memory and self._stays(row):
                total += self._catalog.known_bytes(row)
        return total

    def _stays(self, row: int) -> bool:
        """True when a chunk must stay in memory: it is held, or no slower tier has it."""
        return self._table.is_held(row) or not any(row in copies for copies in self._table.copies[1:])

    # ------------------------------------------------------------ verify

    async def verify(self, tally: Tally, chosen: Chosen, only: str, *, dry_run: bool) -> None:
        """Read every copy of the selected chunks again, in the tier ``only`` or in all, and check every strip. A copy
        that fails is quarantined, and written again if memory has the chunk. A tier that stalls is given up. What an
        object store does not give is not counted as gone: nothing goes there by itself, and a denial looks the same."""
        targets = [writes.target for writes in self._movement.all_writes]
        lasting = {target.name for target in targets if target.durability is Durability.OBJECT}
        turn = self._turns.begin()
        meant = await self._picked(chosen, turn)
        tally.total_count = len(meant)
        looks = Looks(self._catalog, self._parts.clock)
        for row, identity in meant:
            await turn.between()
            tally.done_count += 1
            is_here = self._catalog.is_here(row, identity)
            byte_count = self._catalog.known_bytes(row) if is_here else 0
            if not byte_count:
                tally.add("model not registered" if is_here else WORDS[Fate.GONE], 0)
                continue
            self._table.hold(row)
            try:
                asked = [each for each in self._movement.looks(row) if only in ("", each[0])]
                if not asked:
                    tally.add(WORDS[Fate.GONE], 0)
                for name, look in asked:
                    found = True if dry_run else await looks.look(name, row, look)
                    if found is None and name not in lasting and name not in dict(self._movement.looks(row)):
                        tally.add(WORDS[Fate.GONE], 0)
                        continue
                    tally.add(f"{name}: {'not read' if found is None else 'read'}", byte_count)
                    if found is False:
                        tally.add(f"{name}: damaged", byte_count)
                    if found is not True and not tally.problem:
                        what = "fails its check and is quarantined" if found is False else "was not given"
                        tally.problem = f"the copy of chunk {identity[1].hex()} in {name} {what}"
            finally:
                self._catalog.unhold(row)
