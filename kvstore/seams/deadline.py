"""Deadlines of calls."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.seams.clock import Clock


@dataclass(frozen=True, slots=True)
class Deadline:
    """The moment, by the clock, at which one call gives up waiting, whatever it waits for and however often. It is set
    when the request comes and travels with it: each wait takes what is left."""

    clock: Clock
    until_s: float
    caller_until_s: float
    """When the caller itself gives up; never before ``until_s``."""

    @staticmethod
    def of(clock: Clock, remaining_s: float | None, most_s: float) -> Deadline:
        """``remaining_s`` from now, which is what its caller waits (None: for ever), but at most ``most_s``."""
        now_s = clock.monotonic()
        caller_s = now_s + (float("inf") if remaining_s is None else max(0.0, remaining_s))
        return Deadline(clock, min(caller_s, now_s + most_s), caller_s)

    @property
    def left_s(self) -> float:
        """Never below 0."""
        return max(0.0, self.until_s - self.clock.monotonic())

    @property
    def has_passed(self) -> bool:
        return self.left_s <= 0

    def sooner(self, seconds: float) -> Deadline:
        """For waits that have a bound of their own, ``seconds`` from now."""
        return Deadline(self.clock, min(self.until_s, self.clock.monotonic() + seconds), self.caller_until_s)

    def later(self, seconds: float) -> Deadline:
        """For a wait that may take longer than other calls do; when the caller gives up it still ends."""
        return Deadline(self.clock, min(self.until_s + seconds, self.caller_until_s), self.caller_until_s)
