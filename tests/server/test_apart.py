"""What happens to one part of the process stays there: a tenant that cannot stop cleanly, a remote plane that died."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.config import load
from kvstore.errors import Internal
from kvstore.seams import SystemClock
from kvstore.server import remote
from kvstore.server.app import _stop
from kvstore.server.remote import RemoteDoor
from kvstore.server.tenant import Tenant
from tests.security.tenancy import write_private

TOKEN = "a token of sixteen or more".replace(" ", "-")


class Parts:
    """A tenant's parts, as far as its stop touches them. Those of a tenant that is ``broken`` fail at once."""

    def __init__(self, broken: bool) -> None:
        self.broken, self.said, self.detached, self.sessions = broken, "", False, ()
        self.tasks = [asyncio.create_task(asyncio.Event().wait())]
        self._health = self._server = self._listener = self.controller = self
        self.enter_graceful_shutdown = self.drain = self.stop = self._part

    async def _part(self, *_: object) -> None:
        if self.broken:
            raise Internal("a bug of ours")

    def close(self) -> None:
        """The listener's."""

    async def close_doors(self, grace_s: float) -> None:
        whole: Any = self
        await Tenant.close_doors(whole, grace_s)

    async def detach(self) -> None:
        self.detached = True


async def test_a_tenant_that_fails_to_stop_keeps_no_other_from_its_clean_stop() -> None:
    parts: list[Any] = [Parts(broken=True), Parts(broken=False)]
    with pytest.raises(Internal):
        await _stop(parts, [], 0.1)
    assert [each.detached for each in parts] == [True, True]
    assert all(task.cancelled() for each in parts for task in each.tasks)


async def test_a_remote_plane_that_does_not_come_back_is_tried_again_and_ends_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def tried(executable: str) -> None:
        """It was started as ``executable`` instead, and that was no start."""
        patch.setattr(sys, "executable", executable)
        caplog.clear()
        while caplog.text.count("does not start") < 2:
            assert not watching.done(), watching.exception()
            await asyncio.sleep(0.01)

    monkeypatch.setattr(remote, "RESTART_PAUSE_S", 0.01)
    write_private(tmp_path / "tokens", TOKEN)
    flags = {"remote.address": "127.0.0.1:0", "remote.token_file": str(tmp_path / "tokens")}
    settings = load(None, {"XDG_STATE_HOME": str(tmp_path)}, flags).settings
    door = RemoteDoor(settings, {"default": settings}, SystemClock())
    await door.start()
    first = door._process
    assert first is not None
    watching = asyncio.create_task(door.watch())
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        first.kill()
        async with asyncio.timeout(20):
            await tried("/bin/false")  # ends without a word
            await tried(str(tmp_path / "absent"))
    async with asyncio.timeout(20):
        while door._process is None or door._process.returncode is not None:
            assert not watching.done(), watching.exception()
            await asyncio.sleep(0.01)
    await door.stop()
    watching.cancel()
