"""Background work that no call waits for: used chunks stay longer, chunks that were given up are removed, and the
server is asked for its account. One task of the tier does it, in batches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from itertools import islice

from kvstore.errors import KVStoreError, Unavailable
from kvstore.seams import Clock
from kvstore.tiers.redis.control import Account, Control
from kvstore.tiers.redis.replies import NO_WRITES

PERIOD_S = 1.0
ACCOUNT_EVERY = 5
"""The account is asked for once in so many rounds, while the server answers."""
PENDING_COUNT_MAX = 65_536
"""Keys that are remembered, at most: as many as uses are told of in a minute. All of these may come in one second, and
of what is not remembered nothing is told in that minute."""
REMOVED_COUNT_MAX = 4096
"""Keys that are removed in one round: while a node of a cluster is away, its keys are tried in every round."""
_log = logging.getLogger("kvstore.redis")


class Errands:
    """``ttl_ms``: for how long a used chunk stays; 0: this node changes nothing there."""

    def __init__(self, control: Control, clock: Clock, ttl_ms: int) -> None:
        self._control = control
        self._clock = clock
        self._ttl_ms = ttl_ms
        self._used: dict[bytes, None] = {}
        self._given_up: dict[bytes, None] = {}
        self._task: asyncio.Task[None] | None = None
        self._rounds = 0
        self.account = Account()
        self.problem = ""
        """The reason why the server does not answer; empty while it does."""

    def begin(self) -> None:
        """Start the rounds, from the running loop. Idempotent."""
        if self._task is None:
            loop = asyncio.get_running_loop()
            self._task = loop.create_task(self._run())  # seam: tiers have no TaskGroup; ``end`` ends it

    async def end(self) -> None:
        """Stop the rounds. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def used(self, key: bytes) -> None:
        """Remember that a chunk was used: its keys are to stay longer."""
        if self._ttl_ms and len(self._used) < PENDING_COUNT_MAX:
            self._used[key] = None

    def given_up(self, key: bytes) -> None:
        """Remember a key of a chunk whose write failed: it is to be removed."""
        if len(self._given_up) < PENDING_COUNT_MAX:
            self._given_up[key] = None

    async def _run(self) -> None:
        while True:
            problem = ""
            for errand in (self._look, self._touch, self._remove):  # one that fails keeps none of the others
                said = await _problem_of(errand)
                problem = problem or said  # the account says how much of a cluster is away
            self._said(problem)
            await self._clock.sleep(PERIOD_S)

    async def _look(self) -> None:
        """Ask for the account, in every round while a server does not answer."""
        if self.problem or self._rounds % ACCOUNT_EVERY == 0:
            self.account = await self._control.account()
            if self.account.problem:
                raise Unavailable(self.account.problem)
        self._rounds += 1

    async def _touch(self) -> None:
        used, self._used = list(self._used), {}
        await self._control.touch(used, self._ttl_ms)

    async def _remove(self) -> None:
        """Remove the keys that were given up first. Those that fail are tried again after all others."""
        removed = list(islice(self._given_up, REMOVED_COUNT_MAX))
        for key in removed:
            self._given_up[key] = self._given_up.pop(key)
        await self._control.remove(removed)
        for key in removed:  # others were given up meanwhile
            del self._given_up[key]

    def _said(self, problem: str) -> None:
        """Log when the servers cease to answer, and when they answer again."""
        if problem and not self.problem:
            _log.warning("going on without the server", extra={"tier": "redis", "reason": problem})
        elif self.problem and not problem:
            _log.info("the server answers again", extra={"tier": "redis"})
        self.problem = problem


async def _problem_of(errand: Callable[[], Awaitable[None]]) -> str:
    """Run an errand. Returns its error; empty also for a refusal to write: the server answers."""
    try:
        await errand()
    except KVStoreError as error:
        return "" if NO_WRITES in error.fields else error.message
    except Exception as error:  # noqa: BLE001 - the boundary: what a server says ends no errands
        return repr(error)
    return ""
