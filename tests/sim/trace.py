"""What happened, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import xxhash

TOLD = 60


class SimulationFailure(AssertionError):
    """The service broke a promise."""


class Trace:
    """Lines of (time, who, what). Only the last ones are kept; the digest is of all."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._digest = xxhash.xxh3_128()
        self.last: deque[str] = deque(maxlen=TOLD)
        self.count = 0
        self.failure: BaseException | None = None
        self.echo = False

    def add(self, who: str, what: str) -> None:
        line = f"{self._now():12.6f} {who:<10} {what}"
        self._digest.update(line.encode())
        self.last.append(line)
        self.count += 1
        if self.echo:
            print(line)

    def fail(self, what: str) -> SimulationFailure:
        """Record a broken promise, also where the service would swallow what is raised. The caller raises it."""
        self.add("FAILURE", what)
        error = SimulationFailure(what)
        self.failure = self.failure or error
        return error

    def check(self, holds: object, what: str) -> None:
        if not holds:
            raise self.fail(what)

    def digest(self, more: str = "") -> str:
        self._digest.update(more.encode())
        return str(self._digest.hexdigest())
