"""The outcome of a store."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.errors import DeadlineExceeded
from kvstore.seams import SystemClock
from kvstore.spec import LEVELS, Durability
from kvstore_client.awaiting import ended

SETTLE_S_MAX = 60.0
"""Seconds that ``wait()`` without a timeout waits for the device."""
REPLY_S = 1.0
"""Seconds that the sidecar's answer may be on its way."""


NOT_ASKED = "nobody asked: wait() does, of a store that did not ask for less"


class Outcome(NamedTuple):
    """The levels that stored tokens have not reached, each with the reason. ``is_settled``: this will not change any
    more, or, where it is not ``is_answered``, no sidecar was there to say it."""

    missing: Mapping[Durability, str]
    is_settled: bool
    is_answered: bool = True

    @property
    def is_final(self) -> bool:
        """True when the sidecar need not be asked again."""
        return self.is_settled and self.is_answered


class Settling(NamedTuple):
    """A question to the sidecar: which levels stored tokens have reached below memory. ``outcome`` returns the answer
    once ``answered`` is done."""

    answered: Future[None]
    outcome: Callable[[], Outcome]


@dataclass(frozen=True)
class Settle:
    """The level that a receipt waits for (``wanted``), and how to ask for it. ``ask``: takes a number of leading
    tokens, and the most seconds that the sidecar may wait."""

    wanted: Durability
    ask: Callable[[int, float], Settling]


class Receipt:
    """The promise of a store. The tensors may be reused as soon as the caller has it.

    Levels are a set, not an order. MEMORY is lost with the sidecar's process; LOCAL is on its device; SHARED was
    readable by other nodes when the sidecar answered, and may be gone a moment later; OBJECT is in the object store,
    with every chunk that it depends on. SHARED and OBJECT count whole chunks: a partial last one stays on its node.
    """

    _clock = SystemClock()

    def __init__(self, future: Future[tuple[Durability, int, str]], settle: Settle | None = None) -> None:
        """``settle``: None where nobody wants to know which levels beyond memory are reached."""
        self._future = future
        self.settle = settle
        self._found: Outcome | None = None
        self._pid = os.getpid()

    def __repr__(self) -> str:
        if not self.is_done:
            return "Receipt(in flight)"
        _, count, reason = self._outcome()
        told = f"{self._level.name}, {count} tokens" if count else "nothing was kept"
        return f"Receipt({told}: {reason})" if reason else f"Receipt({told})"

    def _outcome(self, timeout: float | None = None) -> tuple[Durability, int, str]:
        if self._is_elsewhere:
            return Durability.NONE, 0, "the process that stored it knows; this is a fork of it"
        return self._future.result(timeout)

    @property
    def _is_elsewhere(self) -> bool:
        return self._pid != os.getpid() and not self._future.done()

    @staticmethod
    def nothing(reason: str) -> Receipt:
        """Return the receipt of a store that kept nothing."""
        future: Future[tuple[Durability, int, str]] = Future()
        future.set_result((Durability.NONE, 0, reason))
        return Receipt(future)

    def wait(self, timeout: float | None = None) -> Durability:
        """Wait for the level that was asked for (None: LOCAL). Returns the highest level up to it that the leading
        ``stored_token_count`` tokens have reached; NONE when nothing was kept, and while the sidecar is gone: the next
        ``wait`` asks again. Where the level is refused, ``reason`` says why. Afterwards ``reached`` and ``missing``
        tell of every level.

        Raises: DeadlineExceeded after ``timeout`` seconds (None: as long as the calls' own deadlines allow).
        """
        until_s = self._until_s(timeout)
        try:
            self._outcome(timeout)
        except TimeoutError:
            raise _unfinished(timeout) from None
        settle, count, left_s = self._to_settle(until_s)
        if settle is not None:
            settling = settle.ask(count, left_s)
            wait([settling.answered], left_s + REPLY_S)
            self._settled(settling, left_s)
        return self._level

    async def waited(self, timeout: float | None, call: Callable[..., Awaitable[Settling]]) -> Durability:  # noqa: ASYNC109 - as in ``wait``
        """Wait as ``wait`` does, without blocking a thread. ``call`` runs the parts that connect or send."""
        until_s = self._until_s(timeout)
        if not self._is_elsewhere and not await ended(self._future, timeout):
            raise _unfinished(timeout)
        settle, count, left_s = self._to_settle(until_s)
        if settle is not None:
            settling = await call(settle.ask, count, left_s)
            await ended(settling.answered, left_s + REPLY_S)
            self._settled(settling, left_s)
        return self._level

    def _until_s(self, timeout: float | None) -> float:
        """Return the time by which the device must have taken it."""
        return self._clock.monotonic() + (SETTLE_S_MAX if timeout is None else timeout)

    def _to_settle(self, until_s: float) -> tuple[Settle | None, int, float]:
        """Return (the settle to ask, number of tokens, seconds), of a store that has ended. None: nothing to ask."""
        level, count, _ = self._outcome()
        is_known = level is Durability.NONE or level >= self._wanted or (self._found and self._found.is_final)
        left_s = max(0.0, min(until_s - self._clock.monotonic(), SETTLE_S_MAX))
        return None if is_known else self.settle, count, left_s

    def _settled(self, settling: Settling, waited_s: float) -> None:
        if settling.answered.done():
            self._found = settling.outcome()
            if self._found.is_settled:
                return
        tier = "the device" if self._wanted is Durability.LOCAL else f"the tier of {self._wanted.name}"
        raise DeadlineExceeded(f"the store is in memory; {tier} did not take it within {waited_s:.1f} s")

    @property
    def _wanted(self) -> Durability:
        return Durability.MEMORY if self.settle is None else self.settle.wanted

    @property
    def _level(self) -> Durability:
        if self._found is None:
            return self._outcome()[0]
        return max((level for level in self.reached if level <= self._wanted), default=Durability.NONE)

    @property
    def reached(self) -> frozenset[Durability]:
        """The levels that all of the leading ``stored_token_count`` tokens had reached when ``wait()`` last asked;
        before that MEMORY at most. Waits until the store has ended."""
        return frozenset(LEVELS) - self.missing.keys()

    @property
    def missing(self) -> dict[Durability, str]:
        """The other levels, each with the reason, naming the setting that would change it. Waits like ``reached``."""
        if self._found is not None:
            return dict(self._found.missing)
        level, _, reason = self._outcome()
        return {each: NOT_ASKED if level else reason for each in LEVELS if each > level}

    @property
    def is_done(self) -> bool:
        return self._future.done()

    @property
    def stored_token_count(self) -> int:
        """Leading tokens that are resident now. Waits like ``wait()``."""
        return self._outcome()[1]

    @property
    def reason(self) -> str:
        """The reason why less than everything was kept; empty otherwise. Waits like ``wait()``."""
        return self._outcome()[2] or (self._found.missing.get(self._wanted, "") if self._found is not None else "")


def _unfinished(timeout: float | None) -> DeadlineExceeded:
    return DeadlineExceeded(f"the store did not finish within {timeout} s")
