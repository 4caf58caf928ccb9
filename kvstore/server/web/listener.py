"""HTTP/1.1 for browsers and scrapers, one request per connection, in a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import hmac
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from kvstore.seams.scheduler import start_thread
from kvstore.units import is_loopback

CONNECTION_COUNT_MAX = 64
BACKLOG_COUNT = 128
REQUEST_BYTES_MAX = 8192
REQUEST_S_MAX, REPLY_S_MAX = 5.0, 10.0
"""Seconds that a client may take to send its request, and to take the reply."""
ANSWER_S_MAX = 5.0
"""Seconds that a request waits at most for the service's counts."""
HEADERS = (
    "Connection: close",
    "Cache-Control: no-store",
    "Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy: same-origin",
    "Referrer-Policy: no-referrer",
    "X-Content-Type-Options: nosniff",
)
REASONS = {
    200: "OK", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found",
    405: "Method Not Allowed", 421: "Misdirected Request", 503: "Service Unavailable",
}  # fmt: skip
TEXT = "text/plain; charset=utf-8"
_log = logging.getLogger("kvstore.web")


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply. ``kind``: its content type; ``headers``: whole header lines beside those of every reply."""

    status: int
    body: bytes
    kind: str = TEXT
    headers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WebRequest:
    """One request. ``headers``: by name in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Route:
    """The answer to a path, and its readers. ``is_open``: everybody may read it, because it tells nothing. ``is_page``:
    a token is needed where ``Gate.page_reason`` is set."""

    answer: Callable[[WebRequest], Awaitable[Reply]]
    is_open: bool = False
    is_page: bool = False


@dataclass(frozen=True, slots=True)
class ReadRights:
    """The rights to read. ``tokens``: digests of the tokens, one of which a reader needs; empty: no token is needed.
    ``page_reason``: why the page cannot be read while there are no tokens. ``is_local``: it listens on loopback, and
    refuses requests under other hosts' names."""

    tokens: tuple[bytes, ...]
    page_reason: str
    is_local: bool

    def refusal(self, request: WebRequest, route: Route) -> Reply | None:
        """Return the reply that refuses a request; None: the request may be answered."""
        if self.is_local and not _is_own_name(request.headers.get("host", "")):
            return _said(421, "this address answers to localhost only")
        if route.is_open:
            return None
        if self.tokens and not self._is_known(request.headers.get("authorization", "")):
            headers = ('WWW-Authenticate: Basic realm="kvstore: any name, and the token", charset="UTF-8"',)
            return Reply(401, b"a token of server.metrics_token_file is needed, as password or bearer\n", TEXT, headers)
        if route.is_page and not self.tokens and self.page_reason:
            return _said(403, self.page_reason)
        return None

    def _is_known(self, authorization: str) -> bool:
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() == "basic":
            try:
                given = base64.b64decode(given, validate=True).decode().partition(":")[2]
            except ValueError:  # no base64, or no text
                return False
        elif scheme.lower() != "bearer":
            return False
        digest = hashlib.sha256(given.strip().encode()).digest()
        return any([hmac.compare_digest(digest, token) for token in self.tokens])  # noqa: C419 - looks at every one


