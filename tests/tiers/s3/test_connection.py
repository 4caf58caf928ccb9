"""A client whose credentials are renewed while other requests use it."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvstore.config import S3Settings
from kvstore.tiers.s3 import connection
from kvstore.tiers.s3.connection import S3Connection
from kvstore.tiers.s3.refusals import Refused


class Client:
    """Knows whether it is open."""

    def __init__(self) -> None:
        self.is_open = True


def test_a_client_is_closed_when_its_last_request_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large body takes longer than any fixed time."""
    made: list[Client] = []

    @asynccontextmanager
    async def client_of(_: S3Settings) -> Any:
        client = Client()
        made.append(client)
        yield client
        client.is_open = False

    monkeypatch.setattr(connection, "_client_of", client_of)
    monkeypatch.setattr(connection, "RENEW_S_MIN", 0.0)
    monkeypatch.setattr(connection, "refusal_of", lambda error: error)
    one = S3Connection(S3Settings(bucket="bucket"))
    has_begun, may_end = threading.Event(), threading.Event()

    async def large(client: Any) -> bool:
        has_begun.set()
        await asyncio.to_thread(may_end.wait, 10.0)
        return bool(client.is_open)

    async def renewing(client: Any) -> bool:
        if client is made[0]:
            raise Refused("ExpiredToken")
        return bool(client.is_open)

    found: list[bool] = []
    reading = threading.Thread(target=lambda: found.append(one.run(lambda each: each.ask(large), 10.0)))
    reading.start()
    assert has_begun.wait(10.0)
    assert one.run(lambda each: each.ask(renewing), 10.0)
    assert len(made) == 2
    assert made[0].is_open, "a body is still on its way"
    may_end.set()
    reading.join()
    assert found == [True]
    assert not made[0].is_open
