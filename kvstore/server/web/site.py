"""The port of the page: its paths, their answers, and the rights to read them."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import logging
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from kvstore.config import LoadedSettings
from kvstore.controller import Controller, Stats
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.seams import Clock
from kvstore.server.metrics import Scrape, exposition, exposition_form, sum_of_tenants
from kvstore.server.secrets import read_private
from kvstore.server.web.facts import Overview
from kvstore.server.web.listener import ReadRights, Reply, Route, Web, WebRequest, listen, port_of
from kvstore.units import is_loopback

TOKEN_SETTING = "server.metrics_token_file"  # noqa: S105 - a setting's name
TOKEN_CHARACTERS_MIN = 16
FILE_BYTES_MAX = 1 << 16
FACTS_AGE_S, SCRAPE_AGE_S = 1.0, 0.25
"""Seconds for which one answer of the service serves every reader."""
HERE = Path(__file__).parent
FILES = {
    "/": ("page.html", "text/html; charset=utf-8"), "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}  # fmt: skip
_log = logging.getLogger("kvstore.web")
Told = TypeVar("Told")


class WebQuestion(Generic[Told]):
    """A question of the web's thread to the service's loop. One answer, rendered once in each form, serves all readers
    that wait for it and all that ask before it is ``age_s`` seconds old. So many readers cost the service no more
    processor time than one."""

    def __init__(
        self, ask: Callable[[], Coroutine[Any, Any, Told]], render: Callable[[Told, str], Reply],
        loop: asyncio.AbstractEventLoop, clock: Clock, age_s: float,
    ) -> None:  # fmt: skip
        self._ask = ask
        self._render = render
        self._loop = loop
        self._clock = clock
        self._age_s = age_s
        self._gate = asyncio.Lock()
        self._told: tuple[float, Told] | None = None
        self._replies: dict[str, Reply] = {}

    async def get(self, form: str = "") -> Reply:
        """Return the answer, rendered in a form. Runs in the web's thread; the caller bounds the wait."""
        came_s = self._clock.monotonic()
        async with self._gate:
            now_s = self._clock.monotonic()
            if self._told is None or self._told[0] < min(came_s, now_s - self._age_s):
                found = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._ask(), self._loop))
                self._told, self._replies = (now_s, found), {}
            reply = self._replies.get(form)
            if reply is None:
                reply = self._replies[form] = self._render(self._told[1], form)
            return reply


class Site:
    """The routes of one service. ``is_ready`` is set once all tenants are served, and cleared when the service
    stops."""

    def __init__(
        self, controllers: Mapping[str, Controller], overview: Overview, loop: asyncio.AbstractEventLoop, clock: Clock,
        *, shows_tenants: bool,
    ) -> None:  # fmt: skip
        """``shows_tenants``: True to show each tenant's metrics to readers of the port; else they see all tenants'
        together."""
        self._controllers = controllers
        self._shows_tenants = shows_tenants
        self._scrape = WebQuestion(self._scraped, _metrics_page, loop, clock, SCRAPE_AGE_S)
        self._facts = WebQuestion(overview.facts, _facts_page, loop, clock, FACTS_AGE_S)
        self._alive = WebQuestion(
            self._answers, lambda _, said: Reply(200, f"{said}\n".encode()), loop, clock, SCRAPE_AGE_S
        )
        self.is_ready = False

    def routes(self) -> dict[str, Route]:
        """Return the routes by path."""
        found = {path: Route(_file(*of), is_page=True) for path, of in FILES.items()}
        return found | {
            "/page.json": Route(self._json, is_page=True), "/metrics": Route(self._metrics),
            "/healthz": Route(self._health, is_open=True), "/readyz": Route(self._ready, is_open=True),
        }  # fmt: skip

    # ------------------------------------------------------------ on the service's loop

    async def _scraped(self) -> Scrape:
        """Return the counts. Other requests are answered between two tenants."""
        counted, stats = dict[str, str](), dict[str, Stats]()
        for name, controller in self._controllers.items():
            counted |= controller.counted
            stats[name] = controller.stats()
            await asyncio.sleep(0)
        return Scrape(stats if self._shows_tenants else {"": sum_of_tenants(stats.values())}, counted)

    async def _answers(self) -> bool:
        return True

    # ------------------------------------------------------------ in the web's thread

    async def _json(self, request: WebRequest) -> Reply:
        return await self._facts.get()

    async def _metrics(self, request: WebRequest) -> Reply:
        return await self._scrape.get(exposition_form(request.headers.get("accept", "")))

    async def _health(self, request: WebRequest) -> Reply:
        return await self._alive.get("ok")

    async def _ready(self, request: WebRequest) -> Reply:
        alive = await self._alive.get("ready")
        return alive if self.is_ready else Reply(503, b"not ready: it starts, or stops\n")


