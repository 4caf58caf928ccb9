"""A controller that traces its requests as spans. It replaces the plain controller only where tracing is on, so that
without tracing a request pays nothing for it."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.controller.controller import Controller
from kvstore.controller.parts import Parts
from kvstore.controller.sessions import Session
from kvstore.controller.values import (
    ChainQuery,
    FetchResult,
    Fill,
    LookupResult,
    ReserveRequest,
    Settled,
    StoreResult,
)
from kvstore.seams import Deadline
from kvstore.spec import Durability
from kvstore.telemetry import TraceSpan, Tracing


class TracedController(Controller):
    """Each method calls the controller's method of the same name inside a span."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._tracing: Tracing = parts.tracing

    async def lookup_wide(self, query: ChainQuery, readers: int = 0, deadline: Deadline | None = None) -> LookupResult:
        with self._tracing.span("kvstore.lookup", asked_chunks=len(query.digests)) as span:
            found = await super().lookup_wide(query, readers, deadline)
            span.note(hit_chunks=found.hit_count)
            return found

    async def lookup_segments(
        self, queries: Sequence[ChainQuery], deadline: Deadline | None = None
    ) -> list[LookupResult]:
        asked = sum(len(query.digests) for query in queries)
        with self._tracing.span("kvstore.lookup_segments", segments=len(queries), asked_chunks=asked) as span:
            found = await super().lookup_segments(queries, deadline)
            span.note(hit_chunks=sum(each.hit_count for each in found))
            return found

    async def fetch_wide(self, session: Session, query: ChainQuery, deadline: Deadline | None = None) -> FetchResult:
        with self._tracing.span("kvstore.fetch", asked_chunks=len(query.digests)) as span:
            return _fetched(span, await super().fetch_wide(session, query, deadline))

    async def redeem(
        self, session: Session, ticket_id: bytes, layers: tuple[int, ...] = (), hidden_layers: tuple[int, ...] = (),
        deadline: Deadline | None = None, *, on_device: bool = False,
    ) -> FetchResult:  # fmt: skip
        with self._tracing.span("kvstore.redeem") as span:
            found = await super().redeem(session, ticket_id, layers, hidden_layers, deadline, on_device=on_device)
            return _fetched(span, found)

    async def reserve(self, session: Session, request: ReserveRequest, deadline: Deadline | None = None) -> StoreResult:
        with self._tracing.span("kvstore.reserve", asked_chunks=len(request.query.digests)):
            return await super().reserve(session, request, deadline)

    async def fill(
        self, session: Session, reservation_id: int, fills: Sequence[Fill], deadline: Deadline | None = None, *,
        at_once: bool = False,
    ) -> None:  # fmt: skip
        with self._tracing.span("kvstore.fill"):
            await super().fill(session, reservation_id, fills, deadline, at_once=at_once)

    async def commit(
        self, session: Session, reservation_id: int, fills: Sequence[Fill], shard: int = 0,
        supersedes: Sequence[bytes] = (), deadline: Deadline | None = None,
    ) -> StoreResult:  # fmt: skip
        with self._tracing.span("kvstore.commit") as span:
            result = await super().commit(session, reservation_id, fills, shard, supersedes, deadline)
            span.note(stored_chunks=result.committed_count, durability=result.durability.name)
            return result

    async def settle(self, query: ChainQuery, timeout_s: float, wanted: Durability = Durability.LOCAL) -> Settled:
        with self._tracing.span("kvstore.settle", wanted=wanted.name) as span:
            found = await super().settle(query, timeout_s, wanted)
            span.note(durability=found.durability.name)
            return found


def _fetched(span: TraceSpan, found: FetchResult) -> FetchResult:
    cold_chunks = sum(chunk.loading is not None for chunk in found.chunks)
    span.note(hit_chunks=found.hit_count, cold_chunks=cold_chunks, tier=found.tier.name, reason=found.reason.name)
    return found
