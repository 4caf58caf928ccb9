"""The service's loop is all tenants': a call that names many chains is carried out with pauses, in which others are
served."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.server import render
from kvstore.server.render import wire_number
from kvstore.server.services import LONG_BYTES, CacheService
from kvstore.spec import Durability
from kvstore.v1 import cache_pb2 as pb
from kvstore.wire import METADATA_SESSION
from tests.controller.service import Service

CHAINS = 50


@pytest.fixture
def asked() -> tuple[CacheService, Any, pb.ChainQuery]:
    """A service, the context of a call, and a query."""
    service = Service()
    secret = service.controller.open_session(is_operator=False).secret
    context = SimpleNamespace(
        invocation_metadata=lambda: ((METADATA_SESSION, secret),), time_remaining=lambda: 10.0, set_code=None
    )
    found = service.query(1)
    query = pb.ChainQuery(fingerprint=found.fingerprint, digests=b"".join(found.digests))
    return CacheService(service.controller, b"epoch"), context, query


async def test_many_chains_are_parsed_located_and_rendered_with_pauses(
    asked: tuple[CacheService, Any, pb.ChainQuery], taken: list[None]
) -> None:
    """One client's questions about 4,096 chains each kept every other call waiting for four seconds."""
    service, context, query = asked
    reply = await service.Locate(pb.LocateRequest(queries=[query] * CHAINS), context)
    assert len(reply.chains) == CHAINS
    assert len(taken) >= 3 * CHAINS


async def test_many_segments_are_parsed_with_pauses(
    asked: tuple[CacheService, Any, pb.ChainQuery], taken: list[None]
) -> None:
    service, context, query = asked
    await service.Lookup(pb.LookupRequest(query=query), context)
    without = len(taken)
    reply = await service.Lookup(pb.LookupRequest(query=query, segments=[query] * CHAINS), context)
    assert len(reply.segments) == CHAINS
    assert len(taken) - 2 * without >= 2 * CHAINS, "parsed, and looked up"


async def test_of_many_long_lookups_one_is_parsed_per_round_and_short_ones_wait_for_none(
    asked: tuple[CacheService, Any, pb.ChainQuery], monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 lookups of 131,072 digests that came at once kept every other call waiting for a third of a second."""
    service, context, query = asked
    parsed: list[int] = []

    def parse(message: pb.ChainQuery, *more: Any) -> Any:
        parsed.append(len(message.digests))
        return parse_query(message, *more)

    parse_query = render.parse_query
    monkeypatch.setattr(render, "parse_query", parse)
    long = pb.ChainQuery(fingerprint=query.fingerprint, digests=os.urandom(LONG_BYTES))
    sent = [long] * 20 + [query]
    tasks = [asyncio.ensure_future(service.Lookup(pb.LookupRequest(query=each), context)) for each in sent]
    await asyncio.sleep(0)
    assert parsed == [len(query.digests)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(parsed) <= 1 + 5
    await asyncio.gather(*tasks)
    assert len(parsed) == len(sent)


async def test_what_a_long_query_waits_for_its_turn_is_not_waited_twice(
    asked: tuple[CacheService, Any, pb.ChainQuery], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A settle waits as long as its caller does, and no longer."""
    service, context, query = asked
    order: list[str] = []

    async def turn(message: pb.ChainQuery) -> None:
        order.extend(["turn"] if message.digests else [])

    def time_remaining() -> float:
        order.append("time")
        return 10.0

    monkeypatch.setattr(service, "_turn", turn)
    context.time_remaining = time_remaining
    settle = pb.Settle(query=query, durability=wire_number(Durability.LOCAL))
    await service.Store(pb.StoreRequest(settle=settle), context)
    assert order == ["time", "turn", "time"]
