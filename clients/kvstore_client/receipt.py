"""What became of a store."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future

from kvstore.errors import DeadlineExceeded
from kvstore.seams import SystemClock
from kvstore.spec import Durability

SETTLE_S_MAX = 60.0
"""How long ``wait()`` without a timeout waits for the device."""


class Receipt:
    """The promise of a store. The tensors may be reused as soon as it is in your hands."""

    _clock = SystemClock()

    def __init__(
        self,
        future: Future[tuple[Durability, int, str]],
        settle: Callable[[int, float], tuple[Durability, str, bool]] | None = None,
    ) -> None:
        """``settle(token_count, timeout_s)`` asks what the stored tokens have reached below memory; None: nobody
        wants to know."""
        self._future = future
        self._settle = settle
        self._reached: tuple[Durability, str] | None = None
        self._pid = os.getpid()

    def _outcome(self, timeout: float | None = None) -> tuple[Durability, int, str]:
        if self._pid != os.getpid() and not self._future.done():
            return Durability.NONE, 0, "the process that stored it knows; this is a fork of it"
        return self._future.result(timeout)

    @staticmethod
    def nothing(reason: str) -> Receipt:
        """The receipt of a store that kept nothing."""
        future: Future[tuple[Durability, int, str]] = Future()
        future.set_result((Durability.NONE, 0, reason))
        return Receipt(future)

    def wait(self, timeout: float | None = None) -> Durability:
        """The durability reached by the leading ``stored_token_count`` tokens; NONE when nothing was kept. Waits for
        the lower tiers too, unless MEMORY was asked for; where they refuse, ``reason`` says why.

        Raises: DeadlineExceeded after ``timeout`` seconds (None: as long as the calls' own deadlines allow).
        """
        started_s = self._clock.monotonic()
        try:
            level, count, reason = self._outcome(timeout)
        except TimeoutError:
            raise DeadlineExceeded(f"the store did not finish within {timeout} s") from None
        if self._reached is not None or self._settle is None or level is not Durability.MEMORY:
            return self._reached[0] if self._reached else level
        left_s = SETTLE_S_MAX if timeout is None else timeout - (self._clock.monotonic() - started_s)
        level, why, is_settled = self._settle(count, max(0.0, min(left_s, SETTLE_S_MAX)))
        if not is_settled:
            raise DeadlineExceeded(f"the store is in memory; the device did not take it within {left_s:.1f} s")
        self._reached = level, reason or why
        return level

    @property
    def is_done(self) -> bool:
        return self._future.done()

    @property
    def stored_token_count(self) -> int:
        """Leading tokens that are resident now. Waits like ``wait()``."""
        return self._outcome()[1]

    @property
    def reason(self) -> str:
        """Why less than everything was kept; empty otherwise. Waits like ``wait()``."""
        return self._reached[1] if self._reached else self._outcome()[2]
