"""Deadlines of calls."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.seams.clock import Clock


@dataclass(frozen=True, slots=True)
class Deadline:
    """The moment, by the clock, at which one call stops waiting. It is set when the request comes and travels with the
    request: all waits of the call share it, and each may last only for the time that is left."""

    clock: Clock
    until_s: float
    caller_until_s: float
    """The moment at which the caller itself gives up; never before ``until_s``."""

    @staticmethod
    def of(clock: Clock, remaining_s: float | None, most_s: float) -> Deadline:
        """Return the deadline of a call whose caller waits ``remaining_s`` from now (None: for ever). The call itself
        waits no longer than ``most_s``."""
        now_s = clock.monotonic()
        caller_s = now_s + (float("inf") if remaining_s is None else max(0.0, remaining_s))
        return Deadline(clock, min(caller_s, now_s + most_s), caller_s)

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; never below 0."""
        return max(0.0, self.until_s - self.clock.monotonic())

    @property
    def answerable_s(self) -> float:
        """Seconds that a wait may take whose answer its caller must hear: at most half of those until it gives up."""
        return min(self.left_s, max(0.0, self.caller_until_s - self.clock.monotonic()) / 2)

    @property
    def has_passed(self) -> bool:
        return self.left_s <= 0

    def sooner(self, seconds: float) -> Deadline:
        """Return the deadline for a wait that is also limited to ``seconds`` from now."""
        return Deadline(self.clock, min(self.until_s, self.clock.monotonic() + seconds), self.caller_until_s)

    def later(self, seconds: float) -> Deadline:
        """Return the deadline for a wait that may last ``seconds`` longer, but never beyond the caller's."""
        return Deadline(self.clock, min(self.until_s + seconds, self.caller_until_s), self.caller_until_s)
