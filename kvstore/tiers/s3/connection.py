"""One client of an endpoint per process, on an event loop in a thread of its own, so that signing, TLS and the bytes
themselves never pass through the loop that answers clients. Jobs block their lane's thread until their work on that
loop has ended, well or not: then nothing touches the memory that they were lent."""

from __future__ import annotations

import asyncio
import atexit
import gc
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeVar

from kvstore.config import S3Settings
from kvstore.errors import DeadlineExceeded
from kvstore.seams import SystemRandom
from kvstore.seams.scheduler import start_thread
from kvstore.tiers.s3.refusals import CLOSED, RETRIED, STALE, refusal_of

Result = TypeVar("Result")
ATTEMPTS_MAX = 4
BACKOFF_S, BACKOFF_S_MAX = 0.05, 2.0
CONNECT_S_MAX = 3.0
HIDES_S = 30.0
CLOSE_S_MAX = 1.0
RENEW_S_MIN = 1.0
"""Credentials are read at most once in so many seconds."""
CONNECTIONS_BESIDES = 16
"""Connections in addition to one for each reader and writer: a read has several ranges, an upload several parts."""
QUESTIONS_AT_ONCE = 16
"""Connections that are for questions alone: a lookup has no time to wait until a body has passed."""
_CREDENTIALS = "where credentials come from: tiers.s3.profile, tiers.s3.credentials_file, or the machine's role"


class RetryBudget:
    """Limits retries: each answered request earns a tenth of a retry. So a store that refuses everything is asked
    hardly more often than without retries."""

    EARNED, FIRST, MOST = 0.1, 4.0, 10.0

    def __init__(self) -> None:
        self._left = self.FIRST

    def earn(self) -> None:
        self._left = min(self._left + self.EARNED, self.MOST)

    def spend(self) -> bool:
        """Take one retry from the budget. Returns False when none is left."""
        if self._left < 1:
            return False
        self._left -= 1
        return True


class _Client:
    """An endpoint's client, and the requests that use it. One that is replaced is closed once its last request has
    ended: a large body may take minutes."""

    def __init__(self, client: Any, stack: AsyncExitStack, made_s: float) -> None:
        self.client = client
        self.made_s = made_s
        self._stack = stack
        self._use_count = 0
        self._is_replaced = False

    @asynccontextmanager
    async def used(self) -> AsyncIterator[Any]:
        """Lend the client to a request."""
        self._use_count += 1
        try:
            yield self.client
        finally:
            self._use_count -= 1
            await self._close_unused()

    async def replace(self) -> None:
        """Close the client as soon as no request uses it."""
        self._is_replaced = True
        await self._close_unused()

    async def _close_unused(self) -> None:
        if self._is_replaced and not self._use_count:
            await self._stack.aclose()


class S3Connection:
    """A client, and the loop that it runs on. ``is_conditional``: False once the endpoint has said that it knows no
    conditional writes."""

    def __init__(self, settings: S3Settings) -> None:
        self._settings = settings
        self._loop = asyncio.new_event_loop()
        self._client: _Client | None = None
        self._opening = asyncio.Lock()
        self._random = SystemRandom()
        self._budget = RetryBudget()
        self._bodies = asyncio.Semaphore(connection_count(settings))
        self.is_conditional = True
        self._hides_until_s = float("-inf")
        start_thread(self._loop.run_forever, "s3")

    def run(self, work: Callable[[S3Connection], Coroutine[Any, Any, Result]], deadline_s: float) -> Result:
        """Run the work on this connection's loop and return its result. When this returns the work has ended. Blocking.
        Raises Refused; DeadlineExceeded."""
        return asyncio.run_coroutine_threadsafe(self._bounded(work, deadline_s), self._loop).result()

    async def _bounded(self, work: Callable[[S3Connection], Coroutine[Any, Any, Result]], deadline_s: float) -> Result:
        try:
            async with asyncio.timeout(deadline_s):
                return await work(self)
        except TimeoutError as error:
            way = "the way to tiers.s3.endpoint_url" if self._client else _CREDENTIALS
            raise DeadlineExceeded(f"tiers.s3: no end after {deadline_s:g} s: check {way}") from error

    async def ask(self, request: Callable[[Any], Awaitable[Result]], *, is_urgent: bool = False) -> Result:
        """Make one request, and read its answer to the end. Try again where that may help, once where it is urgent: the
        caller has no time for more, but one lookup is many questions, and each would fail it. A connection, or
        credentials, that were kept too long are renewed in any case. Raises Refused."""
        for attempt in range(ATTEMPTS_MAX):
            held: _Client | None = None
            try:
                held = await self._ready()
                async with held.used() as client, nullcontext() if is_urgent else self._bodies:
                    answer = await request(client)
            except Exception as error:
                refused = refusal_of(error)
                if refused.status and refused.code not in RETRIED:
                    self._budget.earn()  # a miss is an answer, too
                is_renewed = refused.code in STALE and held is not None and await self._renew(held)
                is_closed = (refused.code in CLOSED or is_renewed) and not attempt
                is_worth_it = is_closed or (refused.code in RETRIED and not (is_urgent and attempt))
                is_free = is_renewed and not attempt  # all that are on their way meet old credentials at once
                if not is_worth_it or attempt + 1 == ATTEMPTS_MAX or not (is_free or self._budget.spend()):
                    raise refused from error
            else:
                self._budget.earn()
                return answer
            await asyncio.sleep(0 if is_closed else self._backoff_s(attempt))
        raise AssertionError("the last attempt returns or raises")

    def _backoff_s(self, attempt: int) -> float:
        """Return the seconds to wait: random, so that requests that were refused together do not come again
        together."""
        share = int.from_bytes(self._random.bytes(4), "little") / (1 << 32)
        return float(share * min(BACKOFF_S * 2**attempt, BACKOFF_S_MAX))

    @property
    def hides(self) -> bool:
        """True when a bare "403" was found a moment ago to be a denial, and no wrong key."""
        return self._loop.time() < self._hides_until_s

    def was_denied(self) -> None:
        """Record that a bare "403" was a denial: for a while it needs no second question."""
        self._hides_until_s = self._loop.time() + HIDES_S

    async def _ready(self) -> _Client:
        if self._client is None:
            async with self._opening:
                if self._client is None:
                    stack = AsyncExitStack()
                    client = await stack.enter_async_context(_client_of(self._settings))
                    self._client = _Client(client, stack, self._loop.time())
        return self._client

    async def open(self) -> None:
        """Make the client, which takes a second of work the first time. Raises Refused."""
        try:
            await self._ready()
        except Exception as error:
            raise refusal_of(error) from error
        gc.freeze()  # what a client is made of stays: collections pass over it

    def close(self) -> None:
        """Close the client when the process ends, because aiohttp reports each client that is left open: whoever runs a
        command would read that on stderr. A client that a request still uses is left open, and so is one that does not
        close: the process ends in any case. Blocking, for a second at most."""
        with suppress(Exception):
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(CLOSE_S_MAX)

    async def _close(self) -> None:
        held, self._client = self._client, None
        if held is not None:
            await held.replace()

    async def _renew(self, held: _Client) -> bool:
        """Have the next request read its credentials anew. Returns True when they are newer than this client's: another
        request may have renewed them. Credentials that were read a moment ago are not read again."""
        if held is self._client:
            if self._loop.time() - held.made_s < RENEW_S_MIN:
                return False
            self._client = None
            await held.replace()
            gc.collect()  # a client is a megabyte in circles, which the collector would leave for hundreds of renewals
        return True


