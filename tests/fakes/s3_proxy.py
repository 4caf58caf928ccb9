"""A line between S3 clients and a real server that knows what is asked, and can answer wrongly: for what a line of
bytes alone cannot do."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType
from typing import Any, Self

import aiohttp
from aiohttp import web
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.session import get_session

from tests.fakes.switches import POLL_S, Switch

BODY_BYTES_MAX = 1 << 30
CONDITIONS = {"if-match", "if-none-match"}
OF_A_HOP = {"connection", "keep-alive", "transfer-encoding", "expect", "server", "date"}


class S3Proxy:
    """Listens at ``url``. What it does wrong may be changed at any time.

    ``ignores_conditions``: the server hears of none. ``never_matches``: no object has the ETag of an If-Match, as
    with Ceph's gateway, which compares the quotes, too. ``matches_deletes``: a DELETE's If-Match is looked at, as by
    Amazon, and as moto does not. ``cut_at``, ``stall_at``: after so many bytes of a body the
    connection ends, or nothing more comes. ``refusals``: (HTTP status, code) in the place of the next answers;
    ``abort_count``: so many requests end with their connection. ``denied``: the methods that are answered by
    AccessDenied. ``full``: the code that what writes is answered by. ``owner``: whose the bucket is; who expects
    another one is denied. ``region``: the bucket's; who signs for another one is sent there. ``expired``: an access
    key that was good once. ``drops``: headers that are lost on the way, there and back. ``loses``: (method, words
    of the query, refusals); the answer to the next such request is lost once the server has done it, and those are
    the next answers. ``page``, ``page_status``: what everybody is given, as by a login page. ``asked``: every
    request: method, path, headers."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._is_closed = False
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        self.turn_off()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="s3-proxy", daemon=True).start()
        port = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        self.url = f"http://127.0.0.1:{port}"

    def turn_on(self, *switches: Switch) -> None:
        """These, and no others."""
        self._switches = frozenset(switches)

    def turn_off(self) -> None:
        """From now on it is a good line."""
        self._switches: frozenset[Switch] = frozenset()
        self.ignores_conditions = self.never_matches = self.matches_deletes = False
        self.cut_at: int | None = None
        self.stall_at: int | None = None
        self.refusals: list[tuple[int, str]] = []
        self.denied: frozenset[str] = frozenset()
        self.full = self.owner = self.region = self.expired = self.page = ""
        self.page_status = 200
        self.drops: frozenset[str] = frozenset()
        self.loses: tuple[str, str, list[tuple[int, str]]] | None = None
        self.abort_count = 0
        self._held, self._heard = "", threading.Event()

    def hears(self, method: str) -> threading.Event:
        """From the next request of this kind on it is stalled; set once that has come."""
        self._held, self._heard = method, threading.Event()
        return self._heard

    @property
    def is_stalled(self) -> bool:
        return Switch.STALLED in self._switches

    async def _listen(self) -> int:
        self._session = aiohttp.ClientSession(auto_decompress=False)
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return int(site._server.sockets[0].getsockname()[1])

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.method, request.path_qs, dict(request.headers)))
        if request.method == self._held:
            self._switches |= {Switch.STALLED}
            self._heard.set()
        while Switch.STALLED in self._switches:  # noqa: ASYNC110 - another thread ends it
            await asyncio.sleep(POLL_S)
        if Switch.AWAY in self._switches or self.abort_count:
            self.abort_count -= bool(self.abort_count)
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        sent = await request.read()
        if self.refusals:
            return refusal(*self.refusals.pop(0))
        if self.page:
            return web.Response(status=self.page_status, text=self.page, content_type="text/html")
        if self.region and f"/{self.region}/s3/" not in request.headers.get("Authorization", ""):
            return refusal(301, "PermanentRedirect", {"x-amz-bucket-region": self.region})
        if self.expired and f"Credential={self.expired}/" in request.headers.get("Authorization", ""):
            return refusal(400, "ExpiredToken")
        if self.never_matches and "If-Match" in request.headers:
            return refusal(412, "PreconditionFailed")
        expected = request.headers.get("x-amz-expected-bucket-owner", self.owner)
        if request.method in self.denied or (self.owner and expected != self.owner):
            return refusal(403, "AccessDenied")
        if self.full and request.method in ("PUT", "POST"):
            return refusal(403, self.full)
        dropped = OF_A_HOP | self.drops | (CONDITIONS if self.ignores_conditions else frozenset())
        headers = {name: value for name, value in request.headers.items() if name.lower() not in dropped}
        url = self._upstream + request.raw_path
        if self.matches_deletes and request.method == "DELETE":
            async with self._session.head(url, headers=signed_anew("HEAD", url, {}, b"")) as there:
                if request.headers.get("If-Match", "*") not in ("*", there.headers.get("ETag")):
                    return refusal(412, "PreconditionFailed")
        if (self.ignores_conditions or self.drops) and "Authorization" in headers:
            headers = signed_anew(request.method, url, headers, sent)
        async with self._session.request(request.method, url, data=sent, headers=headers) as answer:
            data = bytearray(await answer.read())
        if self.loses is not None and (request.method, self.loses[1] in request.query_string) == (self.loses[0], True):
            self.loses, self.refusals = None, self.loses[2]
            assert request.transport is not None
            request.transport.abort()
        answered = {name: value for name, value in answer.headers.items() if name.lower() not in OF_A_HOP | self.drops}
        status = self._altered(request, answer.status, data)
        if status != answer.status:
            lie = web.Response(status=status, headers={"ETag": '"of-no-object"'})
            return refusal(404, "NoSuchKey") if status == 404 else lie
        return await self._give(request, status, answered, data)

    def _altered(self, request: web.Request, status: int, data: bytearray) -> int:
        """The status to give; the data may be damaged."""
        is_read = request.method in ("GET", "HEAD")
        if is_read and Switch.ABSENT in self._switches:
            return 404
        if request.method == "HEAD" and Switch.LYING in self._switches:
            return 404 if status == 200 else 200
        if data and request.method == "GET":
            body_at = 0
            if request.headers.get("Range", "").startswith("bytes=0-"):
                body_at = min(int.from_bytes(data[12:16], "little"), len(data))
            if Switch.GARBLED in self._switches and body_at:
                data[body_at // 2] ^= 1
            if Switch.CORRUPT in self._switches and body_at < len(data):
                data[(body_at + len(data)) // 2] ^= 1
        return status

    async def _give(
        self, request: web.Request, status: int, headers: dict[str, str], data: bytearray
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=status, headers=headers)
        await response.prepare(request)
        if request.method != "HEAD":
            end = self.cut_at if self.cut_at is not None else self.stall_at
            if end is None or end >= len(data) or status >= 300:
                await response.write(bytes(data))
            else:
                await response.write(bytes(data[:end]))
                while self.stall_at is not None:  # noqa: ASYNC110 - another thread ends it
                    await asyncio.sleep(POLL_S)
                assert request.transport is not None
                request.transport.abort()
                return response
        await response.write_eof()
        return response

    def close(self) -> None:
        """Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self.turn_off()
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
            self._loop.call_soon_threadsafe(self._loop.stop)

    async def _end(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()


def signed_anew(method: str, url: str, headers: dict[str, str], data: bytes) -> dict[str, str]:
    """The headers with another signature, by the keys of the environment: a server that looks at signatures refuses a
    request from which a signed header is gone."""
    request = AWSRequest(method, url, headers, data)
    S3SigV4Auth(get_session().get_credentials(), "s3", "us-east-1").add_auth(request)
    return dict(request.headers.items())


def refusal(status: int, code: str, headers: dict[str, str] | None = None) -> Any:
    """As S3 says no."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>"
    return web.Response(status=status, text=body, content_type="application/xml", headers=headers)
