"""Chunks that are left to other nodes, which say that they write them, and when they are looked for again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from heapq import heappop, heappush

from kvstore.catalog import ChunkTable, RowIdentity
from kvstore.seams import Clock

LEFT_S_MAX = 20.0
"""A chunk that another node claims to write for more seconds than this is written here, too: longer than any claim."""
SOON_S, LATER_S = 0.1, 2.0
"""Seconds after which a chunk that is left to another node is looked for again: first SOON_S, then twice as long each
time, up to LATER_S. Where a tier bills each request a fixed pause costs too much."""


@dataclass(slots=True)
class _Left:
    """``since_s``: the time since when the chunk is left; -inf: we no longer wait for other nodes. ``pause_s``: seconds
    until it is looked for the next time."""

    identity: RowIdentity
    since_s: float
    pause_s: float = SOON_S


class LeftChunks:
    """The chunks that one tier lacks and other nodes say they write, by row. A chunk may leave all tiers meanwhile, and
    its row be another's: that one is not left."""

    def __init__(self, clock: Clock, table: ChunkTable) -> None:
        self._clock = clock
        self._table = table
        self._rows: dict[int, _Left] = {}
        self._due: list[tuple[float, int]] = []
        """A heap: the time at which each row is looked for again."""
        self._has_due = asyncio.Event()

    def __contains__(self, row: int) -> bool:
        return row in self._rows and self._rows[row].identity == self._table.identity(row)

    def add(self, row: int) -> None:
        """Leave a chunk to other nodes from now on."""
        self._rows[row] = _Left(self._table.identity(row), self._clock.monotonic())

    def may_wait(self, row: int) -> bool:
        """Return True while another node that says it writes this chunk is still believed."""
        return self._clock.monotonic() - self._rows[row].since_s < LEFT_S_MAX

    def insist(self, row: int) -> None:
        """Believe no other node about a chunk: a request waits for it, and has little time left."""
        self._rows[row] = _Left(self._table.identity(row), float("-inf"))

    def hurry(self, row: int) -> None:
        """Look for a chunk soon, and often at first: a request waits for it."""
        self._rows[row].pause_s = SOON_S

    def look_later(self, row: int) -> None:
        """Have a chunk looked for again after its pause; the next pause is longer."""
        left = self._rows[row]
        heappush(self._due, (self._clock.monotonic() + left.pause_s, row))
        left.pause_s = min(2 * left.pause_s, LATER_S)
        self._has_due.set()

    def forget(self, row: int) -> None:
        self._rows.pop(row, None)

    async def due(self) -> list[int]:
        """Wait until chunks are looked for again, and return the rows to look for: perhaps none yet."""
        await self._has_due.wait()
        await self._clock.sleep(SOON_S)
        now_s, due = self._clock.monotonic(), []
        while self._due and self._due[0][0] <= now_s:
            due.append(heappop(self._due)[1])
        if not self._due:
            self._has_due.clear()
        return due
