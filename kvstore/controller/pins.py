"""Pins: an operator keeps chunks where they are, and all that they hang on, until the pin ends. No session owns one."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from kvstore.catalog import ROOT_ROW, Catalog
from kvstore.config import LimitSettings
from kvstore.errors import Exhausted
from kvstore.seams import Clock

EXPIRED_AT_ONCE = 64
"""So many pins end in one step of the loop, which takes some 1 ms."""
STALE_COUNT_MAX = 1024
FOR_EVER = float("inf")


class Pins:
    """The pins of one tenant, by row. A row is *kept* while it is pinned or a kept row hangs on it: it is held, and so
    stays that chunk's. Pins end with the process."""

    def __init__(self, catalog: Catalog, limits: LimitSettings, clock: Clock) -> None:
        self._catalog = catalog
        self._table = catalog.table
        self._limits = limits
        self._clock = clock
        self._until_s: dict[int, float] = {}
        self._ends: list[tuple[float, int]] = []
        """A heap of (end, row). It keeps pins that have ended or were set anew until their turn comes."""
        self._kept: dict[int, int] = {}
        """Row -> how many reasons keep it: its own pin, and each kept row that hangs on it."""
        self._above: dict[int, int] = {}
        """Row -> its parent when it came to be kept: a chain may grow upwards later."""
        self._bytes: dict[int, int] = {}
        self.byte_count = 0

    def __len__(self) -> int:
        return len(self._until_s)

    def __contains__(self, row: int) -> bool:
        """Return True when the row was pinned itself."""
        return row in self._until_s

    def is_kept(self, row: int) -> bool:
        """Return True when a pin holds the row."""
        return row in self._kept

    def rows(self) -> list[int]:
        """The rows that were pinned by name, without those above them."""
        return list(self._until_s)

    def until_s(self, row: int) -> float | None:
        """Return the time at which the row's pin ends; None where it has none."""
        return self._until_s.get(row)

    def check(self, more_bytes: int) -> None:
        """Raises Exhausted where so many bytes more would be past limits.pin_bytes_max."""
        if self.byte_count + more_bytes > self._limits.pin_bytes_max:
            raise Exhausted(
                f"pins would keep {self.byte_count + more_bytes} bytes: unpin some, or raise limits.pin_bytes_max "
                f"({self._limits.pin_bytes_max})"
            )

    def above(self, row: int) -> list[int]:
        """A row, and those above it up to the first that is kept: what a pin would come to keep."""
        found = []
        while row != ROOT_ROW and row not in self._kept:
            found.append(row)
            row = self._table.parents[row]
        return found

    def pin(self, row: int, seconds: float) -> None:
        """Pin one row for so long; 0: until it is unpinned. A second pin takes the place of the first. Raises
        Exhausted."""
        self.check(sum(map(self._size, self.above(row))))
        if row not in self._until_s:
            self._keep(row)
        self._set(row, self._clock.monotonic() + seconds if seconds else FOR_EVER)

    def _set(self, row: int, until_s: float) -> None:
        self._until_s[row] = until_s
        if until_s == FOR_EVER:
            return
        heappush(self._ends, (until_s, row))
        if len(self._ends) > STALE_COUNT_MAX + 2 * len(self._until_s):  # the same rows were pinned again and again
            self._ends = [(end_s, each) for each, end_s in self._until_s.items() if end_s < FOR_EVER]
            heapify(self._ends)

    def unpin(self, row: int) -> bool:
        """End a row's pin. False where there was none."""
        if self._until_s.pop(row, None) is None:
            return False
        self._leave(row)
        return True

    def restore(self, row: int, until_s: float | None) -> None:
        """Have the pin of a row that is pinned end when it did before it was pinned anew; None: now."""
        if until_s is None:
            self.unpin(row)
        elif row in self._until_s:
            self._set(row, until_s)

    async def sweep(self) -> None:
        """End all pins whose time is over, and answer others in between."""
        while self.expire():
            await self._clock.sleep(0)

    def expire(self) -> bool:
        """End some pins whose time is over. True when there are more, which another step ends."""
        now_s = self._clock.monotonic()
        for _ in range(EXPIRED_AT_ONCE):
            if not self._ends or self._ends[0][0] > now_s:
                return False
            until_s, row = heappop(self._ends)
            if self._until_s.get(row) == until_s:  # else it was pinned anew, or unpinned
                self.unpin(row)
        return True

    def _size(self, row: int) -> int:
        return self._catalog.space_of(row).known_bytes(self._table.token_counts[row])

    def _keep(self, row: int) -> None:
        while row != ROOT_ROW:
            self._kept[row] = self._kept.get(row, 0) + 1
            if self._kept[row] > 1:
                return
            self._table.hold(row)
            self._bytes[row] = self._size(row)
            self.byte_count += self._bytes[row]
            row = self._above.setdefault(row, self._table.parents[row])

    def _leave(self, row: int) -> None:
        while row != ROOT_ROW:
            self._kept[row] -= 1
            if self._kept[row]:
                return
            del self._kept[row]
            above = self._above.pop(row)
            self.byte_count -= self._bytes.pop(row)
            self._catalog.unhold(row)
            row = above
