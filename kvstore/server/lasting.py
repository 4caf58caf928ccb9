"""Calls that last as long as their callers. They have a limit of their own, so that other calls are served however many
of them there are."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from kvstore.errors import Exhausted, KVStoreError
from kvstore.server.rpc import Context, abort
from kvstore.telemetry import Counters


class LastingCalls:
    """The calls of one tenant that last. ``count_max``: limits.call_count_max."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._count = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count a call while it lasts. Raises Exhausted past the limit."""
        if self._count >= self._count_max:
            raise Exhausted(
                f"{self._count} streams that last (watches, partial prefills, health) are open: end some, or raise "
                "limits.call_count_max"
            )
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1

    def counted(self, function: Callable[[Any, Context], AsyncGenerator[Any]]) -> Any:
        """Return a servicer's method whose calls are counted."""

        async def call(request: Any, context: Context) -> AsyncGenerator[Any]:
            with self.one():
                async with aclosing(function(request, context)) as responses:
                    async for response in responses:
                        yield response

        return call


class CountedHealth(health.aio.HealthServicer):  # type: ignore[misc]  # grpcio ships no types
    """The health service, whose watches are counted."""

    def __init__(self, lasting: LastingCalls, counters: Counters) -> None:
        super().__init__()
        self._lasting = lasting
        self._counters = counters

    async def Watch(self, request: Any, context: Context) -> None:
        """Give the state of a service whenever it changes, until the caller ends."""
        try:
            with self._lasting.one():
                await super().Watch(request, context)
        except KVStoreError as error:
            await abort(error, "Health.Watch", context, self._counters)


class CountedReflection(reflection.aio.ReflectionServicer):  # type: ignore[misc]  # grpcio ships no types
    """The reflection service, whose streams are counted."""

    def __init__(self, names: tuple[str, ...], lasting: LastingCalls, counters: Counters) -> None:
        super().__init__(names)
        self._lasting = lasting
        self._counters = counters

    async def ServerReflectionInfo(self, requests: AsyncIterable[Any], context: Context) -> AsyncIterator[Any]:
        """Answer a caller's questions about the services, until it ends."""
        try:
            with self._lasting.one():
                async for response in super().ServerReflectionInfo(requests, context):
                    yield response
        except KVStoreError as error:
            await abort(error, "ServerReflectionInfo", context, self._counters)
