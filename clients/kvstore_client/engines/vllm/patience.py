"""A sidecar that stalls must not stall the engine: after a call that took long there is none for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.seams import Clock

SLOW_S = 2.0
PAUSE_S = 10.0


class Patience:
    """Of one side of an engine. A sidecar that is gone answers at once, and costs no pause."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_s = 0.0

    @property
    def is_spent(self) -> bool:
        """Whether the sidecar is left alone for now."""
        return self._clock.monotonic() < self._until_s

    @contextmanager
    def watch(self, more_s: float = 0.0) -> Iterator[None]:
        """Around a call that waits for the sidecar. ``more_s``: what it may take beyond ``SLOW_S``."""
        started_s = self._clock.monotonic()
        try:
            yield
        finally:
            if self._clock.monotonic() - started_s > SLOW_S + more_s:
                self.end()

    def end(self) -> None:
        """A call took too long, or still does."""
        self._until_s = self._clock.monotonic() + PAUSE_S
