"""Reports how durable a chain is: the levels that all of it has reached, and why it has not reached the others. This is
the only place where a level is promised."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.catalog import ROOT_ROW, Catalog, RowIdentity
from kvstore.config import LEVEL_SETTINGS
from kvstore.errors import InvalidRequest
from kvstore.movement.breaker import told_of
from kvstore.movement.names import ChunkNames
from kvstore.movement.questions import PROBE_COUNT_MAX
from kvstore.movement.shared import SharedCopies, is_for_others
from kvstore.movement.shared_target import SharedTarget
from kvstore.movement.writes import GONE, NO_ROOM, Writes
from kvstore.seams import Clock, Deadline
from kvstore.spec import Durability

ROUND_COUNT = 2
"""Chunks that an engine dropped while the rest of a chain was sent are sent once more."""
PATIENCE = 0.5
"""The share of the remaining time that is spent waiting for other nodes that write the same chunks; then this node
writes them, too."""
BEYOND = (Durability.SHARED, Durability.OBJECT)
"""The levels of tiers that other nodes use, too."""


@dataclass(frozen=True, slots=True)
class LevelsReached:
    """``missing``: for each level that was not reached, the reason; all other levels were reached. ``is_settled``: the
    result for the level that was waited for will not change."""

    missing: Mapping[Durability, str]
    is_settled: bool

    @property
    def durability(self) -> Durability:
        """The highest level on the node itself."""
        if Durability.MEMORY in self.missing:
            return Durability.NONE
        return Durability.MEMORY if Durability.LOCAL in self.missing else Durability.LOCAL

    @property
    def reason(self) -> str:
        """The reason why the node's own level is no higher."""
        return self.missing.get(Durability.MEMORY) or self.missing.get(Durability.LOCAL, "")


@dataclass(frozen=True)
class SharedWrites:
    """A shared tier, and the chunks that it is to have: ``writes`` write them to the ``target``."""

    copies: SharedCopies
    target: SharedTarget
    writes: Writes


class _Asked(NamedTuple):
    """A level's demand on one tier: to have ``chunks``, which are the whole chunks among the caller's ``own`` rows, and
    for OBJECT also all their ancestors."""

    shared: SharedWrites
    own: Sequence[int]
    chunks: Mapping[int, RowIdentity]


class _Reached(NamedTuple):
    """The result for one level: the reason why it was not reached (empty if it was), and whether that result is
    final."""

    reason: str
    is_settled: bool


