"""A client whose credentials are renewed while other requests use it."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import weakref
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstore.config import S3Settings
from kvstore.errors import DeadlineExceeded
from kvstore.tiers.s3 import connection
from kvstore.tiers.s3.connection import RetryBudget, S3Connection, together
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


def test_clients_whose_credentials_are_refused_again_and_again_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A night with credentials that ran out takes thousands of clients, of a megabyte each. Real ones."""
    monkeypatch.setattr(connection, "RENEW_S_MIN", 0.0)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "old")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    one = S3Connection(S3Settings(bucket="bucket", region="us-east-1"))
    met: list[weakref.ref[Any]] = []

    async def refused(client: Any) -> None:
        met.append(weakref.ref(client))
        raise Refused("ExpiredToken", 400)

    gc.disable()
    try:
        for _ in range(3):
            with pytest.raises(Refused):
                one.run(lambda each: each.ask(refused), 10.0)
        living = {id(each()) for each in met if each() is not None}
    finally:
        gc.enable()
    assert len(met) == 6
    assert len(living) <= 2


def test_credentials_that_nobody_gives_are_not_called_a_bad_way_to_the_store(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"http://127.0.0.1:{silent.getsockname()[1]}/")
        one = S3Connection(S3Settings(bucket="bucket", region="us-east-1"))
        with pytest.raises(DeadlineExceeded, match=r"credentials come from: tiers\.s3\.profile"):
            one.run(S3Connection.open, 1.0)


def test_all_requests_that_meet_old_credentials_are_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has more of them on their way at once than it may try again where a store refuses them."""
    made: list[Client] = []

    @asynccontextmanager
    async def client_of(_: S3Settings) -> Any:
        made.append(Client())
        yield made[-1]

    monkeypatch.setattr(connection, "_client_of", client_of)
    monkeypatch.setattr(connection, "RENEW_S_MIN", 0.0)
    count = int(3 * RetryBudget.MOST)
    one = S3Connection(S3Settings(bucket="bucket"))
    asked: list[Client] = []
    are_together = asyncio.Event()

    async def request(client: Client) -> bool:
        asked.append(client)
        if len(asked) == count:
            are_together.set()
        await are_together.wait()
        if client is made[0]:
            raise Refused("ExpiredToken", 400)
        return True

    found = one.run(lambda each: together([each.ask(request, is_urgent=True) for _ in range(count)], count), 10.0)
    assert found == [True] * count
    assert len(made) == 2
    assert len(asked) == 2 * count