class Web:
    """The listener. ``routes``: the routes by path."""

    def __init__(self, listener: socket.socket, routes: Mapping[str, Route], gate: ReadRights) -> None:
        self._listener = listener
        self._routes = routes
        self._gate = gate
        self._open_count = 0
        self._silent: dict[asyncio.Timeout, None] = {}
        """The limits of the connections whose clients have not asked yet, those that wait longest first."""

    def start(self) -> None:
        """Start answering in a thread, until the process ends. Raises Unavailable where no thread can be started."""
        start_thread(self._run, "web")

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception:  # noqa: BLE001 - the boundary: the service goes on without its page
            _log.exception("the metrics page ended")

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._connection, sock=self._listener, limit=REQUEST_BYTES_MAX, backlog=BACKLOG_COUNT
        )
        await server.serve_forever()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, and close the connection in any case."""
        self._open_count += 1
        try:
            request = None
            reply = Reply(503, b"too many read this page: try again\n", TEXT, ("Retry-After: 5",))
            if self._has_room():
                data = await self._request(reader)
                if data is not None:
                    request = _parsed(data)
                    reply = await self._answer(request)
            async with asyncio.timeout(REPLY_S_MAX):
                writer.write(_rendered(reply, request))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, EOFError, asyncio.LimitOverrunError):
            writer.transport.abort()
        finally:
            self._open_count -= 1

    def _has_room(self) -> bool:
        """Return whether one more connection may ask. Where there are too many, the one that has waited longest for its
        client's request is turned away: else connections that ask nothing would keep probes from being answered."""
        if self._open_count <= CONNECTION_COUNT_MAX:
            return True
        longest = next(iter(self._silent), None)
        if longest is None or self._open_count > 2 * CONNECTION_COUNT_MAX:  # those turned away have not left yet
            return False
        del self._silent[longest]
        if not longest.expired():
            longest.reschedule(0.0)  # has passed by every loop's clock
        return True

    async def _request(self, reader: asyncio.StreamReader) -> bytes | None:
        """Return the client's request; None: it was turned away for another. Raises TimeoutError."""
        limit = asyncio.timeout(REQUEST_S_MAX)
        try:
            async with limit:
                self._silent[limit] = None
                return await reader.readuntil(b"\r\n\r\n")
        except TimeoutError:
            if limit in self._silent:
                raise
            return None
        finally:
            self._silent.pop(limit, None)

    async def _answer(self, request: WebRequest | None) -> Reply:
        if request is None:
            return _said(400, "this is no request")
        if request.method not in ("GET", "HEAD"):
            return Reply(405, b"nothing can be changed here\n", TEXT, ("Allow: GET, HEAD",))
        route = self._routes.get(request.path)
        if route is None:
            return _said(404, f"there are: {' '.join(self._routes)}")
        try:
            refusal = self._gate.refusal(request, route)
            if refusal is not None:
                return refusal
            async with asyncio.timeout(ANSWER_S_MAX):
                return await route.answer(request)
        except TimeoutError:
            return _said(503, "the service does not answer")
        except Exception:  # noqa: BLE001 - the boundary: one request that fails ends no other
            _log.exception("a page could not be made", extra={"path": request.path})
            return _said(503, "it could not be made: see the service's log")


def _said(status: int, words: str) -> Reply:
    return Reply(status, f"{words}\n".encode())


def _parsed(data: bytes) -> WebRequest | None:
    """Return the request; None for bytes that are no request."""
    first, *lines = data.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return None
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return WebRequest(words[0], words[1].partition("?")[0], headers)


def _rendered(reply: Reply, request: WebRequest | None) -> bytes:
    body, headers = reply.body, [*HEADERS, *reply.headers]
    if request is not None and "gzip" in request.headers.get("accept-encoding", "") and len(body) > 1024:
        body = _zipped(body)
        headers.append("Content-Encoding: gzip")
    head = [
        f"HTTP/1.1 {reply.status} {REASONS[reply.status]}", f"Content-Type: {reply.kind}",
        f"Content-Length: {len(body)}", *headers,
    ]  # fmt: skip
    is_head = request is not None and request.method == "HEAD"
    return "\r\n".join([*head, "", ""]).encode("latin-1") + (b"" if is_head else body)


@lru_cache(maxsize=16)
def _zipped(body: bytes) -> bytes:
    """Return the body as gzip. Results are cached, because one rendering is sent to all who read within a second."""
    return gzip.compress(body, 1)


def _is_own_name(host: str) -> bool:
    """True when the Host header names loopback. If another site's name for 127.0.0.1 were answered, that site's scripts
    could read the page."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    return is_loopback(name.strip("[]"))


def port_of(listener: socket.socket) -> int:
    """Return the port of a listening socket."""
    return int(listener.getsockname()[1])


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises OSError."""
    family = socket.AF_INET6 if _is_six(host) else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG_COUNT)


def _is_six(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False
