"""Measures for how long a server has answered no call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvstore.seams import Clock


class Waits:
    """The calls that wait for an answer, each with when it began, and the time of the last answer. Giving up a call is
    no answer."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_s: dict[object, float] = {}
        self._answered_s = float("-inf")

    def began(self, call: object) -> None:
        """Count a call that waits from now on."""
        self._began_s[call] = self._clock.monotonic()

    def answered(self) -> None:
        """Record that the server replied. A refusal is an answer, too."""
        self._answered_s = self._clock.monotonic()

    def ended(self, call: object) -> None:
        """Count a call that waits no longer."""
        del self._began_s[call]

    @contextmanager
    def asked(self) -> Iterator[Callable[[], None]]:
        """Count a call that waits meanwhile. The call invokes the yielded function when it was answered."""
        call = object()
        self.began(call)
        try:
            yield self.answered
        finally:
            self.ended(call)

    def stalled_s(self) -> float:
        """Return the seconds since the oldest call began, or since a call was last answered, if that was later. 0
        without any."""
        if not self._began_s:
            return 0.0
        return self._clock.monotonic() - max(next(iter(self._began_s.values())), self._answered_s)
