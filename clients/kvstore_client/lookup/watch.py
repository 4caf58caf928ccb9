"""Events of the sidecar's chunks, as they happen."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Self

from kvstore.errors import DeadlineExceeded, KVStoreError, Unavailable
from kvstore.spec import EventKind, MissReason, Tier
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.awaiting import ended
from kvstore_client.lookup.feed import GONE, Feed
from kvstore_client.planes.incoming import Incoming
from kvstore_client.planes.session import ClientSession


@dataclass(frozen=True)
class ChunkEvent:
    """One chunk that was stored, removed or moved to another tier. The kind GAP stands for ``lost_count`` events, the
    last of them ``sequence``, that this reader was too slow for: ask ``lookup`` what is stored."""

    kind: EventKind
    sequence: int
    model_id: str = ""
    fingerprint: bytes = b""
    digest: bytes = b""
    parent: bytes = b""
    token_count: int = 0
    tier: Tier = Tier.NONE
    reason: MissReason = MissReason.NONE
    lost_count: int = 0


class Watch:
    """An iterator of ChunkEvents, in order and without an end. ``close`` ends it, from any thread.

    Raises while iterating: Unavailable when the sidecar goes, or does not answer. When no event comes for the client's
    ``timeout_s``, the watch asks the sidecar for a sign of life, and waits as long again. A new watch begins at the
    events of its time: compare ``epoch`` and ``sequence`` with the last event's to see if events were missed in
    between.
    """

    def __init__(self, session: ClientSession, tenant: str, timeout_s: float) -> None:
        self._session = session
        self.timeout_s = timeout_s
        self._is_closed = False
        try:
            call = session.cache.Watch(pb.WatchRequest(tenant=tenant), metadata=session.metadata)
        except ValueError as error:
            raise Unavailable(GONE) from error  # the channel was closed meanwhile
        self._feed = Feed(Incoming(call))
        self._asked: Future[pb.WatchResponse] | None = None
        first = self._first()
        self._events: Iterator[pb.ChunkEvent] = iter(first.events)
        self.sequence: int = first.sequence
        """The number of the last event before this watch began."""
        self.epoch: bytes = first.epoch
        """Identifies this start of the sidecar; another start counts from 0 again."""

    def _first(self) -> pb.WatchResponse:
        asked = self._feed.ask()
        try:
            first: pb.WatchResponse = asked.result(self.timeout_s)
        except TimeoutError:
            self._feed.close()
            raise DeadlineExceeded(f"the sidecar did not say within {self.timeout_s} s that it is watched") from None
        except BaseException:
            self._feed.close()
            raise
        return first

    def pending(self) -> Future[pb.WatchResponse]:
        """Return a future of the next events. ``take`` them once it is done."""
        if self._asked is None:
            self._asked = self._feed.ask()
        return self._asked

    def take(self) -> bool:
        """Make the events that came the next ones. Returns False when the watch was closed. Raises the error that ended
        it."""
        asked = self.pending()
        if asked.done():
            self._asked = None
            try:
                self._events = iter(asked.result().events)
            except KVStoreError:
                if not self._is_closed:
                    raise
        return not self._is_closed

    def ready(self) -> ChunkEvent | None:
        """Return the next event if it has come already, else None."""
        return None if self._is_closed else next(map(_event, self._events), None)

    def check(self) -> None:
        """Ask for a sign of life after a silence. Raises Unavailable when the sidecar does not answer."""
        try:
            self._session.call(self._session.cache.Release, pb.ReleaseRequest(), self.timeout_s)
        except KVStoreError as error:
            self._feed.close()
            raise Unavailable(f"the sidecar does not answer ({error.message}): watch again") from error

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> ChunkEvent:
        while (event := self.ready()) is None:
            if not wait([self.pending()], self.timeout_s).done and not self._is_closed:
                self.check()
            if not self.take():
                raise StopIteration
        return event

    def close(self) -> None:
        """End the watch. Idempotent."""
        self._is_closed = True
        self._feed.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncWatch:
    """The watch for ``async for``. No thread of the client waits while no event comes."""

    def __init__(self, watch: Watch, call: Callable[[Callable[[], None]], Awaitable[None]]) -> None:
        """``call`` runs a blocking check without blocking the loop."""
        self._watch = watch
        self._call = call
        self.sequence, self.epoch = watch.sequence, watch.epoch

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ChunkEvent:
        while (event := self._watch.ready()) is None:
            if not await ended(self._watch.pending(), self._watch.timeout_s):
                await self._call(self._watch.check)
            if not self._watch.take():
                raise StopAsyncIteration
        return event

    def close(self) -> None:
        """End the watch. Idempotent, and waits for nothing."""
        self._watch.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


def _event(event: pb.ChunkEvent) -> ChunkEvent:
    return ChunkEvent(
        EventKind(event.kind), event.sequence, event.model_id, event.fingerprint, event.digest, event.parent,
        event.token_count, Tier(event.tier), MissReason(event.reason), event.lost_count,
    )  # fmt: skip
