"""Bodies of answers, received straight into memory, from a server that sends them as each test has it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest

from kvstore.tiers.s3.bodies import LANDED_BYTES_MIN, pour
from kvstore.tiers.s3.refusals import Refused
from tests.fakes.tls import made_certificates
from tests.scenario import scenario

Send = Callable[[asyncio.StreamWriter], Awaitable[None]]
SIZE = 40 * LANDED_BYTES_MIN + 123
DATA = (np.frombuffer(np.random.default_rng(5).bytes(SIZE), np.uint8) | 1).tobytes()
CLIENT_STALL_S = 0.1


class Line:
    """A server that answers each request by a head that promises SIZE bytes, and then by what ``send`` sends; and a
    client with one connection."""

    def __init__(self, place: Path | None) -> None:
        self._place = place
        self.send: Send = in_pieces(SIZE)
        self.connection_count = 0

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        asyncio.run(self._run(scenario))

    async def _run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        context, trusted = None, True
        if self._place:
            made_certificates(self._place)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._place / "server.crt", self._place / "server.key")
            trusted = ssl.create_default_context(cafile=str(self._place / "ca.crt"))
        listener = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=context)
        self._url = f"http{'s' if context else ''}://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        connector = aiohttp.TCPConnector(limit=1, ssl=trusted)
        timeout = aiohttp.ClientTimeout(sock_read=CLIENT_STALL_S)
        async with asyncio.timeout(30), aiohttp.ClientSession(connector=connector, timeout=timeout) as self._session:
            await scenario()
        listener.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connection_count += 1
        with suppress(OSError):
            while await reader.readline():
                while (await reader.readline()).strip():
                    pass
                writer.write(f"HTTP/1.1 206 Partial Content\r\nContent-Length: {SIZE}\r\n\r\n".encode())
                await self.send(writer)
        writer.close()

    async def ask(self) -> aiohttp.ClientResponse:
        return await self._session.get(self._url)

    async def receive(self, target: Any, stall_s: float = 5.0) -> None:
        async with await self.ask() as answer:
            await pour(SimpleNamespace(raw_stream=answer), np.array_split(target, 7), stall_s)


def in_pieces(*byte_counts: int, pause_s: float = 0.001) -> Send:
    async def send(writer: asyncio.StreamWriter) -> None:
        place = 0
        for count in byte_counts:
            await asyncio.sleep(pause_s if place else 0)
            writer.write(DATA[place : place + count])
            await writer.drain()
            place += count

    return send


@pytest.fixture(params=["http", "https"])
def line(request: pytest.FixtureRequest, tmp_path: Path) -> Line:
    return Line(tmp_path if request.param == "https" else None)


def empty() -> Any:
    return np.zeros(SIZE, np.uint8)


PIECES = [(SIZE,), (1, SIZE - 1), (0, 10_000, 500_000, SIZE - 510_000), (SIZE - 1, 1), (SIZE - LANDED_BYTES_MIN, 65536)]


@scenario()
async def test_every_byte_lies_where_it_should_however_it_comes(line: Line) -> None:
    """One connection serves all: a body that was received to its end leaves it as it was."""
    for counts in PIECES:
        line.send = in_pieces(*counts)
        target = empty()
        await line.receive(target)
        assert target.tobytes() == DATA
    assert line.connection_count == 1


@scenario()
async def test_the_clients_own_limit_ends_with_the_head(line: Line) -> None:
    """Else it would close the connection under a body that it does not see."""
    line.send = in_pieces(SIZE // 2, SIZE - SIZE // 2, pause_s=3 * CLIENT_STALL_S)
    for _ in range(2):
        target = empty()
        await line.receive(target)
        assert target.tobytes() == DATA
    assert line.connection_count == 1


@pytest.mark.parametrize("count", [0, 1000, SIZE // 2, SIZE - 1])
@scenario()
async def test_a_body_that_ends_early_is_refused(line: Line, count: int) -> None:
    async def send(writer: asyncio.StreamWriter) -> None:
        writer.write(DATA[:count])
        writer.close()

    line.send = send
    with pytest.raises((Refused, aiohttp.ClientError)):
        await line.receive(empty())
    line.send, target = in_pieces(SIZE), empty()
    await line.receive(target)
    assert target.tobytes() == DATA


@scenario()
async def test_a_line_that_stands_still_is_given_up(line: Line) -> None:
    line.send = in_pieces(SIZE // 2, SIZE - SIZE // 2, pause_s=30.0)
    with pytest.raises(TimeoutError):
        await line.receive(empty(), stall_s=0.05)


@scenario()
async def test_no_byte_comes_after_a_read_was_given_up(line: Line) -> None:
    """The memory may be another chunk's by then."""
    go_on, target = asyncio.Event(), empty()

    async def send(writer: asyncio.StreamWriter) -> None:
        writer.write(DATA[: SIZE // 2])
        await go_on.wait()
        writer.write(DATA[SIZE // 2 :])

    line.send = send
    answer = await line.ask()
    pouring = asyncio.create_task(pour(SimpleNamespace(raw_stream=answer), [target], 5.0))
    while not target[: SIZE // 2].all():  # noqa: ASYNC110 - memory tells nobody that it changes
        await asyncio.sleep(0.001)
    pouring.cancel()
    await asyncio.wait([pouring])
    target[:] = 0
    go_on.set()
    await asyncio.sleep(0.02)
    assert not target.any()
    answer.close()


@scenario()
async def test_what_comes_behind_the_wanted_bytes_is_not_the_next_answer(line: Line) -> None:
    """A store that ignores ranges sends the whole object."""
    for _ in range(2):
        target = empty()[: SIZE // 2]
        await line.receive(target)
        assert target.tobytes() == DATA[: SIZE // 2]
    assert line.connection_count == 2
