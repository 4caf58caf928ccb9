"""Lookups' questions to one shared tier. A lookup waits for its bound and goes on without the answer; its question
stays asked for a while. So a tier that answers late is told from one that answers nothing, and a late answer still
serves the next lookup."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from kvstore.movement.breaker import FAILURE_COUNT
from kvstore.seams import Clock
from kvstore.tiers.pace import Waits

LATE_COUNT_MAX = FAILURE_COUNT
"""Late questions that stay asked. That many without an answer are an outage, and more would be load on a slow tier."""
PROBE_COUNT_MAX = 1024
"""Keys of one question, at most."""
SILENT_BOUNDS = 10
"""Lookups ask nothing more of a tier that has left a question unanswered for so many times their bound. A busy Redis
answers within three of its bounds."""
SILENT_S_MAX = 1.0
"""Lookups ask again after so many seconds of silence at most, however long the bound."""

Answers = Sequence[bool | None] | None
"""A flag per key, None where the tier does not know; None: no answer."""


class Questions:
    """The questions to one tier that have no answer yet. ``bound_s``: how long a lookup waits for it."""

    def __init__(self, clock: Clock, bound_s: float) -> None:
        self._clock = clock
        self._bound_s = bound_s
        self._silence_s = min(SILENT_BOUNDS * bound_s, SILENT_S_MAX)
        self._waits = Waits(clock)
        self._patient: set[asyncio.Task[Answers]] = set()
        self._asked_s = float("-inf")

    @property
    def owes(self) -> bool:
        """True while the tier owes an answer for long and has given none meanwhile."""
        return self._waits.stalled_s() > self._silence_s

    @property
    def is_silent(self) -> bool:
        """True while no lookup waits for the tier: it owes an answer for long, and was asked again not long ago. One
        line that died hides a healthy tier no longer than that."""
        return self.owes and self._clock.monotonic() - self._asked_s < self._silence_s

    @property
    def may_be_late(self) -> bool:
        """True when the next question may stay asked beyond its lookup. One that may not must end with it, also in the
        tier, whose threads are few."""
        return len(self._patient) < LATE_COUNT_MAX

    def heard(self) -> None:
        """Record that the tier answered some call."""
        self._waits.answered()

    async def answer(
        self, question: Coroutine[Any, Any, Answers], timeout_s: float,
        late: Callable[[Sequence[bool | None]], None], *, is_patient: bool,
    ) -> Answers:  # fmt: skip
        """Return the answer. Raises TimeoutError where it takes longer than ``timeout_s``. Where the question
        ``is_patient`` (``may_be_late``), it stays asked then until it ends by itself, and ``late`` gets its answer."""
        self._asked_s = self._clock.monotonic()
        task = asyncio.get_running_loop().create_task(question)  # seam: a task of a call that may end before; ``close``
        if is_patient:
            self._patient.add(task)
        # A caller with more time than a lookup may ask for a thousand keys: its answer is not owed before.
        self._waits.began(task, max(0.0, timeout_s - self._bound_s - self._silence_s))
        task.add_done_callback(self._ended)
        try:
            await asyncio.wait([task], timeout=timeout_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if task.done():
            return task.result()
        if is_patient:
            task.add_done_callback(lambda ended: _hand_over(ended, late))
        else:
            task.cancel()
        raise TimeoutError

    def _ended(self, task: asyncio.Task[Answers]) -> None:
        self._waits.ended(task)
        self._patient.discard(task)

    async def close(self) -> None:
        """Give up all questions. Idempotent."""
        late = list(self._patient)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)


def _hand_over(ended: asyncio.Task[Answers], late: Callable[[Sequence[bool | None]], None]) -> None:
    if not ended.cancelled() and (answers := ended.result()) is not None:
        late(answers)


def in_questions(chains: Iterable[Sequence[bytes]]) -> list[list[list[bytes]]]:
    """Return chains in groups of ``PROBE_COUNT_MAX`` keys at most, each key once; a chain may go on in the next
    group."""
    groups: list[list[list[bytes]]] = []
    seen, room = set[bytes](), 0
    for chain in chains:
        fresh = [key for key in dict.fromkeys(chain) if key not in seen]
        seen.update(fresh)
        while fresh:
            if not room:
                groups.append([])
                room = PROBE_COUNT_MAX
            part, fresh = fresh[:room], fresh[room:]
            groups[-1].append(part)
            room -= len(part)
    return groups
