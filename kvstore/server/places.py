"""Places for calls. Calls that last as long as their callers have places of their own, so that other calls are served
however many of them there are."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from kvstore.errors import Exhausted, KVStoreError
from kvstore.server.rpc import LASTING, Context, abort, within
from kvstore.telemetry import Counters


class CallLimit:
    """The most calls of one kind that a tenant has at once. ``with`` it, a call counts."""

    def __init__(self, count_max: int, named: str) -> None:
        """``count_max``: limits.call_count_max. ``named``: what the calls are, and what their caller can do."""
        self._count_max = count_max
        self._named = named
        self._count = 0

    def __enter__(self) -> None:
        """Raises Exhausted when there are so many."""
        if self._count >= self._count_max:
            raise Exhausted(f"{self._count} {self._named}, or raise limits.call_count_max")
        self._count += 1

    def __exit__(self, *_: object) -> None:
        self._count -= 1


class CallPlaces:
    """The places of one tenant: as many for calls that last as for others."""

    def __init__(self, count_max: int) -> None:
        """``count_max``: limits.call_count_max."""
        self.lasting = CallLimit(count_max, "streams that last (watches, partial prefills, health) are open: end some")
        self._others = CallLimit(count_max, "calls are in progress: make fewer at once")

    def placed(self, method: MethodDescriptor, function: Any) -> Any:
        """Return a servicer's method whose calls each take a place."""
        limit = self.lasting if method.name in LASTING else self._others
        return within(method, function, lambda _: limit)


class CountedHealth(health.aio.HealthServicer):  # type: ignore[misc]  # grpcio ships no types
    """The health service, whose watches are counted."""

    def __init__(self, lasting: CallLimit, counters: Counters) -> None:
        super().__init__()
        self._lasting = lasting
        self._counters = counters

    async def Watch(self, request: Any, context: Context) -> None:
        """Give the state of a service whenever it changes, until the caller ends."""
        try:
            with self._lasting:
                await super().Watch(request, context)
        except KVStoreError as error:
            await abort(error, "Health.Watch", context, self._counters)


class CountedReflection(reflection.aio.ReflectionServicer):  # type: ignore[misc]  # grpcio ships no types
    """The reflection service, whose streams are counted."""

    def __init__(self, names: tuple[str, ...], lasting: CallLimit, counters: Counters) -> None:
        super().__init__(names)
        self._lasting = lasting
        self._counters = counters

    async def ServerReflectionInfo(self, requests: AsyncIterable[Any], context: Context) -> AsyncIterator[Any]:
        """Answer a caller's questions about the services, until it ends."""
        try:
            with self._lasting:
                async for response in super().ServerReflectionInfo(requests, context):
                    yield response
        except KVStoreError as error:
            await abort(error, "ServerReflectionInfo", context, self._counters)
