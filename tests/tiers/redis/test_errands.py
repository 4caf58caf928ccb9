"""Errands: nothing that was given up is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from kvstore.errors import KVStoreError, Unavailable
from kvstore.movement.uses import TOUCH_COUNT_MAX
from kvstore.tiers.redis.control import Account
from kvstore.tiers.redis.errands import REMOVED_COUNT_MAX, Errands
from kvstore.tiers.redis.replies import refusal
from tests.simulated import LoopClock, simulate


class Server:
    """Takes some time to remove what it is told to."""

    def __init__(self) -> None:
        self.removed: list[bytes] = []
        self.touched: list[bytes] = []
        self.asked: list[Sequence[bytes]] = []
        """Each call was to remove these."""
        self.failures = 0
        self.refusal: KVStoreError | None = None
        self.is_silent = False

    async def account(self) -> Account:
        if self.is_silent:
            raise Unavailable("no account")
        return Account()

    async def touch(self, keys: Sequence[bytes], ttl_ms: int) -> None:
        if keys and self.refusal:
            raise self.refusal
        self.touched += keys

    async def remove(self, keys: Sequence[bytes]) -> None:
        await asyncio.sleep(0.5)
        self.asked.append(keys)
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


def test_an_errand_that_fails_keeps_none_of_the_others() -> None:
    async def scenario() -> None:
        server: Any = Server()
        errands = Errands(server, LoopClock(), 1000)
        server.is_silent = True
        errands.used(b"used")
        errands.given_up(b"given up")
        errands.begin()
        await asyncio.sleep(5.0)
        assert (server.touched, server.removed) == ([b"used"], [b"given up"])
        assert errands.problem == "no account"
        server.is_silent = False
        await asyncio.sleep(5.0)
        assert not errands.problem
        server.refusal = refusal("NOPERM no", "here")
        for number in range(5):
            errands.used(b"%d" % number)
            await asyncio.sleep(1.0)
            assert not errands.problem, "a server that takes no writes answers"
        with suppress(asyncio.CancelledError):
            await errands.end()

    simulate(scenario(), seed=1)


def test_every_chunk_that_uses_tell_in_a_minute_stays_longer() -> None:
    """They are told of at most once a minute, and may all be used in one second of it."""

    async def scenario() -> None:
        server: Any = Server()
        errands = Errands(server, LoopClock(), 1000)
        for number in range(TOUCH_COUNT_MAX):
            errands.used(b"%d" % number)
        errands.begin()
        await asyncio.sleep(1.0)
        with suppress(asyncio.CancelledError):
            await errands.end()
        assert len(server.touched) == TOUCH_COUNT_MAX

    simulate(scenario(), seed=1)


def test_keys_that_cannot_be_removed_keep_none_of_the_others_and_do_not_fill_the_rounds() -> None:
    """A node of a cluster is away, and everything that was begun there was given up."""

    async def scenario() -> None:
        server: Any = Server()
        errands = Errands(server, LoopClock(), 1000)
        server.failures = 5
        for number in range(4 * REMOVED_COUNT_MAX):
            errands.given_up(b"%d" % number)
        errands.begin()
        await asyncio.sleep(3.5)
        assert max(map(len, server.asked)) == REMOVED_COUNT_MAX
        assert not set(server.asked[0]) & set(server.asked[1])
        await asyncio.sleep(20.0)
        with suppress(asyncio.CancelledError):
            await errands.end()
        assert len(server.removed) == len(set(server.removed)) == 4 * REMOVED_COUNT_MAX

    simulate(scenario(), seed=1)
