"""The asyncio client: runs the synchronous client on a few threads, so that no call blocks the loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from kvstore.errors import DeadlineExceeded
from kvstore.planning.loading import LoadPlan
from kvstore.seams import WorkerThreads
from kvstore.seams.jobs import begun, failure_of
from kvstore.spec import Durability, ModelSpec
from kvstore.v1alpha import admin_pb2
from kvstore_client.arrays import Layer, Tensor
from kvstore_client.awaiting import ended
from kvstore_client.begin import connect
from kvstore_client.client import DEFAULT_TIMEOUT_S, Client
from kvstore_client.fetch.fetched import FetchedKV
from kvstore_client.fetch.stream import LayerStream
from kvstore_client.fetch.transfer import Transfer
from kvstore_client.forks import in_children
from kvstore_client.lookup.locate import Location
from kvstore_client.lookup.match import Match
from kvstore_client.lookup.watch import AsyncWatch, Watch
from kvstore_client.planes.place import TLS
from kvstore_client.prompt import GivenTokens
from kvstore_client.store.receipt import Receipt
from kvstore_client.store.writer import StoreWriter
from kvstore_client.streams import within_streams
from kvstore_client.tracing import within_trace

if TYPE_CHECKING:
    from kvstore_client.recompute import ModelRunner, PartialPrefill

Result = TypeVar("Result")
CALLS_AT_ONCE = 8
LATE_S_MAX = 1.0
"""Seconds that a close waits for calls that were cancelled: a ticket that one brings later is kept until it expires."""


async def connect_async(
    address: str | None = None, *, token: str | None = None, tls: TLS | bool | None = None, required: bool = True,
    timeout_s: float = DEFAULT_TIMEOUT_S, planning: str = "off",
) -> AsyncClient:  # fmt: skip
    """Like ``connect``, for asyncio."""
    threads = WorkerThreads(CALLS_AT_ONCE, "kvstore-async")
    opened = partial(connect, address, token=token, tls=tls, required=required, timeout_s=timeout_s, planning=planning)
    future = begun(threads, opened)
    try:
        return AsyncClient(await asyncio.wrap_future(future), threads)
    except BaseException:  # cancelled, it still connects: the loop does not wait for that
        asyncio.get_running_loop().run_in_executor(None, _end, threads, future)
        raise


def _end(threads: WorkerThreads, future: Future[Client]) -> None:
    """Close the threads, and the client if it connected: nobody takes it."""
    threads.close()
    if failure_of(future) is None:
        future.result().close()


class AsyncClient:
    """The same calls as ``Client``, awaited. A cancelled call finishes in its thread; what its result holds is given
    back. One that reads or fills the caller's memory ends its task no sooner than that, for what is written there next
    would be stored. Waits for other stores or for the device take none of the few threads: the work they wait for needs
    a thread."""

    def __init__(self, client: Client, threads: WorkerThreads) -> None:
        self.client = client
        self._threads = threads
        self._late: set[Future[None]] = set()
        """Of cancelled calls that run yet: each ends when what its call brought was given back."""
        in_children(self._start_threads)

    def _start_threads(self) -> None:
        """Start new threads in a forked child, which has none of its parent's."""
        self._threads, self._late = WorkerThreads(CALLS_AT_ONCE, "kvstore-async"), set()

    async def call(self, function: Callable[..., Result], *args: object, **options: object) -> Result:
        """Run a blocking call, of a transfer or a writer, without blocking the loop. Waits of transfers and receipts
        take no thread."""
        awaited = _AWAITED.get(getattr(function, "__func__", None))
        if awaited is not None:
            found: Result = await awaited(self, function.__self__, *args, **options)  # type: ignore[attr-defined]  # bound
            return found
        future = begun(self._threads, within_trace(within_streams(lambda: function(*args, **options))))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            late: Future[None] = Future()
            self._late.add(late)
            future.add_done_callback(lambda ended: self._drop(ended, late))
            while _uses_memory(function, options) and not late.done():
                with suppress(asyncio.CancelledError):  # once more: the first one is raised
                    await ended(late, None)
            raise

    def _drop(self, future: Future[Result], late: Future[None]) -> None:
        """Give back what the result of a cancelled call holds: nobody takes it. The error of the cancelled task may
        keep the result itself until garbage collection."""

        def given_back(_: object = None) -> None:
            self._late.discard(late)
            late.set_result(None)

        found = None if future.cancelled() or future.exception() is not None else future.result()
        if isinstance(found, Match) and found.ticket:
            begun(self._threads, self.client.release_ticket, found.ticket).add_done_callback(given_back)
        elif isinstance(found, StoreWriter):
            begun(self._threads, found.abort).add_done_callback(given_back)
        elif isinstance(found, Watch | LayerStream):
            begun(self._threads, found.close).add_done_callback(given_back)
        elif isinstance(found, Transfer):
            found.stop()
            found.ending.add_done_callback(given_back)
        else:
            given_back()

    async def lookup(self, spec: ModelSpec, tokens: GivenTokens, **options: object) -> Match:
        """See ``Client.lookup``."""
        return await self.call(self.client.lookup, spec, tokens, **options)

    async def plan(self, spec: ModelSpec, tokens: GivenTokens, **options: object) -> LoadPlan:
        """See ``Client.plan``."""
        return await self.call(self.client.plan, spec, tokens, **options)

    async def locate(self, spec: ModelSpec, tokens: GivenTokens, **options: object) -> Location:
        """See ``Client.locate``."""
        return await self.call(self.client.locate, spec, tokens, **options)

    async def locate_each(self, spec: ModelSpec, contexts: Sequence[GivenTokens], **options: object) -> list[Location]:
        """See ``Client.locate_each``."""
        return await self.call(self.client.locate_each, spec, contexts, **options)

    async def fetch(self, spec: ModelSpec, tokens: GivenTokens, **options: object) -> FetchedKV:
        """See ``Client.fetch``."""
        return await self.call(self.client.fetch, spec, tokens, **options)

    async def fetch_layers(
        self, spec: ModelSpec, tokens: GivenTokens, **options: object
    ) -> AsyncIterator[tuple[int, Layer]]:
        """See ``Client.fetch_layers``."""
        transfer = await self.call(self.client.start_fetch_prefix, spec, tokens, **options)
        try:
            for layer in transfer.layers if transfer.token_count else ():
                yield layer, await self.call(transfer.wait_layer, layer)
        finally:
            await self.call(transfer.cancel, DEFAULT_TIMEOUT_S)

    async def store(self, spec: ModelSpec, tokens: GivenTokens, kv: Sequence[Layer], **options: object) -> Receipt:
        """See ``Client.store``. Await ``wait(receipt)`` for the durability reached."""
        return await self.call(self.client.store, spec, tokens, kv, **options)

    async def store_segment(
        self, spec: ModelSpec, tokens: GivenTokens, kv: Sequence[Layer], **options: object
    ) -> Receipt:
        """See ``Client.store_segment``."""
        return await self.call(self.client.store_segment, spec, tokens, kv, **options)

    async def fetch_segment(self, spec: ModelSpec, tokens: GivenTokens, **options: object) -> FetchedKV:
        """See ``Client.fetch_segment``."""
        return await self.call(self.client.fetch_segment, spec, tokens, **options)

    async def find_segments(self, spec: ModelSpec, tokens: GivenTokens, **options: object) -> list[range]:
        """See ``Client.find_segments``."""
        return await self.call(self.client.find_segments, spec, tokens, **options)

    async def wait(self, receipt: Receipt, timeout: float | None = None) -> Durability:  # noqa: ASYNC109 - the receipt's own bound
        """Await ``receipt.wait`` without blocking the loop."""
        return await receipt.waited(timeout, self.call)

    async def watch(self, *, tenant: str = "") -> AsyncWatch:
        """See ``Client.watch``."""
        watch = await self.call(self.client.watch, tenant=tenant)
        return AsyncWatch(watch, self.call)

    async def partial_prefill(self, runner: ModelRunner, tokens: GivenTokens, **options: object) -> PartialPrefill:
        """See ``Client.partial_prefill``."""
        return await self.call(self.client.partial_prefill, runner, tokens, **options)

    async def start_fetch(self, ticket: bytes, **options: object) -> Transfer:
        """See ``Client.start_fetch``. Await ``call(transfer.wait_layer, 0)`` and the like."""
        return await self.call(self.client.start_fetch, ticket, **options)

    async def start_fetch_prefix(self, spec: ModelSpec, tokens: GivenTokens, **options: object) -> Transfer:
        """See ``Client.start_fetch_prefix``."""
        return await self.call(self.client.start_fetch_prefix, spec, tokens, **options)

    async def start_fetch_segment(self, spec: ModelSpec, tokens: GivenTokens, **options: object) -> Transfer:
        """See ``Client.start_fetch_segment``."""
        return await self.call(self.client.start_fetch_segment, spec, tokens, **options)

    async def fetch_projected(self, runner: ModelRunner, tokens: GivenTokens, **options: object) -> FetchedKV:
        """See ``Client.fetch_projected``."""
        return await self.call(self.client.fetch_projected, runner, tokens, **options)

    async def release_ticket(self, ticket: bytes | None) -> None:
        """See ``Client.release_ticket``. It completes even if cancelled: nobody else releases this ticket."""
        await asyncio.shield(asyncio.wrap_future(begun(self._threads, self.client.release_ticket, ticket)))

    async def start_store(self, spec: ModelSpec, tokens: GivenTokens, **options: object) -> StoreWriter:
        """See ``Client.start_store``. Await ``call(writer.put_layer, 0, kv)`` and the like."""
        return await self.call(self.client.start_store, spec, tokens, **options)

    async def join_store(self, ticket: bytes, shard: int, **options: object) -> StoreWriter:
        """See ``Client.join_store``."""
        return await self.call(self.client.join_store, ticket, shard, **options)

    async def stats(self) -> admin_pb2.StatsResponse:
        """See ``Client.stats``."""
        return await self.call(self.client.stats)

    async def aclose(self) -> None:
        """End the session. Idempotent."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        wait(list(self._late), LATE_S_MAX)
        self.client.close()
        self._threads.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


async def _wait(_: AsyncClient, transfer: Transfer, timeout: float | None = None) -> None:  # noqa: ASYNC109 - the transfer's own bound
    await _landed(transfer.ending, "the transfer", timeout)
    transfer.wait()


async def _wait_layer(_: AsyncClient, transfer: Transfer, layer: int, timeout: float | None = None) -> Layer:  # noqa: ASYNC109
    await _landed(transfer.landing(layer), f"layer {layer}", timeout)
    return transfer.wait_layer(layer)


async def _wait_hidden(_: AsyncClient, transfer: Transfer, layer: int, timeout: float | None = None) -> Tensor:  # noqa: ASYNC109
    await _landed(transfer.landing_hidden(layer), f"E of layer {layer}", timeout)
    return transfer.wait_hidden(layer)


async def _landed(future: Future[Result], name: str, timeout: float | None) -> None:  # noqa: ASYNC109
    if not await ended(future, timeout):
        raise DeadlineExceeded(f"{name} did not land within {timeout} s")


async def _cancel(_: AsyncClient, transfer: Transfer, timeout: float | None = None) -> bool:  # noqa: ASYNC109
    transfer.stop()
    await ended(transfer.ending, timeout)
    return transfer.is_done


def _uses_memory(function: Callable[..., object], options: Mapping[str, object]) -> bool:
    """Return True for a call that reads or fills memory of its caller."""
    if isinstance(function, partial):  # a partial of another is one with the arguments of both
        options = {**function.keywords, **options}
        function = function.func
    return options.get("into") is not None or getattr(function, "__func__", None) in _GIVEN_MEMORY


_GIVEN_MEMORY = frozenset({
    Client.store, Client.store_segment, Client.put_bytes, Client.put_pieces, Client.put_each, Client.put_encoder,
    Client.get_each, StoreWriter.put_layer, StoreWriter.put_hidden,
})  # fmt: skip
"""Calls that take the caller's memory; others fill it where they are given ``into``."""
_AWAITED: dict[object, Callable[..., Awaitable[Any]]] = {
    Receipt.wait: AsyncClient.wait,
    Transfer.wait: _wait,
    Transfer.wait_layer: _wait_layer,
    Transfer.wait_hidden: _wait_hidden,
    Transfer.cancel: _cancel,
}
"""Blocking waits, by their awaited form, which takes no thread."""
