"""Encrypted lines of a test's own: certificates, and a port with TLS in front of a server that has none."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


def made_certificates(place: Path) -> None:
    """An authority, one certificate for the server and one for clients, and an authority that nobody knows."""
    openssl("req", "-x509", *NEW_KEY, "-nodes", "-days", "2", "-subj", "/CN=authority",
            "-keyout", f"{place}/ca.key", "-out", f"{place}/ca.crt")  # fmt: skip
    openssl("req", "-x509", *NEW_KEY, "-nodes", "-days", "2", "-subj", "/CN=stranger",
            "-keyout", f"{place}/stranger.key", "-out", f"{place}/stranger.crt")  # fmt: skip
    (place / "names").write_text("subjectAltName = IP:127.0.0.1, DNS:localhost")
    for name in ("server", "client"):
        openssl("req", *NEW_KEY, "-nodes", "-subj", f"/CN={name}",
                "-keyout", f"{place}/{name}.key", "-out", f"{place}/{name}.csr")  # fmt: skip
        openssl("x509", "-req", "-days", "2", "-in", f"{place}/{name}.csr", "-CA", f"{place}/ca.crt",
                "-CAkey", f"{place}/ca.key", "-CAcreateserial", "-extfile", f"{place}/names",
                "-out", f"{place}/{name}.crt")  # fmt: skip


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """All that comes, until it ends."""
    with suppress(OSError):
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def encrypted(
    upstream: str | tuple[str, int], place: Path, *, wants_certificate: bool = False
) -> AsyncIterator[int]:
    """A port with TLS in front of a socket's path or a (host, port), with the certificates of ``place``.
    ``wants_certificate``: of clients, too."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(place / "server.crt", place / "server.key")
    if wants_certificate:
        context.load_verify_locations(place / "ca.crt")
        context.verify_mode = ssl.CERT_REQUIRED

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if isinstance(upstream, str):
            back, forth = await asyncio.open_unix_connection(upstream)
        else:
            back, forth = await asyncio.open_connection(*upstream)
        await asyncio.gather(pump(reader, forth), pump(back, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
