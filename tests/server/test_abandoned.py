"""A call whose caller goes before its first reply leaves nothing behind that only the caller could give back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest

from kvstore.controller.prefills import PartialPrefills
from kvstore.server.prefills import PrefillService
from kvstore.server.services import CacheService
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1alpha import prefill_pb2
from kvstore.wire import METADATA_SESSION
from tests.controller.service import Service


class Call:
    """What a handler asks of its call."""

    def __init__(self, secret: bytes, remaining_s: float | None = 5.0) -> None:
        self._secret, self._remaining_s = secret, remaining_s

    def invocation_metadata(self) -> list[tuple[str, bytes]]:
        return [(METADATA_SESSION, self._secret)]

    def time_remaining(self) -> float | None:
        return self._remaining_s


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_a_fetch_that_is_cancelled_before_its_reply_leaves_no_lease(is_cancelled: bool) -> None:
    service = Service()
    session = service.controller.open_session()
    await service.store(session, 1)
    query = service.query(1)
    request = pb.FetchRequest(
        query=pb.ChainQuery(fingerprint=query.fingerprint, digests=b"".join(query.digests), exactness=1)
    )
    answers = CacheService(service.controller, b"epoch").Fetch(request, Call(session.secret))
    replies = cast(AsyncGenerator[Any, None], answers)
    reply = await anext(replies)
    assert service.parts.leases.of(session) == [reply.lease_id]
    if is_cancelled:  # as gRPC does it while the reply is being sent
        await replies.aclose()
    else:
        assert [each async for each in replies] == []
    assert bool(service.parts.leases.of(session)) != is_cancelled
    assert session.stream_count == 0


async def test_a_lookup_that_is_cancelled_before_its_reply_leaves_no_ticket(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of partial chunks may be many: it waits between them."""
    service = Service()
    controller = service.controller
    session = controller.open_session()
    await service.store(session, 1)
    waiting, go_on = asyncio.Event(), asyncio.Event()

    async def slow(*_: object) -> int:
        waiting.set()
        await go_on.wait()
        return 1

    monkeypatch.setattr(controller.lookups, "first_stored", slow)
    query = service.query(1)
    chain = pb.ChainQuery(fingerprint=query.fingerprint, digests=b"".join(query.digests), exactness=1)
    request = pb.LookupRequest(query=chain, hold=True, tail_digests=bytes(32))
    answering = asyncio.ensure_future(CacheService(controller, b"epoch").Lookup(request, Call(session.secret)))
    await asyncio.wait_for(waiting.wait(), 10)
    answering.cancel()
    await asyncio.wait([answering])
    assert controller.stats().ticket_count == 0
    go_on.set()
    reply = await CacheService(controller, b"epoch").Lookup(request, Call(session.secret))
    assert (reply.hit_count, reply.tail_found, controller.stats().ticket_count) == (1, 1, 1)


async def test_a_partial_prefill_ends_with_its_session() -> None:
    """Calls of sessions that are gone would fill the server, and nobody could end them."""
    service = Service()
    controller = service.controller
    session = controller.open_session()
    await service.store(session, 1)
    query = service.query(1)

    async def requests() -> AsyncGenerator[Any, None]:
        chain = pb.ChainQuery(fingerprint=query.fingerprint, digests=b"".join(query.digests), exactness=1)
        yield prefill_pb2.PartialPrefillRequest(begin=prefill_pb2.BeginPrefill(query=chain, token_count=1 << 10))
        await asyncio.Event().wait()  # the call stays open

    prefills = PartialPrefills(service.parts, controller.lookups, controller.tickets)
    calls = PrefillService(controller, prefills, service.parts.profiles)
    replies = calls.PartialPrefill(requests(), Call(session.secret))
    assert (await anext(replies)).found.ticket
    waiting = asyncio.ensure_future(anext(replies, None))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await controller.close_session(session)
    assert await asyncio.wait_for(waiting, 5.0) is None
    assert session.stream_count == 0
    assert not len(controller.tickets)
