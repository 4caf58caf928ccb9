"""A shared tier as this node sees it: whether it answers, and the chunks that it is said or seen to have."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from kvstore.catalog import Catalog, Namespace
from kvstore.errors import DeadlineExceeded, Exhausted, Unavailable
from kvstore.movement.breaker import Breaker, told_of
from kvstore.movement.questions import Questions
from kvstore.movement.sources import STALL_S
from kvstore.seams import Clock
from kvstore.telemetry import Counters
from kvstore.tiers import PART, SharedUse, TierStatistics, UploadState, WritePolicy

DOUBTS_PER_BOUND = 10
"""Lookups wait so many times shorter for a tier that may stand still: of a hundred more than one may ask it again."""
BAD_COUNT_MAX = 65_536
SILENT = "no answer at present: it is left alone for a while"
REUSED = 2
"""The number of uses at which a chunk counts as reused."""
Answer = TypeVar("Answer")
_log = logging.getLogger("kvstore.movement")


class SharedCopies:
    """One shared tier and its copies, in two bits per row of the catalog's column. *Said*: the tier, or a read that has
    not ended, says that the copy is there. *Seen*: it was written there, or read whole."""

    def __init__(self, use: SharedUse, catalog: Catalog, clock: Clock, counters: Counters, rank: int) -> None:
        self.tier = use.tier
        self.lookup_s_max = use.lookup_s_max
        self.piece_bytes_max = use.piece_bytes_max
        self.write_policy = WritePolicy(use.write)
        self.ends_with_us = use.ends_with_us
        self.rank = rank
        self.clock = clock
        self.breaker = Breaker(use.tier.name, clock)
        self._questions = Questions(clock, use.lookup_s_max)
        self.bad: OrderedDict[bytes, None] = OrderedDict()
        """Storage keys of copies that failed their check there, and were not written anew since."""
        self._column = catalog.table.shared
        self.said_bit, self._seen = catalog.table.new_shared_bits()
        """``said_bit`` is set in the catalog's column in the rows of chunks that the tier is said to have."""
        self._counters = counters

    def __contains__(self, row: int) -> bool:
        return bool(self._column[row] & self.said_bit)

    def is_seen(self, row: int) -> bool:
        """Return True when the copy was seen: more than the tier's word says that it is there."""
        return bool(self._column[row] & self._seen)

    def put(self, row: int) -> None:
        """Record that the tier says that it has the chunk."""
        self._column[row] |= self.said_bit

    def see(self, row: int) -> None:
        """Record that the tier has the chunk: it was written there, or read."""
        self._column[row] |= self.said_bit | self._seen

    def take(self, row: int) -> None:
        """Record that the tier does not have the chunk."""
        self._column[row] &= ~(self.said_bit | self._seen)

    def doubt(self, row: int) -> None:
        """Record that no promise may rest on the copy before it was read again."""
        self._column[row] &= ~self._seen

    def is_bad(self, storage_key: bytes) -> None:
        """Record that the copy there failed its check: it is no reason not to write the chunk."""
        self.bad[storage_key] = None
        if len(self.bad) > BAD_COUNT_MAX:
            self.bad.popitem(last=False)

    @property
    def is_asked(self) -> bool:
        """True when the tier answers, as far as we know; only then is it asked."""
        return not self.breaker.is_open and self.tier.stalled_s() <= STALL_S

    @property
    def is_asked_by_lookups(self) -> bool:
        """True when lookups may wait for the tier: it is asked, and does not owe an answer for long."""
        return self.is_asked and not self._questions.is_silent

    @property
    def lookup_s(self) -> float:
        """The seconds that a lookup waits for the tier's answer, at most. Of a tier that has not answered for long it
        finds out whether it is there again; an answer that comes later says so, too."""
        is_in_doubt = self.breaker.is_in_doubt or self._questions.owes
        return self.lookup_s_max / DOUBTS_PER_BOUND if is_in_doubt else self.lookup_s_max

    @property
    def problem(self) -> str:
        """The reason why the tier is of no use at present, with its name; empty while it is of use."""
        found = self.statistics()
        return told_of(self.tier.name, found.reason) if found.state == "failing" else ""

    def failed(self, error: BaseException, reason: str) -> None:
        """Count a call that failed, unless that says nothing of the tier: a limit of our own, or a part of the
        engine."""
        if not isinstance(error, Exhausted) and not part_in(error):
            self.breaker.failed(reason)

    def worked(self) -> None:
        """Count a call that the tier answered."""
        self.breaker.worked()
        self._questions.heard()

    async def ask(
        self, keys: Sequence[bytes], timeout_s: float, chains: Sequence[int] = (),
        late: Callable[[Sequence[bool | None]], None] = lambda _: None,
    ) -> Sequence[bool | None] | None:  # fmt: skip
        """Return a flag per key: True when the tier says that it has the chunk, None where it does not know.
        ``chains``: see ``SharedTier.probe``. None: no answer in time. ``late`` gets an answer that comes after
        ``timeout_s``: that is counted, but is no failure of the tier. Silence for STALL_S is one."""
        is_patient = self._questions.may_be_late
        patience_s = max(STALL_S, timeout_s) if is_patient else timeout_s
        question = self._answered(
            keys, patience_s, lambda: self.tier.probe(keys, patience_s, chains), is_failure=is_patient
        )
        try:
            return await self._questions.answer(question, timeout_s, late, is_patient=is_patient)
        except TimeoutError:
            self._counters.add_of(self.tier.name, "late_answers")
            return None

    async def claim(self, keys: Sequence[bytes], claim_s: float, timeout_s: float) -> Sequence[UploadState] | None:
        """As ``ask``, by a node that is about to write these chunks: see ``SharedTier.claim``. A late answer is
        lost."""
        return await self._answered(keys, timeout_s, lambda: self.tier.claim(keys, claim_s, timeout_s))

    async def _answered(
        self, keys: Sequence[bytes], timeout_s: float, asked: Callable[[], Awaitable[Sequence[Answer]]], *,
        is_failure: bool = True,
    ) -> Sequence[Answer] | None:  # fmt: skip
        """Return the answers; None without. ``is_failure``: that it took ``timeout_s`` may be a failure of the tier,
        where that is long."""
        name = self.tier.name
        self._counters.add_of(name, "asked_chunks", len(keys))
        try:
            async with asyncio.timeout(timeout_s):
                answers = list(await asked())
            if len(answers) != len(keys):
                raise Unavailable(f"{len(answers)} answers for {len(keys)} keys")
        except (TimeoutError, DeadlineExceeded):
            if is_failure and self._questions.owes:
                self.breaker.failed(f"tiers.{name} has not answered for {timeout_s:g} s")
            else:
                self._counters.add_of(name, "late_answers")
            return None
        except Exception as error:  # noqa: BLE001 - the boundary: what an engine does fails no lookup
            reason = reason_of(error)
            if reason != self.breaker.reason:  # the same outage is told once
                _log.warning("a shared tier could not be asked", extra={"tier": name, "reason": reason})
            self.breaker.failed(reason)
            return None
        self.worked()
        return answers

    async def close(self) -> None:
        """Ask nothing more, and close the tier. Raises the tier's errors."""
        await self._questions.close()
        await self.tier.close()

    def statistics(self) -> TierStatistics:
        """Return the tier's account; its state is "failing" while the tier is not asked, and until it has answered."""
        found = replace(self.tier.statistics(), is_shared=True)
        if not self._is_away:
            return found
        return replace(found, state="failing", reason=self.breaker.reason or found.reason or SILENT)

    def failing_since_s(self) -> float | None:
        """Return the time since when the tier does not answer; None while it does."""
        if not self._is_away:
            return None
        in_doubt = self.breaker.is_in_doubt
        return self.breaker.failing_since_s if in_doubt else self.clock.monotonic() - self.tier.stalled_s()

    @property
    def _is_away(self) -> bool:
        return self.breaker.is_in_doubt or not self.is_asked


def reason_of(error: BaseException) -> str:
    """Return an error's words, or its name where it has none."""
    return str(error) or type(error).__name__


def part_in(error: BaseException) -> dict[str, object]:
    """Return the field of an error which says that only a part of the engine failed; nothing for any other error."""
    return {PART: True} if PART in getattr(error, "fields", ()) else {}


def is_for_others(space: Namespace) -> bool:
    """Return True when chunks of this namespace go to shared tiers and come from them."""
    return not space.may_be_replaced
