"""Keeps a stalled sidecar from stalling the engine: after a call that took long, no calls are made for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvstore.seams import Clock

SLOW_S = 2.0
PAUSE_S = 10.0


@dataclass
class Watched:
    """A call that is timed. ``more_s`` may be changed until it has ended."""

    more_s: float


class CallPause:
    """The pause of calls by one side of an engine. A sidecar that is gone fails at once, and causes no pause."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_s = 0.0

    @property
    def is_spent(self) -> bool:
        """True while no calls are made."""
        return self._clock.monotonic() < self._until_s

    @contextmanager
    def watch(self, more_s: float = 0.0) -> Iterator[Watched]:
        """Time a call that waits for the sidecar. ``more_s``: seconds that it may take beyond ``SLOW_S``."""
        started_s, watched = self._clock.monotonic(), Watched(more_s)
        try:
            yield watched
        finally:
            self.took(self._clock.monotonic() - started_s - watched.more_s)

    def took(self, seconds: float) -> None:
        """Begin a pause when a call took longer than ``SLOW_S``."""
        if seconds > SLOW_S:
            self.end()

    def end(self) -> None:
        """Begin a pause: a call took too long, or still does."""
        self._until_s = self._clock.monotonic() + PAUSE_S
