"""An HTTP proxy on loopback, as a company's network has one: requests for http, tunnels for https, each counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

from tests.fakes.tls import pump


class ForwardProxy:
    """``asked``: (method, HOST:PORT) of each request; a tunnel's is CONNECT. A connection carries one of them."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        with suppress(OSError, asyncio.IncompleteReadError):  # either end may go at any time
            head = await reader.readuntil(b"\r\n\r\n")
            line, _, fields = head.partition(b"\r\n")
            method, target, version = line.decode().split()
            url = urlsplit(f"//{target}" if method == "CONNECT" else target)
            assert url.hostname, "it was asked as if it were the server itself"
            self.asked.append((method, url.netloc))
            back, forth = await asyncio.open_connection(url.hostname, url.port or 80)
            if method == "CONNECT":
                writer.write(b"HTTP/1.1 200 here you are\r\n\r\n")
            else:
                path = target.partition(url.netloc)[2]
                kept = [each for each in fields.split(b"\r\n") if each and not each.lower().startswith(b"connection:")]
                lines = [f"{method} {path} {version}".encode(), *kept, b"Connection: close", b"", b""]
                forth.write(b"\r\n".join(lines))
            await asyncio.gather(pump(reader, forth), pump(back, writer))
        writer.close()


@asynccontextmanager
async def forward_proxy() -> AsyncIterator[ForwardProxy]:
    """On the running loop."""
    proxy = ForwardProxy()
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, limit=1 << 20)
    proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
