"""The remote plane's hand-off: a question that is given up takes nobody else's answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kvstore_ops.sidecar import Sidecar

from kvstore.handoff.messages import RegionsAnswer, RegionsQuestion
from kvstore.remote.session import SidecarSession


@pytest.mark.parametrize("given_up", [1, 2])
async def test_a_question_that_was_cancelled_leaves_no_answer_for_the_next(
    own_sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch, given_up: int
) -> None:
    """A client goes while staging is made for it; the next one asks for more, and is to get what it asked for."""
    session, _, _ = await SidecarSession.open(own_sidecar.directory / "run" / "data.sock")
    asked = asyncio.Event()

    async def slow() -> tuple[dict[str, Any], list[int]]:
        asked.set()
        return await asyncio.get_running_loop().create_future()

    for _ in range(given_up):
        asked.clear()
        with monkeypatch.context() as patch:
            patch.setattr(session, "_receive", slow)
            asking = asyncio.create_task(session.take_segment(4096))
            await asked.wait()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
    segment = await session.take_segment(1 << 20)
    assert segment.bytes.size == 1 << 20
    segment.bytes[:] = 1  # all of it is there
    spare = await session.take_segment(4096)
    await session.exchange(RegionsQuestion(9), RegionsAnswer)
    assert spare.staging_id < segment.staging_id
    session.close()
