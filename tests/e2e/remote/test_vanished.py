"""A peer that vanished without closing its connection is noticed on either side: it owes a ping's answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from kvstore_client.planes.stream import session

from kvstore.remote import door
from tests.fakes.proxy import Proxy

Options = tuple[tuple[str, Any], ...]
SCALE = 40
"""Keepalive's times are so many times shorter here."""
DEFAULT_S = 30.0
"""Less than gRPC's own wait for a ping's answer, and far more than ours, scaled."""


def scaled(options: Options) -> Options:
    """The options, with keepalive's times, and that for a ping's answer, divided by ``SCALE``."""
    shorter = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
    return tuple((name, value // SCALE if name in shorter else value) for name, value in options)


@pytest.mark.parametrize("who", ["client", "server"])
def test_who_vanished_is_noticed(who: str) -> None:
    """Both ends of a call use the product's options; a line between them falls silent."""
    asyncio.run(asyncio.wait_for(_noticed(who), 2 * DEFAULT_S))


async def _noticed(who: str) -> None:
    ended = asyncio.Event()

    async def talk(_request: bytes, _context: Any) -> AsyncIterator[bytes]:
        try:
            yield b"open"
            await asyncio.sleep(2 * DEFAULT_S)
        finally:
            ended.set()

    server = grpc.aio.server(options=scaled(door.OPTIONS) if who == "client" else door.OPTIONS)
    handler = grpc.unary_stream_rpc_method_handler(talk)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Test", {"Talk": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    line = Proxy(("127.0.0.1", port))
    options = scaled(session.OPTIONS) if who == "server" else session.OPTIONS
    try:
        async with grpc.aio.insecure_channel("{}:{}".format(*line.address), options=options) as channel:
            call = channel.unary_stream("/Test/Talk")(b"")
            assert await call.read() == b"open"
            line.is_silent = True
            if who == "client":
                await asyncio.wait_for(ended.wait(), DEFAULT_S)
            else:
                with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                    await asyncio.wait_for(call.read(), DEFAULT_S)
    finally:
        line.close()
        await server.stop(None)
