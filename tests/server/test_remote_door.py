"""The sidecar's control of the remote plane's process."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest

from kvstore.config.remote import RemoteSettings
from kvstore.errors import InvalidRequest
from kvstore.server.remote import RemoteDoor


class Dead:
    """A process that has ended."""

    async def wait(self) -> int:
        return 1


class Pauses:
    """A clock that notes how long it was to sleep, and calls ``meanwhile`` instead."""

    def __init__(self) -> None:
        self.asked_s: list[float] = []
        self.meanwhile: Callable[[], object] = lambda: None

    async def sleep(self, seconds: float) -> None:
        self.asked_s.append(seconds)
        self.meanwhile()


def door_of(clock: Any) -> RemoteDoor:
    settings: Any = SimpleNamespace(remote=RemoteSettings())
    door = RemoteDoor(settings, {}, clock)
    door._process = cast("Any", Dead())
    return door


async def test_a_process_that_does_not_start_is_tried_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody spoilt its token file, say. Once it has started, it is soon started again."""
    clock = Pauses()
    door, attempts = door_of(clock), 0

    async def start() -> None:
        nonlocal attempts
        attempts += 1
        door._is_stopping = attempts == 11
        if attempts != 9:
            raise InvalidRequest("remote.token_file: it has no token")

    monkeypatch.setattr(door, "start", start)
    await door.watch()
    assert clock.asked_s == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0, 1.0, 2.0]


async def test_a_process_is_not_started_again_while_the_server_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause before the next attempt may be a minute, and a stop may take half of that."""
    clock = Pauses()
    door = door_of(clock)

    async def start() -> NoReturn:
        raise AssertionError("nobody would use it")

    monkeypatch.setattr(door, "start", start)
    clock.meanwhile = lambda: setattr(door, "_is_stopping", True)
    await door.watch()
    assert clock.asked_s == [1.0]
