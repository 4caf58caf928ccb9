"""A model makes room for a new one when nothing needs it any more, and not before."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest

from kvstore.controller import Session
from kvstore.controller.operators.selection import Chosen
from kvstore.controller.operators.turns import Turns
from kvstore.controller.operators.values import Selection
from kvstore.errors import Exhausted, InvalidRequest
from kvstore.movement.clearing import Fate
from kvstore.spec import MissReason, StoreState
from tests.controller.service import Service
from tests.controller.test_operators import meant_rows, pause
from tests.specs import small_spec


def of(service: Service, number: int) -> Any:
    """The same service, for chunks of another model."""
    other = copy.copy(service)
    other.spec = small_spec(model_id=f"m{number}")
    other.model = service.controller.register_model(other.spec)
    return other


def is_known(service: Service) -> bool:
    return service.model in service.controller.parts.catalog.models


def evict(service: Service) -> None:
    """Every chunk leaves the node."""
    parts = service.parts
    for row in list(parts.catalog.table.rows()):
        if parts.catalog.is_visible(row):
            parts.movement.removal.remove(row, MissReason.EVICTED)


def press(service: Service, count: int = 3) -> None:
    """Register new models, or be refused."""
    for number in range(100, 100 + count):
        try:
            of(service, number)
        except Exhausted:
            return


@pytest.fixture
def service() -> Service:
    return Service(model_count_max=1)


@pytest.fixture
def session(service: Service) -> Session:
    return service.controller.open_session()


async def test_a_model_with_chunks_stays_and_without_them_it_goes(service: Service, session: Session) -> None:
    await service.store(session, 1, 2)
    press(service)
    assert is_known(service)
    evict(service)
    press(service)
    assert not is_known(service)


async def test_a_model_stays_while_a_store_is_under_way(service: Service, session: Session) -> None:
    first = await service.reserve(session, 1)
    other = service.controller.open_session()
    waits = await service.reserve(other, 1)
    assert waits.states == (StoreState.PENDING,)
    press(service)
    await service.controller.abort(session, first.reservation_id)
    press(service)
    assert is_known(service), "the second store has no chunk, and waits for the one that ended"
    await service.controller.abort(other, waits.reservation_id)
    await service.controller.abort(other, waits.reservation_id)
    press(service)
    assert not is_known(service)


async def test_a_model_stays_while_a_lease_a_ticket_or_a_pin_holds_a_chunk(service: Service, session: Session) -> None:
    await service.store(session, 1)
    (row,) = service.parts.catalog.table.rows()
    lease = service.controller.fetches.fetch(session, service.query(1))
    ticket = service.controller.lookups.lookup(service.query(1), readers=1).ticket
    service.parts.pins.pin(row, 0)
    evict(service)
    press(service)
    assert is_known(service)
    service.controller.release(session, [lease.lease_id])
    press(service)
    assert is_known(service)
    service.controller.release_ticket(ticket)
    press(service)
    assert is_known(service)
    service.parts.pins.unpin(row)
    press(service)
    assert not is_known(service)


async def test_a_store_that_is_being_reserved_keeps_its_model_and_its_namespace(
    service: Service, session: Session
) -> None:
    """Nothing of it is claimed yet: it waits for copies to be proven."""
    began, goes_on = asyncio.Event(), asyncio.Event()

    async def prove(*_: Any) -> None:
        began.set()
        await goes_on.wait()

    service.parts.movement.checks.prove_all = prove  # type: ignore[method-assign]  # a device that takes its time
    storing = asyncio.ensure_future(service.reserve(session, 1))
    await began.wait()
    press(service)
    assert is_known(service)
    goes_on.set()
    assert (await storing).states == (StoreState.WANTED,)
    press(service)
    assert is_known(service)


async def test_under_a_number_of_a_forgotten_model_no_other_ones_chunks_are_found(
    service: Service, session: Session
) -> None:
    await service.store(session, 1)
    query = service.query(1)
    evict(service)
    new = of(service, 1)
    assert (await new.store(session, 1)).committed_count == 1
    assert len(service.parts.catalog.spaces.numbered) == 1, "its number is used again"
    with pytest.raises(InvalidRequest, match="call RegisterModel first"):
        service.controller.lookups.lookup(query)
    assert new.check(session, 1) == 1
    evict(service)
    service.model = service.controller.register_model(service.spec)
    assert service.controller.lookups.lookup(query).hit_count == 0
    assert service.check(session, 1) == 0


async def test_a_plan_for_a_forgotten_models_chunk_does_nothing_to_another_ones(
    service: Service, session: Session
) -> None:
    """The same tokens, in the same row, under the same number."""
    table, clearing = service.parts.catalog.table, service.parts.movement.clearing
    await service.store(session, 1)
    service.check(session, 1)
    (row,) = table.rows()
    meant, was = meant_rows(service, row), table.identity(row)
    plan = await clearing.plan(meant, None, pause)
    evict(service)
    new = of(service, 1)
    await new.store(session, 1)
    assert (list(table.rows()), table.spaces[row], table.digests[row]) == ([row], 0, was[1])
    assert clearing.do(plan, 0) == (Fate.GONE, False)
    assert len(await clearing.plan(meant, None, pause)) == 0
    assert not service.parts.catalog.is_here(row, was)
    assert service.parts.heat.hottest(9) == [], "its fetches are not the other one's"
    assert new.check(session, 1) == 1


async def test_a_selection_of_a_forgotten_model_names_no_other_ones_chunks(service: Service, session: Session) -> None:
    await service.store(session, 1)
    chosen = Chosen(service.parts, Selection(model="test"), 0.0)
    (row,) = service.parts.catalog.table.rows()
    assert chosen.names(row)
    evict(service)
    await of(service, 1).store(session, 1)
    assert not chosen.names(row)
    assert [rows.tolist() async for rows in chosen.blocks(Turns(service.clock).begin())] == [[]]


async def test_what_a_forgotten_model_saved_stays_in_the_sum(service: Service, session: Session) -> None:
    await service.store(session, 1)
    service.check(session, 1)
    before = service.controller.stats().models[0].served.total
    assert before.token_count == 16
    evict(service)
    of(service, 1)
    stats = service.controller.stats()
    assert [each.served.total.token_count for each in stats.models] == [0]
    assert stats.forgotten == before
    assert service.parts.served.of(service.model).hours, "they are kept, for a model that comes back"
