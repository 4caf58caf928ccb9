"""The boundary of every handler of the remote plane: it checks the caller's token, and turns errors into statuses."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from kvstore.config import DEFAULT_TENANT
from kvstore.errors import DeadlineExceeded, Exhausted, KVStoreError, PermissionDenied, Unauthenticated
from kvstore.remote.node import Node
from kvstore.remote.session import SidecarSession
from kvstore.remote.tokens import AccessTokens
from kvstore.seams import SystemClock
from kvstore.server.rpc import LASTING, Context, abort
from kvstore.telemetry import TRACE_HEADERS, BoundedLines, Counters, log_on_as
from kvstore.wire import METADATA_SESSION, METADATA_TOKEN

ABORT_TIMEOUT_S = 1.0
LASTING_REMOTE = ("Connect", *LASTING)
"""Methods whose calls last as long as their callers."""
_log = logging.getLogger("kvstore.remote")
_lines = BoundedLines(_log, SystemClock())


class Guard:
    """Finds the caller's tenant and session, and checks his rights and his tenant's number of calls."""

    def __init__(self, tokens: AccessTokens, nodes: dict[str, Node], call_count_max: int) -> None:
        """``call_count_max``: calls of one tenant at once, each of which may hold a message in memory, and as many that
        last."""
        self._tokens = tokens
        self._nodes = nodes
        self._call_count_max = call_count_max
        self._calls: Counter[tuple[str, bool]] = Counter()
        self._open: dict[asyncio.Task[Any], tuple[Node, Any]] = {}
        """The calls whose tasks have not ended, each with its tenant's sidecar and its metadata."""

    def enter(self, node: Node, method: str, metadata: Any, call: asyncio.Task[Any]) -> None:
        """Count a call of a tenant until its task ends: those that last as long as their callers, and the others, each
        by themselves, so that others are served however many last. Raises Exhausted past remote.call_count_max."""
        lasts = method.rpartition("/")[2] in LASTING_REMOTE
        if self._calls[node.tenant, lasts] >= self._call_count_max:
            kind, remedy = ("streams that last", "end some") if lasts else ("calls", "wait for some")
            raise Exhausted(f"{self._call_count_max} {kind} at once: {remedy}, or raise remote.call_count_max")
        self._calls[node.tenant, lasts] += 1
        call.add_done_callback(lambda _: self._calls.subtract(((node.tenant, lasts),)))
        self._open[call] = node, metadata
        call.add_done_callback(self._open.pop)

    def node(self, metadata: Any) -> Node:
        """Return the sidecar of the caller's tenant, by his token. Raises Unauthenticated."""
        return self._nodes[self._tokens.tenant(_value(metadata, METADATA_TOKEN))]

    def check_admin(self, context: Context) -> None:
        """Raises PermissionDenied for a caller whose token does not name the operator's right."""
        if not self._tokens.may_administer(_value(context.invocation_metadata(), METADATA_TOKEN)):
            raise PermissionDenied(
                "this token may not ask what operators ask: write the word admin after it in the sidecar's token file "
                "(remote.token_file, or its tenant's), or ask by the unix socket"
            )

    def check_call(self) -> None:
        """Raises Unauthenticated where the token of this task's call does not name its tenant any more."""
        call = asyncio.current_task()
        assert call is not None
        self._check(call)

    def _check(self, call: asyncio.Task[Any]) -> None:
        node, metadata = self._open[call]
        if self.node(metadata) is not node:
            raise Unauthenticated("the token is another tenant's by now: connect again")

    def end_gone(self) -> None:
        """End the calls whose tokens do not name their tenants any more, also those whose clients neither send nor take
        anything."""
        for call in list(self._open):
            try:
                self._check(call)
            except Unauthenticated:
                call.cancel()

    def said(self, node: Node) -> str:
        """Return the tenant's name in logs; empty where the default tenant is the only one."""
        return "" if list(self._nodes) == [DEFAULT_TENANT] else node.tenant

    def session(self, context: Context) -> tuple[Node, SidecarSession]:
        """Return the caller's session, which must be one of his own tenant. Raises Unauthenticated."""
        node = self.node(context.invocation_metadata())
        return node, node.session(_value(context.invocation_metadata(), METADATA_SESSION) or b"")


def carried_by(session: SidecarSession, context: Context) -> tuple[tuple[str, str | bytes], ...]:
    """Return the metadata of a call to the sidecar for a client's call: the session, and the client's trace."""
    trace = [(key, value) for key, value in context.invocation_metadata() or () if key in TRACE_HEADERS]
    return (*session.metadata, *trace)


def _value(metadata: Any, name: str) -> Any:
    return next((value for key, value in metadata or () if key == name), None)


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpcio ships no types
    """Refuses calls without a good token, and calls past the tenant's limit, before their messages are read. Logs of
    the other calls name their tenants."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._refused_count = 0

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        try:
            node = self._guard.node(details.invocation_metadata)
            log_on_as(self._guard.said(node))
        except Unauthenticated as error:
            self._refused_count += 1
            if self._refused_count & (self._refused_count - 1) == 0:  # 1, 2, 4, 8: guessing does not fill the logs
                _log.warning("calls without a good token", extra={"count": self._refused_count})
            return _refusal(error)
        call = asyncio.current_task()
        assert call is not None
        try:
            self._guard.enter(node, details.method, details.invocation_metadata, call)
        except Exhausted as error:
            return _refusal(error)
        return await continuation(details)


def _refusal(error: KVStoreError) -> Any:
    async def refuse(_requests: Any, context: Context) -> None:
        await context.abort(grpc.StatusCode[error.status], error.message)

    return grpc.stream_stream_rpc_method_handler(refuse)


def guarded(
    function: Callable[..., Awaitable[Any]], name: str, counters: Counters, check: Callable[[], None]
) -> Callable[..., Awaitable[Any]]:
    """Return the handler with its errors turned into statuses. A call whose client has gone, or does not take the
    status, is cancelled. ``check``: raises the error of a call that was cancelled here."""

    async def run(request: Any, context: Context) -> Any:
        try:
            return await function(request, context)
        except asyncio.CancelledError:
            check()
            raise

    async def handle(request: Any, context: Context) -> Any:
        try:
            return await run(request, context)
        except grpc.aio.InternalError as error:  # its client went: gRPC says so a moment later
            raise asyncio.CancelledError from error
        except Exception as error:  # noqa: BLE001 - the boundary: everything becomes a status
            if isinstance(error, DeadlineExceeded):
                _lines.line(logging.WARNING, "stream given up", rpc=name, reason=error.message)
            try:
                async with asyncio.timeout(ABORT_TIMEOUT_S):
                    await abort(error, name, context, counters)
            except TimeoutError:
                raise asyncio.CancelledError from error

    return handle
