"""What became of a store."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

from kvstore.errors import DeadlineExceeded
from kvstore.seams import SystemClock
from kvstore.spec import Durability
from kvstore_client.awaiting import ended

SETTLE_S_MAX = 60.0
"""How long ``wait()`` without a timeout waits for the device."""
REPLY_S = 1.0
"""How long its answer may be on its way."""


Outcome = tuple[Durability, str, bool]
"""The level, why it is no higher, and whether it will stay as it is."""


class Settling(NamedTuple):
    """A question to the sidecar: what stored tokens have reached below memory. ``outcome`` says it once ``answered`` is
    done."""

    answered: Future[Any]
    outcome: Callable[[], Outcome]


Settle = Callable[[int, float], Settling]
"""Asks of so many leading tokens; the sidecar waits for the device so many seconds at most."""


class Receipt:
    """The promise of a store. The tensors may be reused as soon as it is in your hands."""

    _clock = SystemClock()

    def __init__(self, future: Future[tuple[Durability, int, str]], settle: Settle | None = None) -> None:
        """``settle``: None where nobody wants to know what is reached below memory."""
        self._future = future
        self._settle = settle
        self._reached: tuple[Durability, str] | None = None
        self._pid = os.getpid()

    def _outcome(self, timeout: float | None = None) -> tuple[Durability, int, str]:
        if self._is_elsewhere:
            return Durability.NONE, 0, "the process that stored it knows; this is a fork of it"
        return self._future.result(timeout)

    @property
    def _is_elsewhere(self) -> bool:
        return self._pid != os.getpid() and not self._future.done()

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
        until_s = self._until_s(timeout)
        try:
            self._outcome(timeout)
        except TimeoutError:
            raise _unfinished(timeout) from None
        settle, count, left_s = self._to_settle(until_s)
        if settle is not None:
            settling = settle(count, left_s)
            wait([settling.answered], left_s + REPLY_S)
            self._settled(settling, left_s)
        return self._level

    async def waited(self, timeout: float | None, call: Callable[..., Awaitable[Any]]) -> Durability:  # noqa: ASYNC109 - as in ``wait``
        """``wait`` without a thread that waits. ``call`` runs what connects or sends."""
        until_s = self._until_s(timeout)
        if not self._is_elsewhere and not await ended(self._future, timeout):
            raise _unfinished(timeout)
        settle, count, left_s = self._to_settle(until_s)
        if settle is not None:
            settling = await call(settle, count, left_s)
            await ended(settling.answered, left_s + REPLY_S)
            self._settled(settling, left_s)
        return self._level

    def _until_s(self, timeout: float | None) -> float:
        """When the device must have taken it."""
        return self._clock.monotonic() + (SETTLE_S_MAX if timeout is None else timeout)

    def _to_settle(self, until_s: float) -> tuple[Settle | None, int, float]:
        """(what asks, of how many tokens, for how long), of a store that has ended. None: there is nothing to ask."""
        level, count, _ = self._outcome()
        is_known = self._reached is not None or level is not Durability.MEMORY
        left_s = max(0.0, min(until_s - self._clock.monotonic(), SETTLE_S_MAX))
        return None if is_known else self._settle, count, left_s

    def _settled(self, settling: Settling, waited_s: float) -> None:
        if settling.answered.done():
            level, why, is_settled = settling.outcome()
            if is_settled:
                self._reached = level, self._outcome()[2] or why
                return
        raise DeadlineExceeded(f"the store is in memory; the device did not take it within {waited_s:.1f} s")

    @property
    def _level(self) -> Durability:
        return self._reached[0] if self._reached else self._outcome()[0]

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


def _unfinished(timeout: float | None) -> DeadlineExceeded:
    return DeadlineExceeded(f"the store did not finish within {timeout} s")
