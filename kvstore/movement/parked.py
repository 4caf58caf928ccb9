"""Chunks that one tier did not take, and when they are tried again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from kvstore.seams import Clock

RETRY_S = 10.0


class ParkedChunks:
    """Rows that wait to be tried again, every ``RETRY_S`` seconds. While the tier is *away*, one of them is tried for
    all: a hundred thousand that are refused one by one would be work for nothing. Once the tier has that one,
    ``is_back`` is True, and all of them go."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rows: OrderedDict[int, str] = OrderedDict()  # a dict whose first rows left is slow to find its first
        self._due_s = float("-inf")
        self._probe: int | None = None
        self.is_away = False
        """True when the tier did not answer for the last chunk that it was given, or takes no writes."""
        self.is_back = False
        """True when the tier has the chunk that was tried for all, until ``take_all``."""

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def are_due(self) -> bool:
        """True when chunks wait, and the tier had some time."""
        return bool(self._rows) and self._clock.monotonic() >= self._due_s

    def put(self, row: int, reason: str) -> None:
        """Have a chunk tried again later. ``reason``: why it was not taken."""
        if not self._rows:
            self._due_s = self._clock.monotonic() + RETRY_S
        self._rows[row] = reason

    def reason_of(self, row: int) -> str:
        """Return why the tier did not take a chunk that waits; empty for any other chunk."""
        return self._rows.get(row, "")

    def has_taken(self, row: int) -> None:
        """Record that the tier took a chunk, or turned out to have it."""
        self.is_away = False
        self.is_back = self.is_back or row == self._probe
        self._probe = None if row == self._probe else self._probe

    def forget(self, row: int) -> None:
        self._rows.pop(row, None)

    def take_all(self) -> OrderedDict[int, str]:
        """Return all of them, the oldest first. They are parked no more."""
        rows, self._rows, self.is_back = self._rows, OrderedDict(), False
        return rows

    def probes(self) -> Iterator[int]:
        """Return chunks to try for all, the oldest first, until the caller has one that can be tried. Each is parked no
        more. The next ones are due later. Where none is left the tier counts as away no more."""
        self._due_s = self._clock.monotonic() + RETRY_S
        while self._rows:
            self._probe, _ = self._rows.popitem(last=False)
            yield self._probe
        self.is_away = False
