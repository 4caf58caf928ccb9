"""Errands: nothing that was given up is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from kvstore.errors import Unavailable
from kvstore.simulated import LoopClock, simulate
from kvstore.tiers.redis.control import Account
from kvstore.tiers.redis.errands import Errands


class Server:
    """Takes some time to remove what it is told to."""

    def __init__(self) -> None:
        self.removed: list[bytes] = []
        self.failures = 0

    async def account(self) -> Account:
        return Account()

    async def touch(self, keys: Sequence[bytes], ttl_ms: int) -> None: ...

    async def remove(self, keys: Sequence[bytes]) -> None:
        await asyncio.sleep(0.5)
        if keys and self.failures:
            self.failures -= 1
            raise Unavailable("not now")
        self.removed += keys


def test_what_is_given_up_while_others_are_removed_is_removed_next() -> None:
    async def scenario() -> None:
        server: Any = Server()
        errands = Errands(server, LoopClock(), 1000)
        errands.given_up(b"first")
        errands.begin()
        await asyncio.sleep(0.25)
        errands.given_up(b"meanwhile")
        await asyncio.sleep(2.0)
        server.failures = 1
        errands.given_up(b"later")
        await asyncio.sleep(5.0)
        with suppress(asyncio.CancelledError):
            await errands.end()
        assert sorted(server.removed) == [b"first", b"later", b"meanwhile"]

    simulate(scenario(), seed=1)
