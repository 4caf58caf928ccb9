"""What happens in the sidecar, as it happens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import grpc

from kvstore.errors import KVStoreError, Unavailable
from kvstore.spec import EventKind, MissReason, Tier
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.session import Session


@dataclass(frozen=True)
class ChunkEvent:
    """One chunk that was stored, removed or moved to another tier; or, with the kind GAP, ``lost_count`` events, the
    last of them ``sequence``, that this reader was too slow for: ask ``lookup`` what is there."""

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

    Raises while iterating: Unavailable when the sidecar goes. Watching anew begins at what happens then: compare
    ``epoch`` and ``sequence`` with the last event's to see whether something was missed in between.
    """

    def __init__(self, session: Session, tenant: str) -> None:
        self._session = session
        self._is_closed = False
        self._stream: Any = session.cache.Watch(pb.WatchRequest(tenant=tenant), metadata=session.metadata)
        first = self._next()
        self._events: Iterator[pb.ChunkEvent] = iter(first.events)
        self.sequence: int = first.sequence
        """Of the last event before this watch began."""
        self.epoch: bytes = first.epoch
        """Names this start of the sidecar; another start counts from 0 again."""

    def _next(self) -> pb.WatchResponse:
        try:
            response: pb.WatchResponse = next(self._stream)
        except grpc.RpcError as error:
            raise self._session.translated(error) from error
        except (StopIteration, ValueError) as error:
            raise Unavailable("the sidecar is stopping, or the session ended: watch again") from error
        return response

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> ChunkEvent:
        while True:
            if self._is_closed:
                raise StopIteration
            for event in self._events:
                return _event(event)
            try:
                self._events = iter(self._next().events)
            except KVStoreError:
                if self._is_closed:
                    raise StopIteration from None
                raise

    def close(self) -> None:
        """Watch no longer. Idempotent."""
        self._is_closed = True
        self._stream.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _event(event: pb.ChunkEvent) -> ChunkEvent:
    return ChunkEvent(
        EventKind(event.kind), event.sequence, event.model_id, event.fingerprint, event.digest, event.parent,
        event.token_count, Tier(event.tier), MissReason(event.reason), event.lost_count,
    )  # fmt: skip


class Watching(ABC):
    """The client's call for it."""

    @abstractmethod
    def connect_now(self) -> Session:
        """The client's live session."""

    def watch(self, *, tenant: str = "") -> Watch:
        """What becomes visible, goes and moves from now on. ``tenant``: empty, or the session's own.

        Raises: Unavailable when the sidecar is gone, PermissionDenied for another tenant, Exhausted past
        limits.watcher_count_max."""
        return Watch(self.connect_now(), tenant)
