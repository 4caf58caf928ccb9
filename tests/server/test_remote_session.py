"""The remote plane's hand-off: a question that is given up, or whose session ends, takes nobody else's answer; and
staging goes back when it is not used."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import Exhausted, Unavailable
from kvstore.handoff.messages import Done, LookedUp, RegionsAnswer, RegionsQuestion
from kvstore.remote import session as remote_session
from kvstore.remote.session import SidecarSession
from tests.server.raw import eventually
from tests.server.test_remote_receiving import SEGMENT_BYTES, session_of, until


def is_stopped(pid: int) -> bool:
    """True when all threads of a process have stopped."""
    states = (each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/stat"))
    return all(state.rpartition(")")[2].split()[0] == "T" for state in states)


@contextmanager
def standing_still(*pids: int) -> Iterator[None]:
    """Stop these processes, which go on afterwards. On a busy machine a thread goes on for a while after the signal,
    and would do a job that comes meanwhile."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        eventually(lambda: all(map(is_stopped, pids)))
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


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


async def test_a_session_that_ends_while_it_asks_takes_no_answer_of_the_next(own_sidecar: Sidecar) -> None:
    """The next one's connection has the number that the closed one had."""
    path = own_sidecar.directory / "run" / "data.sock"
    first, _, _ = await SidecarSession.open(path)
    number = first._connection.fileno()
    asking = asyncio.create_task(first.exchange(LookedUp(), Done))  # the sidecar does not answer this
    await asyncio.sleep(0)
    first.close()
    second, _, _ = await SidecarSession.open(path)
    assert second._connection.fileno() == number
    with pytest.raises(Unavailable):
        await asking
    assert (await second.take_segment(4096)).bytes.size == 4096
    second.close()


@pytest.fixture
def short_of_staging() -> Iterator[Sidecar]:
    environment = {**os.environ, "KVSTORE__LIMITS__STAGING_BYTES_MAX": "8 MiB"}
    with Sidecar("--capacity", "16 MiB", environment=environment) as sidecar:
        yield sidecar


async def test_idle_staging_that_is_too_small_makes_room_for_what_is_asked(short_of_staging: Sidecar) -> None:
    session, _, _ = await SidecarSession.open(short_of_staging.directory / "run" / "data.sock")
    small = [await session.take_segment(4 << 20) for _ in range(2)]
    with pytest.raises(Exhausted, match="staging_bytes_max"):
        await session.take_segment(4 << 20)
    for each in small:
        session.give_back(each)
    assert (await session.take_segment(8 << 20)).bytes.size == 8 << 20
    session.close()


async def test_a_stream_that_is_cancelled_while_it_makes_room_leaves_no_staging_open(short_of_staging: Sidecar) -> None:
    """It waits for other streams' questions: what it was about to close nobody would use, or close, any more."""
    session, _, _ = await SidecarSession.open(short_of_staging.directory / "run" / "data.sock")
    for each in [await session.take_segment(4 << 20) for _ in range(2)]:
        session.give_back(each)
    taking = asyncio.create_task(session.take_segment(8 << 20))
    await asyncio.sleep(0)
    async with session._turn:  # after its question, and before it closes what is too small
        assert len(session._idle) == 1
        taking.cancel()
        await asyncio.wait([taking])
    assert (await session.take_segment(8 << 20)).bytes.size == 8 << 20
    session.close()


async def test_staging_that_is_being_read_makes_no_room_and_is_kept(short_of_staging: Sidecar) -> None:
    """The sidecar closes none while it reads some for the session: who asks for more is told of the limit."""
    async with session_of(short_of_staging) as service:
        session, reservation_id = service.session, await service.reserve(1)
        filled, idle = [await session.take_segment(4 << 20) for _ in range(2)]
        session.give_back(filled)
        with standing_still(*short_of_staging.mover_pids()):
            filling = service.receiving(reservation_id)
            await until(lambda: not session._idle)
            session.give_back(idle)
            with pytest.raises(Exhausted, match="staging_bytes_max"):
                await session.take_segment(8 << 20)
        assert await filling
        assert (await session.take_segment(8 << 20)).bytes.size == 8 << 20


async def test_staging_that_nobody_uses_goes_back(own_sidecar: Sidecar) -> None:
    """What a stream has, or was given since the last look, stays."""
    async with session_of(own_sidecar) as service:
        session = service.session
        taken, used, idle = [await session.take_segment(SEGMENT_BYTES) for _ in range(3)]
        for each in (used, idle):
            session.give_back(each)
        await session.give_back_idle()
        assert await service.staging_bytes() == 3 * SEGMENT_BYTES
        assert await session.take_segment(SEGMENT_BYTES) is used
        session.give_back(used)
        await session.give_back_idle()
        assert session._idle == [used]
        assert await service.staging_bytes() == 2 * SEGMENT_BYTES
        session.give_back(taken)
        for _ in range(2):
            await session.give_back_idle()
        assert await service.staging_bytes() == 0


async def test_idle_staging_is_looked_for_and_a_sidecar_that_stands_still_ends_no_session(
    own_sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with session_of(own_sidecar) as service:
        session = service.session
        monkeypatch.setattr(remote_session, "IDLE_S", 0.05)
        monkeypatch.setattr(remote_session, "EXCHANGE_TIMEOUT_S", 0.1)
        for _ in range(2):
            segment = await session.take_segment(SEGMENT_BYTES)
            with standing_still(own_sidecar.pid):
                session.give_back(segment)
                await until(lambda: not session._idle)
                await asyncio.sleep(0.3)  # nobody answers meanwhile
            await until(lambda: session._looking is None)
            assert await service.staging_bytes() == 0


async def test_a_sidecar_that_stands_still_while_staging_goes_back_keeps_nobody_waiting(own_sidecar: Sidecar) -> None:
    async with session_of(own_sidecar) as service:
        session = service.session
        session.give_back(await session.take_segment(SEGMENT_BYTES))
        await session.give_back_idle()
        with standing_still(own_sidecar.pid):
            going_back = asyncio.ensure_future(session.give_back_idle())
            await until(session._turn.locked)
            with pytest.raises(Unavailable):
                await session.exchange(RegionsQuestion(0), RegionsAnswer, 0.1)
        await going_back
