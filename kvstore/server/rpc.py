"""The boundary of every call: undecodable messages and errors become statuses, and unexpected errors are logged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, aclosing, suppress
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from kvstore.errors import Internal, InvalidRequest, KVStoreError
from kvstore.telemetry import NO_TRACING, Counters, Tracing
from kvstore.wire import METADATA_ERROR, pack_fields
from kvstore.wire.bounds import decode

_log = logging.getLogger("kvstore.server")
Context = Any
"""grpc.aio.ServicerContext; grpcio ships no types."""
ENDLESS = ("Watch",)
LASTING = (*ENDLESS, "PartialPrefill")
"""Methods whose calls last as long as their callers."""
FIRST_MESSAGE_S_MAX = 1.0
"""Seconds that a refusal waits at most for a client's first message."""


_HANDLERS: Mapping[tuple[bool, bool], Any] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
"""Handlers by (client sends a stream, server sends a stream). From a client's stream the servicer gets each decoded
message, or in its place the error why it could not be decoded."""


def register(
    server: Any, service: ServiceDescriptor, servicer: object, counters: Counters,
    placed: Callable[[MethodDescriptor, Any], Any], tracing: Tracing = NO_TRACING,
) -> None:  # fmt: skip
    """Serve each method of ``service`` by the servicer's method of that name, inside the boundary. ``placed``:
    makes a method's calls take places. With tracing on, each call is a span, except calls in ``ENDLESS``."""
    handlers = {}
    for method in service.methods:
        request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        function = placed(method, getattr(servicer, method.name))
        if tracing.is_on and method.name not in ENDLESS:
            function = within(method, function, _spans(tracing, f"{service.full_name}/{method.name}"))
        make = _HANDLERS[method.client_streaming, method.server_streaming]
        wrap = _streaming if method.server_streaming else _unary
        handlers[method.name] = make(
            wrap(function, method.name, counters),
            request_deserializer=_tolerant(request),
            response_serializer=response.SerializeToString,
        )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))


def _tolerant(message: Any) -> Callable[[bytes], Any]:
    """Return a decoder that returns the error for a bad message. If it raised, gRPC would answer INTERNAL, though the
    fault is the caller's."""

    def read(data: bytes) -> Any:
        try:
            return decode(message, data)
        except InvalidRequest as error:
            return error

    return read


def _spans(tracing: Tracing, name: str) -> Callable[[Context], AbstractContextManager[Any]]:
    return lambda context: tracing.call(name, context.invocation_metadata())


def within(method: MethodDescriptor, function: Any, entered: Callable[[Context], AbstractContextManager[Any]]) -> Any:
    """Return a servicer's method each of whose calls runs, to its last response, inside a context manager of its
    own."""

    async def call(request: Any, context: Context) -> Any:
        with entered(context):
            return await function(request, context)

    async def stream(request: Any, context: Context) -> AsyncGenerator[Any]:
        with entered(context):
            async with aclosing(function(request, context)) as responses:
                async for response in responses:
                    yield response

    return stream if method.server_streaming else call


def _unary(
    function: Callable[[Any, Context], Awaitable[Any]], name: str, counters: Counters
) -> Callable[[Any, Context], Awaitable[Any]]:
    async def handle(request: Any, context: Context) -> Any:
        try:
            if isinstance(request, InvalidRequest):
                raise request
            return await function(request, context)
        except Exception as error:  # noqa: BLE001 - the boundary: everything becomes a status
            await abort(error, name, context, counters)

    return handle


def _streaming(
    function: Callable[[Any, Context], AsyncGenerator[Any]], name: str, counters: Counters
) -> Callable[[Any, Context], AsyncIterator[Any]]:
    async def handle(request: Any, context: Context) -> AsyncIterator[Any]:
        messages = _Messages(request) if isinstance(request, AsyncIterable) else None
        try:
            if isinstance(request, InvalidRequest):
                raise request
            async with aclosing(function(messages or request, context)) as responses:  # its resources are freed at once
                async for response in responses:
                    yield response
        except Exception as error:  # noqa: BLE001 - the boundary: everything becomes a status
            if messages is not None:
                await messages.meet()
            await abort(error, name, context, counters)

    return handle


class _Messages:
    """A client's stream."""

    def __init__(self, messages: AsyncIterable[Any]) -> None:
        self._messages = aiter(messages)
        self._is_met = False

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        self._is_met = True
        return await anext(self._messages)

    async def meet(self) -> None:
        """Wait for the first message where nobody has: grpc.aio gives a call whose end meets a message on its way the
        status INTERNAL, and the remote plane would pass that on in place of the error."""
        if not self._is_met:
            with suppress(TimeoutError):
                async with asyncio.timeout(FIRST_MESSAGE_S_MAX):
                    await anext(self, None)


async def abort(error: Exception, name: str, context: Context, counters: Counters) -> None:
    """End a call with the status of its error."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    counters.add("requests_failed")
    if not isinstance(error, KVStoreError):
        _log.exception("call failed", extra={"rpc": name})
        error = Internal(f"{name} failed: {type(error).__name__}")
    message = error.message.encode("ascii", "backslashreplace").decode()
    await context.abort(grpc.StatusCode[error.status], message, ((METADATA_ERROR, pack_fields(error.fields)),))
