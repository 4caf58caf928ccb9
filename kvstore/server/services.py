"""CacheService: the engines' calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence

from kvstore.controller import ChainQuery, Controller, LookupResult, Session
from kvstore.errors import InvalidRequest, Unauthenticated
from kvstore.seams import Deadline
from kvstore.server import render
from kvstore.server.rpc import Context
from kvstore.v1 import cache_pb2 as pb
from kvstore.wire import METADATA_SESSION, spec_from_message


def session_of(controller: Controller, context: Context) -> Session:
    """Return the session that a call's metadata names. Raises Unauthenticated."""
    for key, value in context.invocation_metadata():
        if key == METADATA_SESSION:
            return controller.session(value)
    raise Unauthenticated(f"the call carries no session: connect to data.sock and send {METADATA_SESSION}")


WATCH_BATCH_COUNT_MAX = 512
SETTLE_S_MAX = 60.0
"""Seconds that one settle call waits at most."""
LONG_BYTES = 128 << 10
"""Bytes of a query's digests from which on it is long: parsing them takes the loop 0.2 ms or more."""


class CacheService:
    """The engines' calls of one tenant. They carry names, extents and plans; the bytes take the data plane."""

    def __init__(self, controller: Controller, epoch: bytes) -> None:
        """``epoch``: bytes that name this start of the service to watchers."""
        self._controller = controller
        self._epoch = epoch

    def _deadline(self, context: Context) -> Deadline:
        """Return the deadline of a call that has just come."""
        return self._controller.deadline(context.time_remaining())

    async def _turn(self, query: pb.ChainQuery) -> None:
        """Have a long query wait until it is its turn to be parsed: many may come in one round of the loop."""
        if len(query.digests) >= LONG_BYTES:
            await self._controller.begin_long_work().turn()

    async def RegisterModel(self, request: pb.RegisterModelRequest, context: Context) -> pb.RegisterModelResponse:
        """Register a model."""
        session_of(self._controller, context)
        name = self._controller.register_model(spec_from_message(request.spec))
        return pb.RegisterModelResponse(fingerprint=name)

    async def Lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupResponse:
        """Return the longest stored prefix. A miss is a reply; only a failure becomes a status."""
        await self._turn(request.query)
        session_of(self._controller, context)
        deadline = self._deadline(context)
        readers = (request.readers or 1) if request.hold else 0
        query = render.parse_query(request.query)
        found: Sequence[LookupResult] = ()
        if request.segments:
            found = await self._controller.lookup_segments(await self._queries(request.segments), deadline)
        stored = 0
        if request.tail_digests:
            tail_digests = render.parse_digests(request.tail_digests, "tail_digests")
            stored = await self._controller.first_stored(query, tail_digests)
        # Last: if the call were cancelled after this, nobody would release the ticket.
        result = await self._controller.lookup_wide(query, readers, deadline)
        places = self._controller.places(result.ticket) if request.with_places and result.ticket else ()
        return render.render_lookup(result._replace(tail_found=stored) if stored else result, found, places)

    async def Locate(self, request: pb.LocateRequest, context: Context) -> pb.LocateResponse:
        """Return the places of chains. Those on other nodes and in shared tiers are hints."""
        session_of(self._controller, context)
        deadline = self._deadline(context)
        located = await self._controller.locate(await self._queries(request.queries), deadline)
        return await render.render_located(located, self._controller.begin_long_work())

    async def _queries(self, messages: Iterable[pb.ChainQuery]) -> list[ChainQuery]:
        """Parse queries. There may be many, so others are answered in between."""
        found, pauses = list[ChainQuery](), self._controller.begin_long_work()
        for each in messages:
            found.append(render.parse_query(each))
            await pauses.between()
        return found

    async def Fetch(self, request: pb.FetchRequest, context: Context) -> AsyncIterator[pb.FetchResponse]:
        """Lease the stored prefix, and give it in the first message. Later messages tell of chunks that arrive from
        slower tiers."""
        await self._turn(request.query)
        session, deadline = session_of(self._controller, context), self._deadline(context)
        with self._controller.stream(session):
            if request.ticket:
                hidden_layers = tuple(request.query.hidden_layers)
                result = await self._controller.redeem(
                    session, request.ticket, tuple(request.layers), hidden_layers, deadline, on_device=request.on_device
                )
            else:
                query = render.parse_query(request.query, request.layers)._replace(on_device=request.on_device)
                result = await self._controller.fetch_wide(session, query, deadline)
            try:
                yield await render.render_fetch(result, self._controller.begin_long_work())
            except BaseException:  # the call was cancelled: its client does not know this lease and cannot release it
                self._controller.release(session, [result.lease_id])
                raise
            async for news in self._controller.arrivals(result, deadline):
                yield render.render_arrivals(news)

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        """Give leases and tickets back."""
        session, pauses = session_of(self._controller, context), self._controller.begin_long_work()
        for lease_id in request.lease_ids:
            self._controller.release(session, [lease_id])
            await pauses.between()
        for ticket in request.tickets:
            self._controller.release_ticket(ticket)
            await pauses.between()
        return pb.ReleaseResponse()

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.WatchResponse]:
        """Give the number of the last event, then all events after it, until the caller, its session or the service
        ends."""
        session = session_of(self._controller, context)
        watcher = self._controller.watch(session, request.tenant)
        try:
            yield pb.WatchResponse(sequence=self._controller.event_sequence, epoch=self._epoch)
            while (news := await watcher.take(WATCH_BATCH_COUNT_MAX)) is not None:
                yield render.render_news(news)
        finally:
            self._controller.unwatch(session, watcher)

    async def Store(self, request: pb.StoreRequest, context: Context) -> pb.StoreResponse:
        """Carry out one step of a store."""
        await self._turn(request.reserve.query)
        session, deadline = session_of(self._controller, context), self._deadline(context)
        step = request.WhichOneof("step")
        if step == "reserve":
            result = await self._controller.reserve(session, render.parse_reserve(request.reserve), deadline)
            return render.render_store(result)
        if step == "fill":
            reservation_id = request.fill.reservation_id
            fills = render.parse_fills(request.fill.fills)
            last = await self._controller.begin_fill(session, reservation_id, fills, deadline)
            await self._controller.fill(session, reservation_id, last, deadline, at_once=request.fill.at_once)
            return pb.StoreResponse(reservation_id=reservation_id)
        if step == "commit":
            reservation_id = request.commit.reservation_id
            fills = render.parse_fills(request.commit.fills)
            supersedes = render.parse_digests(request.commit.supersedes, "supersedes")
            last = await self._controller.begin_fill(session, reservation_id, fills, deadline)
            shard = request.commit.shard
            result = await self._controller.commit(session, reservation_id, last, shard, supersedes, deadline)
            return render.render_store(result)
        if step == "join":
            durability = render.parse_level(request.join.durability)
            joined = self._controller.join(session, request.join.ticket, request.join.fingerprint, durability)
            return render.render_store(joined)
        if step == "abort":
            await self._controller.abort(session, request.abort.reservation_id, deadline)
            return pb.StoreResponse(reservation_id=request.abort.reservation_id)
        if step == "settle":
            await self._turn(request.settle.query)
            remaining_s = context.time_remaining()
            wait_s = min(
                request.settle.timeout_seconds, SETTLE_S_MAX if remaining_s is None else remaining_s, SETTLE_S_MAX
            )
            wanted = render.parse_level(request.settle.durability)
            query = render.parse_query(request.settle.query)
            settled = await self._controller.settle(query, max(0.0, wait_s), wanted)
            return render.render_settled(settled)
        raise InvalidRequest("a store request names one step: reserve, join, fill, commit, abort or settle")
