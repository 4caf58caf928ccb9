"""The TCP listener. Calls that carry names are forwarded to the sidecar unchanged; calls that carry bytes are answered
here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from kvstore.errors import DeadlineExceeded, Exhausted, InvalidRequest, PermissionDenied, Unavailable
from kvstore.remote.boundary import Guard, TokenInterceptor, carried_by, guarded
from kvstore.remote.node import Node
from kvstore.remote.receiving import Receiving
from kvstore.remote.sending import Sending
from kvstore.remote.session import SidecarSession
from kvstore.remote.tokens import AccessTokens
from kvstore.server.rpc import Context
from kvstore.telemetry import Counters
from kvstore.units import is_loopback, split_address
from kvstore.v1 import remote_pb2 as rpb
from kvstore.wire.bounds import decode
from kvstore.wire.limits import REPLY_BYTES_MAX

CACHE = "kvstore.v1.CacheService"
ADMIN = "kvstore.v1alpha.AdminService"
PREFILLS = "kvstore.v1alpha.PrefillService"
FORWARDED = {
    CACHE: ("RegisterModel", "Lookup", "Locate", "Store", "Release"),
    ADMIN: ("Stats", "Tiers", "ShowChunk", "Hottest", "Plans"),
}
FORWARDED_PROFILES = ("RegisterProfile", "FindProfile")
REFUSED = "Reload"
"""The one call of AdminService that is answered on the sidecar's own host only: settings are all tenants'."""
FORWARDED_STREAMS = {CACHE: ("Watch",), ADMIN: ("ListChunks", "Change")}
ADMITTED = "Stats"
"""The one call of AdminService that needs no operator's right."""
PROTOCOL_VERSION = 1
OPTIONS = (
    ("grpc.so_reuseport", 0),
    # None: no client of ours compresses, and compressed a message that takes 64 MiB here costs its sender 64 KB.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.max_receive_message_length", REPLY_BYTES_MAX),
    ("grpc.max_concurrent_streams", 256),
    ("grpc.max_connection_idle_ms", 300_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.http2.lookahead_bytes", 4 << 20),
    # A client that vanished without closing its connection is noticed within 30 s, and its session ends. gRPC waits for
    # the answer to a keepalive ping as long as for that to any ping, by default a minute: keepalive's own time is not
    # enough.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    # Clients send keepalive pings while nothing else is sent. By default gRPC ends a connection whose pings come more
    # often than every five minutes: idle clients would lose their sessions.
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
)


class Door:
    """Serves the remote plane of the nodes whose tokens it knows."""

    def __init__(
        self, tokens: AccessTokens, nodes: dict[str, Node], *, message_bytes: int, stream_count_max: int,
        stall_s: float, connection_count_max: int, call_count_max: int,
    ) -> None:  # fmt: skip
        """``connection_count_max``: connections of all tenants; ``call_count_max``: calls of one tenant at once."""
        self._guard = Guard(tokens, nodes, call_count_max)
        self._message_bytes = message_bytes
        self._stream_count_max = stream_count_max
        self._stall_s = stall_s
        self._counters = Counters()
        self.server = grpc.aio.server(
            interceptors=(TokenInterceptor(self._guard),),
            options=(*OPTIONS, ("grpc.max_allowed_incoming_connections", connection_count_max)),
        )
        self._register()

    def listen(self, address: str, credentials: Any) -> int:
        """Listen on the address, and return the port. Raises Unavailable when the address cannot be used."""
        host, _ = split_address(address, "remote.address")
        assert credentials is not None or is_loopback(host)
        add = self.server.add_secure_port if credentials is not None else self.server.add_insecure_port
        wrong = f"remote.address = {address}: cannot listen there: use an address of this host, "
        wrong += "and a port that is free and that this user may use"
        try:
            port = add(*((address, credentials) if credentials is not None else (address,)))
        except RuntimeError as error:
            raise Unavailable(wrong) from error
        if not port:
            raise Unavailable(wrong)
        return int(port)

    def end_gone(self) -> None:
        """End the calls, and with them the sessions, whose tokens are gone."""
        self._guard.end_gone()

    def _register(self) -> None:
        for service, methods in FORWARDED.items():
            handlers = {name: self._unary(self._forward(service, name), name) for name in methods}
            for name in FORWARDED_STREAMS[service]:
                stream = self._guarded(self._forward_stream("unary_stream", service, name), name)
                handlers[name] = grpc.unary_stream_rpc_method_handler(stream)
            if service == ADMIN:
                handlers[REFUSED] = self._unary(self._refuse, REFUSED)
            self._add(service, handlers)
        talk = self._guarded(self._forward_stream("stream_stream", PREFILLS, "PartialPrefill"), "PartialPrefill")
        profiles = {name: self._unary(self._forward(PREFILLS, name), name) for name in FORWARDED_PROFILES}
        self._add(PREFILLS, {"PartialPrefill": grpc.stream_stream_rpc_method_handler(talk), **profiles})
        own = {
            "Connect": grpc.unary_stream_rpc_method_handler(self._guarded(self._connect, "Connect")),
            "FetchBytes": grpc.unary_stream_rpc_method_handler(self._guarded(self._fetch, "FetchBytes")),
            "StoreBytes": grpc.stream_unary_rpc_method_handler(self._guarded(self._store, "StoreBytes")),
        }
        self._add("kvstore.v1.RemoteService", own)

    def _unary(self, function: Callable[..., Awaitable[bytes]], name: str) -> Any:
        return grpc.unary_unary_rpc_method_handler(self._guarded(function, name))

    def _guarded(self, function: Callable[..., Awaitable[Any]], name: str) -> Callable[..., Awaitable[Any]]:
        return guarded(function, name, self._counters, self._guard.check_call)

    def _add(self, service: str, handlers: dict[str, Any]) -> None:
        generic = grpc.method_handlers_generic_handler(service, handlers)
        self.server.add_generic_rpc_handlers((generic,))

    # ------------------------------------------------------------ handlers

    def _admitted(self, service: str, name: str, context: Context) -> tuple[Node, SidecarSession]:
        """Return the caller's session. Raises Unauthenticated; PermissionDenied for a call that needs the operator's
        right if the caller lacks it."""
        found = self._guard.session(context)
        if service == ADMIN and name != ADMITTED:
            self._guard.check_admin(context)
        return found

    async def _refuse(self, _request: bytes, context: Context) -> bytes:
        self._admitted(ADMIN, REFUSED, context)
        raise PermissionDenied("settings are reloaded on the sidecar's own host, by its socket, and not over TCP")

    def _forward(self, service: str, name: str) -> Callable[..., Awaitable[bytes]]:
        """Return a handler that forwards a call to the sidecar unchanged, and passes its reply or status back."""
        path = f"/{service}/{name}"

        async def forward(request: bytes, context: Context) -> bytes:
            node, session = self._admitted(service, name, context)
            carried = carried_by(session, context)
            call = node.channel.unary_unary(path)(request, timeout=context.time_remaining(), metadata=carried)
            try:
                reply: bytes = await call
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
                raise
            if name == "RegisterModel":
                node.note_model(request, reply)
            return reply

        return forward

    def _forward_stream(self, kind: str, service: str, name: str) -> Callable[..., Awaitable[None]]:
        """As ``_forward``, for a stream of small replies. The sidecar deals with slow readers. ``kind``: unary_stream,
        or stream_stream where the client sends a stream, too, and each message but the last has one reply."""
        path = f"/{service}/{name}"

        async def forward(request: Any, context: Context) -> None:
            node, session = self._admitted(service, name, context)
            carried = carried_by(session, context)
            make, answered = getattr(node.channel, kind)(path), asyncio.Semaphore(0)
            sent = _in_turn(request, answered) if kind == "stream_stream" else request
            call = make(sent, timeout=context.time_remaining(), metadata=carried)
            try:
                async for message in call:
                    answered.release()
                    await context.write(message)
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
            finally:
                call.cancel()
                answered.release()  # else what sends the client's messages would wait for ever

        return forward

    async def _connect(self, request: bytes, context: Context) -> None:
        """Open a session, which lasts until the client ends the call, or its token is gone."""
        version = decode(rpb.ConnectRequest, request).version
        if version != PROTOCOL_VERSION:
            raise InvalidRequest(
                f"this server speaks version {PROTOCOL_VERSION} of the remote plane, not {version}: use a client of "
                "the same release"
            )
        node = self._guard.node(context.invocation_metadata())
        session = await node.open_session()
        node.lines.line(logging.INFO, "session opened", session=session.session_id, peer=context.peer())
        try:
            opened = rpb.ConnectResponse(
                secret=session.secret, session_id=session.session_id, server_pid=session.server_pid,
                message_bytes=self._message_bytes,
            )  # fmt: skip
            await context.write(opened.SerializeToString())
            await asyncio.Event().wait()
        finally:
            node.close_session(session)
            node.lines.line(logging.INFO, "session ended", session=session.session_id)

    async def _fetch(self, request: bytes, context: Context) -> None:
        """Send a leased prefix, bytes included."""
        node, session = self._guard.session(context)
        self._enter(session, context)
        carried = carried_by(session, context)
        sending = Sending(node, session, decode(rpb.FetchBytesRequest, request), self._message_bytes, carried)
        leaving: asyncio.Future[Any] | None = None
        try:
            async for message in sending.messages(context.time_remaining()):  # made while the last one is written
                if leaving is not None:
                    await self._left(leaving)
                leaving = asyncio.gather(context.write(message))
                leaving.add_done_callback(_note_end)
                await asyncio.sleep(0)  # lets the write begin
            if leaving is not None:
                await self._left(leaving)
        finally:
            sending.close()
            if leaving is not None:
                leaving.cancel()

    async def _left(self, leaving: asyncio.Future[Any]) -> None:
        """Wait until a message was written. Raises DeadlineExceeded for a reader that does not take it."""
        if not leaving.done():
            await asyncio.wait((leaving,), timeout=self._stall_s)
        if not leaving.done():
            raise DeadlineExceeded(
                f"the reader took no message for {self._stall_s} s (remote.stall_s): its lease is given back"
            )
        leaving.result()

    async def _store(self, _requests: Any, context: Context) -> bytes:
        """Receive strips of a reservation."""
        node, session = self._guard.session(context)
        self._enter(session, context)
        byte_count = await Receiving(node, session, self._stall_s).run(context)
        return rpb.StoreBytesResponse(byte_count=byte_count).SerializeToString()

    def _enter(self, session: SidecarSession, context: Context) -> None:
        """Count a stream of bytes until its call is done. Raises Exhausted past remote.stream_count_max."""
        if session.stream_count >= self._stream_count_max:
            raise Exhausted(f"this session has {session.stream_count} streams open: raise remote.stream_count_max")
        session.stream_count += 1

        def leave(_: Any) -> None:
            session.stream_count -= 1

        context.add_done_callback(leave)


async def _in_turn(requests: AsyncIterator[bytes], answered: asyncio.Semaphore) -> AsyncIterator[bytes]:
    """Send each message once the one before it was answered. gRPC gives a call whose end meets a message on its way
    there the status INTERNAL, and the sidecar's own one is lost."""
    async for message in requests:
        yield message
        await answered.acquire()


def _note_end(leaving: asyncio.Future[Any]) -> None:
    """Fetch the error of a failed write, so that asyncio does not report it when the stream has already ended."""
    if not leaving.cancelled():
        leaving.exception()
