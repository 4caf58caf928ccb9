"""Pins: an operator keeps chunks and their ancestors where they are until the pin ends. No session owns a pin."""

from __future__ import annotations

import logging
from collections import defaultdict
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Any

from kvstore.catalog import ROOT_ROW, Catalog, Namespace
from kvstore.config import LimitSettings
from kvstore.errors import Exhausted, InvalidRequest
from kvstore.planning.kept import KeptForm
from kvstore.seams import Clock

EXPIRED_AT_ONCE = 64
"""Pins that end in one step of the loop, which takes some 1 ms."""
STALE_COUNT_MAX = 1024
FOR_EVER = float("inf")
KEPT_COUNT_MAX = 4096
"""Pins of a tenant that a restart keeps, those that were set first: to pack so many takes 3 ms, in which the service
answers nobody."""
END_MAX = 1 << 40
VERSION = 1
FORM = KeptForm("kvstore-pins", VERSION, "pins", "pins")
_log = logging.getLogger("kvstore.controller")


class Pins:
    """The pins of one tenant, by row. A row is *kept* while it is pinned or one of its children is kept. A kept row is
    held, so it is not reused for another chunk."""

    def __init__(self, catalog: Catalog, limits: LimitSettings, clock: Clock) -> None:
        self._catalog = catalog
        self._table = catalog.table
        self._limits = limits
        self._clock = clock
        self._until_s: dict[int, float] = {}
        self._ends: list[tuple[float, int]] = []
        """A heap of (end, row). Pins that ended early or were set anew stay in it until their old end comes."""
        self._kept: dict[int, int] = {}
        """Row -> number of reasons that keep it: its own pin, and each kept child."""
        self._above: dict[int, int] = {}
        """Row -> its parent at the time when it was first kept: a chain may grow upwards later."""
        self._bytes: dict[int, int] = {}
        self.byte_count = 0
        self.is_changed = False
        """True when a pin was set or ended since ``pack`` was last called."""

    def __len__(self) -> int:
        return len(self._until_s)

    def __contains__(self, row: int) -> bool:
        """True when the row itself is pinned."""
        return row in self._until_s

    def is_kept(self, row: int) -> bool:
        """True when a pin, its own or a descendant's, holds the row."""
        return row in self._kept

    def rows(self) -> list[int]:
        """Return the rows that are pinned themselves, without their ancestors."""
        return list(self._until_s)

    def until_s(self, row: int) -> float | None:
        """Return the monotonic time at which the row's pin ends; None: it is not pinned."""
        return self._until_s.get(row)

    def check(self, more_bytes: int) -> None:
        """Raises Exhausted where ``more_bytes`` more would exceed limits.pin_bytes_max."""
        if self.byte_count + more_bytes > self._limits.pin_bytes_max:
            raise Exhausted(
                f"pins would keep {self.byte_count + more_bytes} bytes: unpin some, or raise limits.pin_bytes_max "
                f"({self._limits.pin_bytes_max})"
            )

    def above(self, row: int) -> list[int]:
        """Return the rows that a pin of ``row`` would newly keep: the row and its ancestors, up to the first kept
        one."""
        found = []
        while row != ROOT_ROW and row not in self._kept:
            found.append(row)
            row = self._table.parents[row]
        return found

    def pin(self, row: int, seconds: float) -> None:
        """Pin one row for ``seconds``; 0: until it is unpinned. A second pin replaces the first. Raises Exhausted past
        limits.pin_bytes_max."""
        self.check(sum(map(self._catalog.known_bytes, self.above(row))))
        if row not in self._until_s:
            self._keep(row)
        self._set(row, self._clock.monotonic() + seconds if seconds else FOR_EVER)

    def _set(self, row: int, until_s: float) -> None:
        self._until_s[row] = until_s
        self.is_changed = True
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
        self.is_changed = True
        self._leave(row)
        return True

    def restore(self, row: int, until_s: float | None) -> None:
        """Undo a pin that was set anew: have it end at ``until_s`` again; None: it was not pinned before, unpin it."""
        if until_s is None:
            self.unpin(row)
        elif row in self._until_s:
            self._set(row, until_s)

    async def sweep(self) -> None:
        """End all pins whose time is over, in steps between which others are answered."""
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

    # ------------------------------------------------------------ over restarts

    def pack(self) -> bytes:
        """Return the pins as ``unpack`` reads them: per namespace digests, and the seconds since 1970 at which each pin
        ends, 0 for those that have no end."""
        self.is_changed = False
        wall_s = self._clock.wall() - self._clock.monotonic()
        found: dict[str, list[str]] = defaultdict(list)
        for row, until_s in islice(self._until_s.items(), KEPT_COUNT_MAX):
            end = 0 if until_s == FOR_EVER else int(wall_s + until_s) + 1
            found[_name_of(self._catalog.space_of(row))].append(f"{self._table.digests[row].hex()} {end}")
        return FORM.pack(found)

    def unpack(self, data: bytes) -> None:
        """Set the pins of an earlier start anew, for the chunks that the tiers in use have kept. Raises InvalidRequest
        saying what is wrong with ``data``."""
        found = {name: _pins_of(texts) for name, texts in FORM.unpack(data).items()}
        try:
            for space in self._catalog.spaces.numbered:
                for digest, end in found.get(_name_of(space), ()):
                    row, rest_s = space.index.get(digest), end - self._clock.wall()
                    if row is not None and (not end or rest_s > 0):
                        self.pin(row, rest_s if end else 0)
        except Exhausted as error:
            _log.warning("some pins ended with the last start", extra={"reason": error.message})
        has_tiers = len(self._table.copies) > 1  # a device that is off for one start takes no pins with it
        self.is_changed = has_tiers and len(self) != sum(map(len, found.values()))

    # ------------------------------------------------------------ what is kept

    def _keep(self, row: int) -> None:
        while row != ROOT_ROW:
            self._kept[row] = self._kept.get(row, 0) + 1
            if self._kept[row] > 1:
                return
            self._table.hold(row)
            self._bytes[row] = self._catalog.known_bytes(row)
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


def _name_of(space: Namespace) -> str:
    return f"{space.fingerprint.hex()} {space.provenance} {space.exactness}"


def _pins_of(texts: Any) -> list[tuple[bytes, int]]:
    """Return the digests and ends that ``pack`` wrote. Raises InvalidRequest."""
    try:
        pins = [(bytes.fromhex(digest), int(end)) for digest, end in map(str.split, texts)]
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"a pin cannot be read: {error}") from error
    if not all(0 <= end <= END_MAX for _, end in pins):
        raise InvalidRequest("a pin's end is no time")
    return pins
