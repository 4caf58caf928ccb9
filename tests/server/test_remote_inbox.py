"""What the remote plane keeps of messages that are on their way in."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.errors import Exhausted
from kvstore.remote.inbox import SESSION_MESSAGES, TENANT_MESSAGES, Inbox
from kvstore.wire.limits import REPLY_BYTES_MAX

WAIT_S = 10.0


async def test_so_many_messages_at_once_and_the_next_is_refused_by_name() -> None:
    inbox = Inbox(2, "session")
    async with inbox.room(WAIT_S), inbox.room(WAIT_S):
        with pytest.raises(Exhausted, match="2 streams of this session"):
            async with inbox.room(0.02):
                pytest.fail("there was room for a third")
    async with inbox.room(0.02), inbox.room(0.02):
        pass


async def test_room_comes_back_from_who_fails_and_from_who_stops_waiting() -> None:
    inbox = Inbox(1, "tenant")
    with pytest.raises(RuntimeError):
        async with inbox.room(WAIT_S):
            raise RuntimeError

    async def wait() -> None:
        async with inbox.room(WAIT_S):
            pass

    async with inbox.room(WAIT_S):
        waiting = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        waiting.cancel()
        assert isinstance((await asyncio.gather(waiting, return_exceptions=True))[0], asyncio.CancelledError)
    await asyncio.wait_for(wait(), WAIT_S)


def test_a_session_cannot_take_its_tenants_room_alone_nor_a_tenant_the_processes() -> None:
    assert SESSION_MESSAGES * 2 <= TENANT_MESSAGES
    assert TENANT_MESSAGES * REPLY_BYTES_MAX <= 1 << 30
