"""Moves that wait for their turn: one queue per target tier."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from enum import IntEnum
from typing import NamedTuple

from kvstore.catalog import RowIdentity

QUEUE_COUNT_MAX = 65_536
"""Moves that wait for one tier, or are on their way there, at most."""
IN_FLIGHT_BYTES_MAX = 512 << 20
"""Bytes that are on their way to one tier at once, at most."""


class Priority(IntEnum):
    """The urgency of a move. INTERACTIVE: a request waits for it; STANDARD: no request waits yet; BATCH: none will."""

    INTERACTIVE = 0
    STANDARD = 1
    BATCH = 2


class Waiting(NamedTuple):
    """Moves to one tier: those that wait, by their priority, and those on their way."""

    interactive: int = 0
    standard: int = 0
    batch: int = 0
    moving: int = 0


class MoveQueue:
    """Rows that are to be moved to one tier, by priority and then by age; one move per row at a time. A row that is set
    aside waits until ``resume``. The chunk of a row may leave all tiers while it waits, and the row be another's: that
    one does not wait, and is not ``in`` the queue; ``take`` still returns the row, so that callers that wait for the
    first chunk are told.

    Bounded: ``add`` refuses past ``QUEUE_COUNT_MAX``, and ``take`` hands out no more than ``IN_FLIGHT_BYTES_MAX`` at
    once (one move always). Runs on the event loop's thread.
    """

    def __init__(self, byte_count_of: Callable[[int], int], identity_of: Callable[[int], RowIdentity]) -> None:
        self._byte_count_of = byte_count_of
        self._identity_of = identity_of
        self._chunks: dict[int, RowIdentity] = {}
        """The chunks of all rows below."""
        self._waiting: dict[Priority, OrderedDict[int, None]] = {priority: OrderedDict() for priority in Priority}
        """Ordered dicts: a dict whose first rows were taken is walked from its first place on each time."""
        self._aside: dict[int, Priority] = {}
        self._moving: dict[int, int] = {}
        self._moving_bytes = 0
        self._lanes: dict[asyncio.Future[None], Collection[Priority]] = {}
        """The callers of ``take`` that wait, the first one first, with their classes."""

    def __len__(self) -> int:
        """Count the moves that wait, are set aside, or are on their way."""
        return sum(map(len, self._waiting.values())) + len(self._aside) + len(self._moving)

    def counts(self) -> Waiting:
        """Count the moves by priority; those that are set aside wait, too."""
        aside = Counter(self._aside.values())
        interactive, standard, batch = (len(self._waiting[each]) + aside[each] for each in Priority)
        return Waiting(interactive, standard, batch, len(self._moving))

    def __contains__(self, row: int) -> bool:
        return row in self._chunks and self._chunks[row] == self._identity_of(row)

    def add(self, row: int, priority: Priority = Priority.STANDARD) -> bool:
        """Queue a row; a row that waits already is raised to ``priority``. False when the queue is full: ask again
        later."""
        identity = self._identity_of(row)
        if self._chunks.get(row, identity) != identity:
            self.cancel([row])
        if row in self._aside:
            self._aside[row] = min(priority, self._aside[row])
            return True
        for other, rows in self._waiting.items():
            if row in rows:
                if priority < other:
                    del rows[row]
                    self._waiting[priority][row] = None
                    self._wake()  # callers that take no row of the lower class may take this one now
                return True
        if len(self) >= QUEUE_COUNT_MAX:
            return False
        self._waiting[priority][row] = None
        self._chunks[row] = identity
        self._wake()
        return True

    def cancel(self, rows: Iterable[int]) -> None:
        """Drop rows that wait: no caller wants them moved any more. Moves on their way go on."""
        for row in rows:
            self._aside.pop(row, None)
            for waiting in self._waiting.values():
                waiting.pop(row, None)
            if row not in self._moving:
                self._chunks.pop(row, None)
        self._wake()  # the first row may have been too large for now

    def set_aside(self, row: int, priority: Priority) -> None:
        """End a move that did not begin: it waits aside until it is resumed."""
        self.done(row)
        self.cancel([row])
        self._aside[row] = priority
        self._chunks[row] = self._identity_of(row)

    def is_aside(self, row: int) -> bool:
        """Return True when the row waits to be resumed."""
        return row in self._aside

    def resume(self, rows: Iterable[int]) -> None:
        """Queue again those of these rows that are aside, behind the rows that wait."""
        for row in rows:
            priority = self._aside.pop(row, None)
            if priority is not None:
                self._waiting[priority][row] = None
        self._wake()

    def waiting(self) -> Iterator[int]:
        """Return the rows whose chunks wait, in the order in which they go."""
        return (row for row in self._ordered(Priority) if row in self)

    async def take(self, classes: Collection[Priority] = tuple(Priority)) -> int:
        """Return the next row of these classes, as soon as its bytes may be on their way. ``done`` ends its move."""
        try:
            while (row := self._next(classes)) is None:
                self._wake()
                await self._woken(classes)
            for waiting in self._waiting.values():
                waiting.pop(row, None)
            self._moving[row] = self._byte_count_of(row)
            self._moving_bytes += self._moving[row]
            return row
        finally:
            self._wake()

    async def _woken(self, classes: Collection[Priority]) -> None:
        """Wait until ``_wake`` chooses this caller."""
        lane = asyncio.get_running_loop().create_future()
        self._lanes[lane] = classes
        try:
            await lane
        finally:
            del self._lanes[lane]

    def _wake(self) -> None:
        """Wake the first caller of ``take`` that waits and may go on. One is woken at a time: when it has taken its
        row, takes none, or is cancelled, it wakes the next one. So a row wakes one caller, and not all of them."""
        if not any(lane.done() for lane in self._lanes):
            for lane, classes in self._lanes.items():
                if self._next(classes) is not None:
                    lane.set_result(None)
                    return

    def _next(self, classes: Iterable[Priority]) -> int | None:
        """Return the first row of these classes, unless its bytes are too many for now."""
        row = next(self._ordered(classes), None)
        if row is None or not self._moving:
            return row
        return row if self._moving_bytes + self._byte_count_of(row) <= IN_FLIGHT_BYTES_MAX else None

    def _ordered(self, classes: Iterable[Priority]) -> Iterator[int]:
        """Return the rows that wait and are not on their way already, in the order in which they go."""
        return (row for priority in classes for row in self._waiting[priority] if row not in self._moving)

    def done(self, row: int) -> None:
        """End a move, whether it worked or not."""
        self._moving_bytes -= self._moving.pop(row)
        if row not in self._aside and not any(row in each for each in self._waiting.values()):
            self._chunks.pop(row, None)
        self._wake()
