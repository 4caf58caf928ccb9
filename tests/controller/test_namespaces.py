"""Namespaces are made by stores, and their limit is named; who only looks makes none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvstore.controller import ReserveRequest
from kvstore.errors import Exhausted, InvalidRequest
from kvstore.keys import token_digest
from kvstore.spec import Exactness, Provenance
from tests.controller.service import Service
from tests.scenario import scenario
from tests.specs import small_spec
from tests.tiers.service import DeviceService


def wanted(service: Service, *hidden: int) -> Any:
    """Every way to ask for the same chunk."""
    for exactness in Exactness:
        for provenance in Provenance:
            yield service.query(1, exactness=exactness, provenance=provenance, hidden_layers=hidden)


async def test_only_a_store_makes_a_namespace() -> None:
    service = Service()
    controller, session = service.controller, service.controller.open_session()
    for number in range(20):
        service.model = controller.register_model(small_spec(model_id=f"m{number}"))
        for query in wanted(service, 0, 1):
            assert controller.lookups.lookup(query, readers=1).hit_count == 0
            assert controller.fetches.fetch(session, query).hit_count == 0
            assert (await controller.settle(query, 0.0)).chunk_count == 0
            with pytest.raises(InvalidRequest):  # a store that is refused for what it says
                await controller.reserve(session, ReserveRequest(query, []))
    assert controller.parts.catalog.spaces.numbered == []
    assert (await service.store(session, 1)).committed_count == 1
    assert len(controller.parts.catalog.spaces.numbered) == 1


async def test_past_the_limit_a_store_is_refused_by_name_and_the_others_go_on() -> None:
    service = Service(namespace_count_max=3)
    controller, session = service.controller, service.controller.open_session()
    assert (await service.store(session, 1)).committed_count == 1
    query = service.query(2, hidden_layers=(0, 1))
    request = ReserveRequest(query, [token_digest(service.tokens(2))])
    first = await controller.reserve(session, request)
    await controller.abort(session, first.reservation_id)
    for _ in range(3):
        with pytest.raises(Exhausted, match=r"limits\.namespace_count_max"):
            await controller.reserve(session, replace(request, query=query._replace(exactness=Exactness.DERIVED)))
    assert not controller.reservations.of(session)
    assert (await service.store(session, 3)).committed_count == 1
    assert [service.check(session, path) for path in (1, 3)] == [1, 1]


@scenario(lambda: DeviceService())
async def test_a_clean_stop_names_the_namespaces_that_hold_chunks_and_no_others(service: DeviceService) -> None:
    """So a restart forgets those that are empty, and every chunk stays in its own."""
    request = ReserveRequest(service.query(9), [token_digest(service.tokens(9))])
    told = await service.controller.reserve(service.session, request)
    await service.controller.abort(service.session, told.reservation_id)
    for number in (3, 1, 2):
        await service.of(small_spec(model_id=f"m{number}")).keep(number)
    assert len(service.controller.parts.catalog.spaces.numbered) == 4
    await service.restart()
    assert len(service.controller.parts.catalog.spaces.numbered) == 3
    for number in (1, 2, 3):
        model = service.of(small_spec(model_id=f"m{number}"))
        assert [(await model.fetch(path))[0] for path in (1, 2, 3)] == [path == number for path in (1, 2, 3)]
