"""The sidecar's control of the remote plane's process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.config.remote import RemoteSettings
from kvstore.errors import InvalidRequest
from kvstore.server.remote import RemoteDoor


class Dead:
    """A process that has ended."""

    async def wait(self) -> int:
        return 1


class Pauses:
    """A clock that notes how long it was to sleep."""

    def __init__(self) -> None:
        self.asked_s: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.asked_s.append(seconds)


async def test_a_process_that_does_not_start_is_tried_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody spoilt its token file, say. Once it has started, it is soon started again."""
    clock: Any = Pauses()
    settings: Any = SimpleNamespace(remote=RemoteSettings())
    door = RemoteDoor(settings, {}, clock)
    monkeypatch.setattr(door, "_process", Dead())
    attempts = 0

    async def start() -> None:
        nonlocal attempts
        attempts += 1
        door._is_stopping = attempts == 11
        if attempts != 9:
            raise InvalidRequest("remote.token_file: it has no token")

    monkeypatch.setattr(door, "start", start)
    await door.watch()
    assert clock.asked_s == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0, 1.0, 2.0]