def _facts_page(facts: dict[str, Any], _: str) -> Reply:
    return Reply(200, json.dumps(facts).encode(), "application/json")


def _metrics_page(scrape: Scrape, form: str) -> Reply:
    return Reply(200, exposition(scrape, form), form)


def _file(name: str, kind: str) -> Callable[[WebRequest], Any]:
    body = (HERE / name).read_bytes()

    async def give(_: WebRequest) -> Reply:
        return Reply(200, body, kind)

    return give


def start_web(loaded: LoadedSettings, site: Site) -> str:
    """Serve the page, and return its address. A default port that is taken is replaced by a free one; a configured one
    that is taken stops the start with Unavailable. Raises InvalidRequest for a token file that cannot be used."""
    settings = loaded.settings.server
    gate = gate_of(loaded)
    try:
        listener = listen(settings.metrics_host, settings.metrics_port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise Unavailable(
                f"server.metrics_host = {settings.metrics_host}, server.metrics_port = {settings.metrics_port}: nobody "
                f"can listen there ({error.strerror}): name an address of this machine, and a port that is free to use"
            ) from error
        if not loaded.is_default("server.metrics_port"):
            raise Unavailable(
                f"metrics port {settings.metrics_port} on {settings.metrics_host} cannot be had ({error.strerror}): "
                "set server.metrics_port to a free one"
            ) from error
        listener = listen(settings.metrics_host, 0)
        _log.warning("the default metrics port is taken, using another", extra={"port": port_of(listener)})
    Web(listener, site.routes(), gate).start()
    host = f"[{settings.metrics_host}]" if ":" in settings.metrics_host else settings.metrics_host
    return f"http://{host}:{port_of(listener)}/metrics"


def gate_of(loaded: LoadedSettings) -> ReadRights:
    """Return the rights to read, as the settings say."""
    settings = loaded.settings.server
    is_local = is_loopback(settings.metrics_host)
    reason = ""
    if not is_local:
        reason = f"server.metrics_host = {settings.metrics_host} is not loopback: set {TOKEN_SETTING} to show the page"
    elif len(loaded.settings.tenant_names) > 1:
        reason = f"the page names all tenants' models: set {TOKEN_SETTING} to show it"
    return ReadRights(read_page_tokens(settings.metrics_token_file), reason, is_local)


def read_page_tokens(name: str) -> tuple[bytes, ...]:
    """Return the digests of a file's tokens, one on each line. Raises InvalidRequest naming the setting, and never a
    token."""
    if not name:
        return ()
    path = Path(name)
    data = read_private(path, TOKEN_SETTING, FILE_BYTES_MAX + 1, "one token per line")
    if len(data) > FILE_BYTES_MAX:  # the last token would be cut, and a cut token would let others in
        raise InvalidRequest(
            f"{TOKEN_SETTING} = {path}: it has more than {FILE_BYTES_MAX} bytes: write one token per line",
            setting=TOKEN_SETTING,
        )
    found = [line.partition(b"#")[0].strip() for line in data.splitlines()]
    tokens = [each for each in found if each]
    if not tokens or min(map(len, tokens)) < TOKEN_CHARACTERS_MIN:
        raise InvalidRequest(
            f"{TOKEN_SETTING} = {path}: write one token per line, {TOKEN_CHARACTERS_MIN} characters or more each",
            setting=TOKEN_SETTING,
        )
    return tuple(hashlib.sha256(each).digest() for each in tokens)