class Levels:
    """Waits for levels. ``writes`` go to slower local tiers, ``shared`` to shared ones; ``absent`` says why configured
    tiers are not in use; ``proofs_end`` waits for the copies that a crash left and a store had proven anew (see
    ``Checks``).

    The chunks are not held meanwhile: they may leave, and their rows may be reused for other chunks, whose level says
    nothing of theirs. So the identity of each row at the start is kept, and compared after every wait.
    """

    def __init__(
        self, catalog: Catalog, names: ChunkNames, clock: Clock, writes: Sequence[Writes],
        shared: Sequence[SharedWrites], absent: Sequence[str],
        proofs_end: Callable[[str, Iterable[int], float], Awaitable[bool]],
    ) -> None:  # fmt: skip
        self._catalog = catalog
        self._table = catalog.table
        self._names = names
        self._clock = clock
        self._writes = writes
        self._shared = shared
        self._absent = absent
        self._proofs_end = proofs_end

    def check(self, level: Durability) -> None:
        """Raise InvalidRequest for a level beyond the node that no tier gives here."""
        if level in BEYOND and self._of(level) is None:
            raise InvalidRequest(f"durability {level.name}: {self._not_configured(level)}", durability=level.name)

    def _of(self, level: Durability) -> SharedWrites | None:
        """Return the fastest tier of a level, or None."""
        return next((each for each in self._shared if each.target.durability is level), None)

    def demand(self, rows: Sequence[int], level: Durability) -> None:
        """Have these chunks, and for OBJECT their ancestors, written to the tier of a level at once."""
        shared = self._of(level)
        if shared is not None:
            for row in self._chunks(shared, rows):
                shared.writes.demand(row)

    async def settle(self, rows: Sequence[int], wanted: Durability, timeout_s: float) -> LevelsReached:
        """Return the levels that all of these chunks have reached once ``wanted`` is reached or refused, at most
        ``timeout_s`` seconds from now. No other level is waited for, except the node's own where a level beyond it is
        refused. Tiers that are known to have all of the chunks are asked whether they still do, for as long as a lookup
        waits for them."""
        until = Deadline.of(self._clock, timeout_s, timeout_s)
        chunks = self._identified(rows)
        asks = {level: self._asked(shared, rows) for level in BEYOND if (shared := self._of(level)) is not None}
        asked = asks.get(wanted)
        beyond: dict[Durability, _Reached] = {}
        if asked is not None:
            beyond[wanted] = await self._reach(asked, until)
        is_waited_for = asked is None or bool(beyond[wanted].reason and beyond[wanted].is_settled)
        level, reason, is_settled = await self._local(chunks, until.left_s if is_waited_for else 0.0)
        others = [each for each in BEYOND if each not in beyond]
        known = await asyncio.gather(*(self._known(each, asks.get(each), until) for each in others))
        beyond.update(zip(others, known, strict=True))
        if not all(self._catalog.is_here(*each) for each in chunks.items()):  # a chunk left while tiers were asked
            level, reason = Durability.NONE, GONE
        elif level > Durability.MEMORY:
            level, reason = self._local_now(chunks)
        missing = {each: found.reason for each, found in beyond.items() if found.reason}
        if level < Durability.MEMORY:
            missing[Durability.MEMORY] = reason
        if level < Durability.LOCAL:
            missing[Durability.LOCAL] = reason
        return LevelsReached(missing, beyond[wanted].is_settled if asked is not None else is_settled)

    def _not_configured(self, level: Durability) -> str:
        said = f"no tier of this level is configured: set {LEVEL_SETTINGS[level]}"
        return "; ".join((said, *self._absent))

    def _identified(self, rows: Iterable[int]) -> dict[int, RowIdentity]:
        return {row: self._table.identity(row) for row in rows}

    def _asked(self, shared: SharedWrites, rows: Sequence[int]) -> _Asked:
        return _Asked(shared, rows, self._identified(self._chunks(shared, rows)))

    def _are_still(self, chunks: Mapping[int, RowIdentity]) -> bool:
        """Return True when each row is still the chunk that it was."""
        return all(self._table.identity(row) == identity for row, identity in chunks.items())

    # ------------------------------------------------------------ on the node

    async def _local(self, chunks: Mapping[int, RowIdentity], timeout_s: float) -> tuple[Durability, str, bool]:
        """Return the level that all of these have reached once a tier has them all, or every tier is through with them;
        the reason why it is no higher; and whether it will stay so."""
        if not self._writes:
            return Durability.MEMORY, self._not_configured(Durability.LOCAL), True
        found: list[tuple[Durability, str, bool]] = []
        highest = max(writes.target.durability for writes in self._writes)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._through(writes, chunks, timeout_s)) for writes in self._writes]
            for ended in asyncio.as_completed(tasks):
                found.append(await ended)
                if found[-1][0] == highest:  # do not wait for the other tiers: one may stall
                    break
            for task in tasks:
                task.cancel()
        level, reason, _ = max(found, key=lambda each: each[0])
        return level, reason, level == highest or all(is_settled for _, _, is_settled in found)

    async def _through(
        self, writes: Writes, chunks: Mapping[int, RowIdentity], timeout_s: float
    ) -> tuple[Durability, str, bool]:
        """Return the same for one tier, once it is through with its proofs and writes of these chunks."""
        until = Deadline.of(self._clock, timeout_s, timeout_s)
        is_proven = await self._proofs_end(writes.target.name, chunks, timeout_s)
        level, reason, is_through = await writes.settle(chunks, until.left_s)
        return level, reason, is_proven and is_through

    def _local_now(self, chunks: Mapping[int, RowIdentity]) -> tuple[Durability, str]:
        return max((writes.level(chunks) for writes in self._writes), key=lambda each: each[0])

    # ------------------------------------------------------------ beyond it

    async def _reach(self, asked: _Asked, until: Deadline) -> _Reached:
        """Demand these chunks of a tier, and wait until it has them or has refused them."""
        writes, chunks = asked.shared.writes, asked.chunks
        found = _Reached("", False)
        for _ in range(ROUND_COUNT):
            if not self._are_still(chunks):
                return _Reached(GONE, True)
            for row in chunks:
                writes.demand(row)
            is_through = await writes.through(chunks, until.left_s * PATIENCE)
            if not is_through:
                writes.insist(chunks)
                is_through = await writes.through(chunks, until.left_s)
            found = self._seen(asked, is_through=is_through)
            if found.reason:
                return found
            found = await self._confirmed(asked, until.left_s)
            if not found.reason or not found.is_settled:
                return found
        return found

    async def _known(self, level: Durability, asked: _Asked | None, until: Deadline) -> _Reached:
        """Return the result for a level that no caller waits for: whether the tier is known to have these chunks."""
        if asked is None:
            return _Reached(self._not_configured(level), True)
        found = self._seen(asked, is_through=True)
        if found.reason:
            return found
        return await self._confirmed(asked, min(until.left_s, asked.shared.copies.lookup_s_max))

    def _chunks(self, shared: SharedWrites, rows: Sequence[int]) -> list[int]:
        """Return the rows that the tier must have: the whole chunks among these, and for OBJECT all their ancestors."""
        found = [row for row in rows if shared.target.admits(row)]
        if shared.target.durability is not Durability.OBJECT:
            return found
        return [*self._above(found), *found]

    def _above(self, rows: Sequence[int]) -> Iterator[int]:
        """Yield the ancestors of these rows that are not among them."""
        seen = set(rows)
        for row in rows:
            parent = self._table.parents[row]
            while parent != ROOT_ROW and parent not in seen:
                seen.add(parent)
                yield parent
                parent = self._table.parents[parent]

    def _seen(self, asked: _Asked, *, is_through: bool) -> _Reached:
        """Return whether the tier was seen to have all of these, with the reason if not."""
        shared, own, chunks = asked
        name = shared.target.name
        if any(self._is_too_small(shared, row) for row in own):
            return _Reached(f"tiers.{name} takes no chunk as small as these: lower tiers.{name}.chunk_bytes_min", True)
        if chunks.keys().isdisjoint(own):
            return _Reached(self._why_none(own), True)
        if not self._are_still(chunks):
            return _Reached(GONE, True)
        for row in chunks:
            if not shared.target.is_proven(row):
                if not self._table.is_resident(row):
                    return _Reached(f"a chunk that it hangs on is neither in tiers.{name} nor on this node", is_through)
                return _Reached(self._why_not(shared, row), is_through)
        return _Reached("", True)

    def _is_too_small(self, shared: SharedWrites, row: int) -> bool:
        """Return True for a whole chunk that is too small for the tier: other nodes will not find it there."""
        space = self._catalog.space_of(row)
        if space.model_spec is None or not is_for_others(space):
            return False
        is_whole = self._table.token_counts[row] == space.spec.chunk_tokens
        return is_whole and not shared.copies.tier.takes(self._names.of(row).layout)

    def _why_none(self, rows: Sequence[int]) -> str:
        if not all(is_for_others(self._catalog.space_of(row)) for row in rows):
            return "values that may be replaced stay on their node"
        return "partial chunks stay on their node, and it has no whole one"

    def _why_not(self, shared: SharedWrites, row: int) -> str:
        writes, name = shared.writes, shared.target.name
        if writes.reason:
            return told_of(name, writes.reason)
        if row in writes:
            return f"tiers.{name} has not taken it yet"
        if reason := writes.parked.reason_of(row):
            return reason if reason == NO_ROOM else told_of(name, reason)
        if row in shared.copies:
            level = shared.target.durability.name
            return f"tiers.{name} says that it has it, and nobody has looked: ask for durability = {level}"
        return f"tiers.{name} was not given it (tiers.{name}.write = {shared.copies.write_policy})"

    async def _confirmed(self, asked: _Asked, timeout_s: float) -> _Reached:
        """Ask the tier whether it still has these chunks: a level is promised only on the tier's present word."""
        copies, name = asked.shared.copies, asked.shared.target.name
        until = Deadline.of(self._clock, timeout_s, timeout_s)
        chunks = [(row, identity, self._catalog.space_of(row)) for row, identity in asked.chunks.items()]
        gone = unknown = 0
        for start in range(0, len(chunks), PROBE_COUNT_MAX):
            part = chunks[start : start + PROBE_COUNT_MAX]
            keys = [self._names.key(space, digest) for _, (_, digest), space in part]
            if not copies.is_asked:
                return _Reached(f"tiers.{name} does not answer at present: it is left alone for a while", True)
            answers = await copies.ask(keys, until.left_s) if until.left_s > 0 else None
            if answers is None:
                return _Reached(f"tiers.{name} did not say in time that it still has it", until.left_s > 0)
            for (row, identity, _), is_there in zip(part, answers, strict=True):
                unknown += is_there is None
                if is_there is not None and not is_there:
                    gone += 1
                    if self._table.identity(row) == identity:
                        copies.take(row)
        if unknown and not gone:
            return _Reached(f"tiers.{name} did not say of {unknown} chunks that it still has them", until.left_s > 0)
        return _Reached(f"tiers.{name} dropped {gone} of {len(chunks)} chunks again" if gone else "", True)
