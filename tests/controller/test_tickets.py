"""Tickets: found by one session, fetched by others, kept meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.controller.fetches.fetch import PLACES_MAX
from kvstore.errors import DataLoss, Exhausted, InvalidRequest
from tests.controller.service import Service


@pytest.fixture
def service() -> Service:
    return Service(chunks=4)


async def test_held_chunks_stay_until_every_reader_came(service: Service) -> None:
    controller = service.controller
    writer, scheduler, worker = (controller.open_session() for _ in range(3))
    await service.store(writer, 1, 2)
    found = controller.lookups.lookup(service.query(1, 2, 3), readers=2)
    assert found.hit_count == 2
    await service.store(writer, 5, 6, 7)  # there is room for two of them only
    assert controller.lookups.lookup(service.query(1, 2)).hit_count == 2
    await controller.close_session(scheduler)
    for _ in range(2):
        result = await controller.redeem(worker, found.ticket)
        assert result.hit_count == 2
        controller.release(worker, [result.lease_id])
    with pytest.raises(InvalidRequest, match="redeemed by all"):
        await controller.redeem(worker, found.ticket)
    assert (controller.stats().ticket_count, controller.stats().ticket_bytes) == (0, 0)
    await service.store(writer, 8, 9, 10)
    assert controller.lookups.lookup(service.query(1, 2)).hit_count < 2, "free to go now"


async def test_a_ticket_expires_and_gives_back_what_it_held(service: Service) -> None:
    controller = service.controller
    session = controller.open_session()
    await service.store(session, 1)
    ticket = controller.lookups.lookup(service.query(1), readers=1).ticket
    service.clock.advance(controller.parts.limits.ticket_age_s_max)
    controller.tickets.expire()
    with pytest.raises(InvalidRequest, match="expired"):
        await controller.redeem(session, ticket)
    assert controller.stats().ticket_bytes == 0
    assert controller.stats().counters["tickets_expired"] == 1


async def test_a_reader_that_could_not_get_a_lease_may_come_again(service: Service) -> None:
    service = Service(chunks=4, lease_count_max=1)
    controller = service.controller
    session = controller.open_session()
    await service.store(session, 1)
    ticket = controller.lookups.lookup(service.query(1), readers=1).ticket
    lease = controller.fetches.fetch(session, service.query(1)).lease_id
    with pytest.raises(Exhausted, match="lease_count_max"):
        await controller.redeem(session, ticket)
    controller.release(session, [lease])
    assert (await controller.redeem(session, ticket)).hit_count == 1


async def test_places_in_many_extents_are_not_told(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk lies in up to as many extents as it has layers: to tell them all would take long."""
    controller = service.controller
    session = controller.open_session()
    await service.store(session, 1, 2)
    ticket = controller.lookups.lookup(service.query(1, 2), readers=1).ticket
    places = controller.places(ticket)
    assert [len(each.placement.extents) for each in places] == [1, 1]
    for count, is_told in ((PLACES_MAX // 2, True), (PLACES_MAX // 2 + 1, False)):
        cut = iter([replace(each.placement, extents=each.placement.extents * count) for each in places])
        with monkeypatch.context() as patch:
            patch.setattr(controller.fetches._movement.memory, "placement", lambda _, cut=cut: next(cut))
            assert bool(controller.places(ticket)) is is_told


async def test_limits_are_named(service: Service) -> None:
    service = Service(chunks=4, ticket_count_max=1)
    controller = service.controller
    session = controller.open_session()
    await service.store(session, 1)
    assert controller.lookups.lookup(service.query(9), readers=1).ticket == b"", "nothing hit, nothing held"
    with pytest.raises(InvalidRequest, match="readers"):
        controller.lookups.lookup(service.query(1), readers=5000)
    controller.release_ticket(controller.lookups.lookup(service.query(1), readers=1).ticket)
    controller.lookups.lookup(service.query(1), readers=1)
    with pytest.raises(Exhausted, match="ticket_count_max"):
        controller.lookups.lookup(service.query(1), readers=1)
    service = Service(chunks=4, ticket_bytes_max=1)
    session = service.controller.open_session()
    await service.store(session, 1)
    with pytest.raises(Exhausted, match="ticket_bytes_max"):
        service.controller.lookups.lookup(service.query(1), readers=1)


async def test_what_several_tickets_hold_counts_once(service: Service) -> None:
    """A hundred requests behind one system prompt hold it once. It counts until the last of them has ended."""
    chunk_bytes = service.layout.total_bytes
    service = Service(chunks=8, ticket_bytes_max=3 * chunk_bytes)
    controller, session = service.controller, service.controller.open_session()
    await service.store(session, 1, 2)
    await service.store(session, 1, 3)
    alone = controller.lookups.lookup(service.query(1), readers=1).ticket
    assert controller.tickets.held_bytes == chunk_bytes
    held = [controller.lookups.lookup(service.query(1, last), readers=1).ticket for last in (2, 3, 2, 3)]
    assert controller.tickets.held_bytes == 3 * chunk_bytes
    for count, ticket in enumerate([*held[:2], alone]):
        controller.release_ticket(ticket)
        assert controller.tickets.held_bytes == 3 * chunk_bytes, count
    controller.release_ticket(held[2])
    assert controller.tickets.held_bytes == 2 * chunk_bytes
    controller.release_ticket(held[3])
    assert controller.tickets.held_bytes == 0


async def test_a_chunk_that_a_chain_names_twice_is_held_and_given_back(service: Service) -> None:
    """No proper client asks so. The end of such a ticket raised KeyError, also where the service looks for expired
    tickets, which ended the service."""
    controller = service.controller
    await service.store(controller.open_session(), 1, 2)
    first, second = service.query(1, 2).digests
    twice = service.query(1, 2)._replace(digests=(first, first, second, second))
    assert controller.lookups.lookup(twice, readers=1).hit_count == 4
    single = controller.lookups.lookup(service.query(1, 2), readers=1)
    assert controller.stats().ticket_bytes == 2 * service.layout.total_bytes
    controller.release_ticket(single.ticket)
    service.clock.advance(controller.parts.limits.ticket_age_s_max)
    controller.tickets.expire()
    assert (controller.stats().ticket_count, controller.stats().ticket_bytes) == (0, 0)
    assert not any(map(controller.parts.catalog.table.is_held, range(2)))


async def test_what_was_lost_under_a_ticket_is_said(service: Service) -> None:
    """A worker that is told of two chunks and gets one would compute over nothing."""
    controller = service.controller
    session = controller.open_session()
    await service.store(session, 1, 2)
    ticket = controller.lookups.lookup(service.query(1, 2), readers=1).ticket
    memory = controller.parts.movement.memory
    last = max(memory.rows())
    await controller.parts.movement.removal.quarantine(memory, last, memory.residency(last))
    with pytest.raises(DataLoss, match="CORRUPT"):
        await controller.redeem(session, ticket)
    assert not service.parts.leases.of(session)


async def test_whoever_says_to_have_copied_what_the_node_does_not_have_is_not_counted(service: Service) -> None:
    """All chunks of the ticket are in a shared tier: their places were never told."""
    controller = service.controller
    ticket = controller.tickets.issue(service.query(1, 2), (), readers=2).ticket_id
    assert not controller.places(ticket)
    for _ in range(2):
        controller.copied(ticket)
    counters = controller.stats().counters
    assert (counters["fetch_calls"], counters["tickets_redeemed"]) == (0, 2)
    assert controller.stats().ticket_count == 0