def connection_count(settings: S3Settings) -> int:
    """Return the number of connections that a process has for anything but questions."""
    return settings.reader_count + settings.writer_count + CONNECTIONS_BESIDES


def _client_of(settings: S3Settings) -> Any:
    """Return a client that is not open yet. Imports here: only processes that use S3 pay for it."""
    from aiobotocore.config import AioConfig
    from aiobotocore.session import AioSession

    session = AioSession(profile=settings.profile or None)
    session.register_component("data_loader", _loader())
    if settings.credentials_file:
        session.set_config_variable("credentials_file", settings.credentials_file)
    region = settings.region or session.get_config_variable("region") or None
    if settings.endpoint_url and not region:
        region = "us-east-1"  # the region that other vendors' stores expect in signatures
    config = AioConfig(
        s3={"addressing_style": settings.addressing, "payload_signing_enabled": False},
        retries={"total_max_attempts": 1, "mode": "standard"},  # our own retries have a budget
        connect_timeout=min(CONNECT_S_MAX, settings.timeout_s),
        read_timeout=settings.timeout_s,
        max_pool_connections=connection_count(settings) + QUESTIONS_AT_ONCE,
        request_checksum_calculation="when_required",  # a body's is computed in the lane's thread, not on the loop
        response_checksum_validation="when_required",  # strips have checksums of their own
        proxies={"http": settings.proxy, "https": settings.proxy} if settings.proxy else None,
    )
    session.register("before-sign.s3", _without_expectation)
    session.register("before-call.s3.HeadBucket", _without_a_search)
    return session.create_client(
        "s3", region_name=region, endpoint_url=settings.endpoint_url or None, verify=settings.ca_file or None,
        config=config,
    )  # fmt: skip


@cache
def _loader() -> Any:
    """Return botocore's descriptions of services, read once: that is most of the work of making a client."""
    from botocore.loaders import create_loader

    return create_loader()


def _without_expectation(request: Any, **_: object) -> None:
    """Send a body at once: the object there was looked at before, and a store that never says "100 Continue" would be
    waited for without end."""
    del request.headers["Expect"]


def _without_a_search(**_: object) -> Any:
    """Answer botocore's question for a bucket's region ourselves. Botocore takes the region from an answer that
    redirects a request; where that names none it would ask for the region, and again when that question is redirected:
    a server that redirects http to https would be asked thousands of times."""
    nothing = {"Error": {"Code": "404"}, "ResponseMetadata": {"HTTPStatusCode": 404, "HTTPHeaders": {}}}
    return SimpleNamespace(status_code=404), nothing


async def together(works: Iterable[Coroutine[Any, Any, Result]], at_once: int) -> list[Result]:
    """Return the results of all works, ``at_once`` at a time. Raises the first error, once none of the works runs."""
    limit = asyncio.Semaphore(at_once)

    async def one(work: Coroutine[Any, Any, Result]) -> Result:
        async with limit:
            return await work

    waiting = list(works)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(work)) for work in waiting]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    finally:
        for work in waiting:
            work.close()  # a work that never had its turn
    return [task.result() for task in tasks]


_connections: dict[object, S3Connection] = {}
_lock = threading.Lock()


def connection_to(settings: S3Settings) -> S3Connection:
    """Return this process's connection, made at the first call. Settings that reach the same endpoint share it,
    whatever they store there."""
    reach = (
        settings.endpoint_url, settings.region, settings.profile, settings.credentials_file, settings.addressing,
        settings.proxy, settings.ca_file, settings.timeout_s, settings.reader_count, settings.writer_count,
    )  # fmt: skip
    with _lock:
        found = _connections.get(reach)
        if found is None:
            found = _connections[reach] = S3Connection(settings)
            atexit.register(found.close)
        return found
