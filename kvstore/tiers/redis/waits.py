"""For how long a server has answered nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvstore.seams import Clock


class Waits:
    """Calls that wait for an answer, with when each began, and when one was last answered. One that is given up was
    not answered."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_s: dict[object, float] = {}
        self._answered_s = float("-inf")

    def began(self, call: object) -> None:
        """Count a call that waits from now on."""
        self._began_s[call] = self._clock.monotonic()

    def answered(self) -> None:
        """Take note that the server said something. A refusal is an answer, too."""
        self._answered_s = self._clock.monotonic()

    def ended(self, call: object) -> None:
        """Count a call that waits no longer."""
        del self._began_s[call]

    @contextmanager
    def asked(self) -> Iterator[Callable[[], None]]:
        """While a call waits. It calls what it is given when it was answered."""
        call = object()
        self.began(call)
        try:
            yield self.answered
        finally:
            self.ended(call)

    def stalled_s(self) -> float:
        """Seconds since the oldest call began, or since one was answered, if that was later; 0 without any."""
        if not self._began_s:
            return 0.0
        return self._clock.monotonic() - max(next(iter(self._began_s.values())), self._answered_s)
