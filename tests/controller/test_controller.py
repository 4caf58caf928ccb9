"""The controller on simulated parts: limits, single flight, deaths, forged ids."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from kvstore.controller import Fill, Session
from kvstore.errors import Exhausted, InvalidRequest, Unauthenticated
from kvstore.seams import Pauses, SystemRandom
from kvstore.spec import ChunkState, Durability, Exactness, MissReason, StoreState
from tests.controller.service import Service, soon


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def session(service: Service) -> Session:
    return service.controller.open_session()


async def test_a_store_is_visible_when_it_is_committed_and_whole(service: Service, session: Session) -> None:
    result = await service.reserve(session, 1, 2)
    found = service.controller.lookups.lookup(service.query(1, 2))
    assert found.runs[0][:3] == (2, ChunkState.PENDING, MissReason.NONE)
    fills = service.stage(session, result, 1, 2)
    half = fills[1]._replace(strip_count=2)
    done = await service.controller.commit(session, result.reservation_id, [fills[0], half])
    assert done.states == (StoreState.COMMITTED, StoreState.ABORTED)
    assert done.committed_count == 1
    assert service.check(session, 1, 2) == 1
    assert (await service.store(session, 1, 2)).committed_count == 2
    assert service.check(session, 1, 2) == 2


async def test_the_second_writer_waits_for_the_first_and_hears_the_truth(service: Service) -> None:
    one, two = service.controller.open_session(), service.controller.open_session()
    first = await service.reserve(one, 1)
    second = await service.reserve(two, 1, 2)
    assert second.states == (StoreState.PENDING, StoreState.WANTED)
    fills = service.stage(two, second, 1, 2)
    waiting = asyncio.ensure_future(service.controller.commit(two, second.reservation_id, fills))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await service.controller.commit(one, first.reservation_id, service.stage(one, first, 1))
    assert (await waiting).committed_count == 2
    assert service.check(two, 1, 2) == 2


async def test_the_last_shard_may_commit_again_when_its_first_commit_was_cancelled(service: Service) -> None:
    """It waits for another store's chunk meanwhile; the other shards wait for it."""
    controller = service.controller
    first, second = controller.open_session(), controller.open_session()
    begun = await service.reserve(first, 1)
    result = await service.reserve(second, 1, 2, shards=2)
    fills = service.stage(second, result, 1, 2)
    reservation = controller.reservations.find(second, result.reservation_id)
    other = asyncio.ensure_future(controller.commit(second, result.reservation_id, fills, 0))
    await soon(lambda: bool(reservation.committed))
    last = asyncio.ensure_future(controller.commit(second, result.reservation_id, [], 1))
    await soon(lambda: reservation.is_publishing)
    last.cancel()
    await asyncio.wait([last])
    assert last.cancelled()
    await controller.commit(first, begun.reservation_id, service.stage(first, begun, 1))
    again = await asyncio.wait_for(controller.commit(second, result.reservation_id, [], 1), 10)
    assert (again.committed_count, (await asyncio.wait_for(other, 10)).committed_count) == (2, 2)
    assert service.check(first, 1, 2) == 2


async def test_a_writer_who_joins_his_own_store_needs_no_second_reservation() -> None:
    service = Service(reservation_count_max=1)
    session = service.controller.open_session()
    result = await service.reserve(session, 1, shards=2)
    assert service.controller.join(session, result.ticket, service.model).states == result.states
    other = service.controller.open_session()
    await service.reserve(other, 2)
    with pytest.raises(Exhausted, match="reservation_count_max"):
        service.controller.join(other, result.ticket, service.model)


async def test_when_the_first_writer_aborts_the_second_keeps_nothing_unreachable(service: Service) -> None:
    one, two = service.controller.open_session(), service.controller.open_session()
    await service.reserve(one, 1)
    second = await service.reserve(two, 1, 2)
    waiting = asyncio.ensure_future(
        service.controller.commit(two, second.reservation_id, service.stage(two, second, 1, 2))
    )
    await asyncio.sleep(0.01)
    await service.controller.close_session(one)
    done = await waiting
    assert (done.committed_count, done.durability) == (0, Durability.NONE)
    assert service.arena.chunk_count == 0
    assert (await service.store(two, 1, 2)).committed_count == 2


async def test_the_end_of_a_session_ends_no_store_of_another(service: Service) -> None:
    """While a store of the session keeps it waiting, another one of it is committed: that one went without a chunk that
    a third is still writing, and others wait for."""
    controller = service.controller
    writer, leaving, waiter = (controller.open_session() for _ in range(3))
    begun = await service.reserve(writer, 1)
    busy = controller.reservations.find(leaving, (await service.reserve(leaving, 5)).reservation_id)
    busy.busy = 1
    busy.idle.clear()
    without = await service.reserve(leaving, 1, 2)
    fills = service.stage(leaving, without, 1, 2)
    committing = asyncio.ensure_future(controller.commit(leaving, without.reservation_id, fills))
    await asyncio.sleep(0.05)
    closing = asyncio.ensure_future(controller.close_session(leaving))
    assert (await committing).committed_count == 0
    assert not closing.done()
    third = await service.reserve(waiter, 1, 3)
    fills = service.stage(waiter, third, 1, 3)
    waiting = asyncio.ensure_future(controller.commit(waiter, third.reservation_id, fills))
    busy.busy = 0
    busy.idle.set()
    await closing
    assert controller.stats().counters["store_aborted_reservations"] == 1, "the other one was committed"
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await controller.commit(writer, begun.reservation_id, service.stage(writer, begun, 1))
    assert (await waiting).committed_count == 2


async def test_two_writers_whose_chunks_alternate_wait_for_each_other_in_turn(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claims of a long chain pause for others. Each of the two claimed on where the other one paused."""
    controller = service.controller
    one, two = controller.open_session(), controller.open_session()
    has_second, is_first_done = asyncio.Event(), asyncio.Event()
    counts: Counter[asyncio.Task[Any] | None] = Counter()

    async def between(_: Pauses) -> None:
        task = asyncio.current_task()
        counts[task] += 1
        if task is first and counts[task] == 2:
            await has_second.wait()
        if task is second and counts[task] == 3:
            has_second.set()
            await is_first_done.wait()

    monkeypatch.setattr(Pauses, "between", between)
    first = asyncio.ensure_future(service.reserve(one, 1, 2, 3))
    second = asyncio.ensure_future(service.reserve(two, 1, 2, 3))
    mine = await first
    is_first_done.set()
    other = await second
    wanted, pending = StoreState.WANTED, StoreState.PENDING
    assert (mine.states, other.states) == ((wanted, pending, wanted), (pending, wanted, pending))
    done = await asyncio.gather(
        controller.commit(one, mine.reservation_id, service.stage(one, mine, 1, 2, 3)),
        controller.commit(two, other.reservation_id, service.stage(two, other, 1, 2, 3)),
    )
    assert [each.committed_count for each in done] == [3, 3]
    assert service.check(one, 1, 2, 3) == 3


async def test_the_eldest_leaf_goes_first(service: Service, session: Session) -> None:
    await service.store(session, 1, 2, 3)
    await service.store(session, 1, 4)
    await service.store(session, 5, 6, 7, 8)  # 8 chunks: full
    service.check(session, 1, 2, 3)
    await service.store(session, 9)
    assert service.check(session, 1, 4) == 1  # 4 was the least recent leaf
    found = service.controller.lookups.lookup(service.query(1, 4))
    assert found.runs[1][:3] == (1, ChunkState.MISS, MissReason.EVICTED)
    assert service.check(session, 1, 2, 3) == 3
    assert service.arena.used_bytes <= service.arena.capacity_bytes


async def test_tickets_and_leases_keep_their_chunks(service: Service, session: Session) -> None:
    await service.store(session, 1, 2, 3, 4)
    ticket = service.controller.lookups.lookup(service.query(1, 2), readers=1).ticket
    await service.store(session, 5, 6, 7, 8)
    leased = service.controller.fetches.fetch(session, service.query(5, 6, 7))
    done = await service.store(session, *range(20, 28))
    assert done.committed_count == 3  # 3, 4 and 8 could go
    assert "arena.capacity_bytes" in done.refusal
    assert service.check(session, 1, 2) == 2
    assert service.check(session, 5, 6, 7) == 3
    service.controller.release(session, [leased.lease_id])
    service.controller.release_ticket(ticket)
    assert (await service.store(session, *range(30, 38))).committed_count == 8
    assert service.controller.stats().ticket_bytes == 0


async def test_old_leases_are_revoked_under_pressure_and_counted(service: Service, session: Session) -> None:
    await service.store(session, *range(8))
    result = service.controller.fetches.fetch(session, service.query(*range(8)))
    generations = {(chunk.placement.slot, chunk.placement.generation) for chunk in result.chunks}
    assert (await service.store(session, 50)).committed_count == 0
    service.clock.advance(61.0)
    assert (await service.store(session, 50)).committed_count == 1
    assert service.controller.stats().counters["leases_revoked"] == 1
    page = service.arena.generations.bytes.view("u8")
    assert any(int(page[slot]) != generation for slot, generation in generations)
    service.controller.release(session, [result.lease_id])  # too late, and harmless


async def test_what_a_session_had_ends_with_it(service: Service, session: Session) -> None:
    await service.store(session, 1, 2)
    other = service.controller.open_session()
    service.controller.fetches.fetch(other, service.query(1, 2))
    pending = await service.reserve(other, 3, 4)
    service.stage(other, pending, 3, 4)
    await service.controller.close_session(other)
    stats = service.controller.stats()
    assert (stats.lease_count, stats.leased_bytes, stats.reservation_count, stats.reserved_bytes) == (0, 0, 0, 0)
    assert (stats.staging_bytes, stats.session_count, stats.chunk_count) == (0, 1, 2)
    with pytest.raises(Unauthenticated):
        service.controller.session(other.secret)


async def test_old_reservations_expire(service: Service, session: Session) -> None:
    result = await service.reserve(session, 1)
    service.clock.advance(61.0)
    service.controller.reservations.expire()
    with pytest.raises(InvalidRequest, match="reservation_age_s_max"):
        await service.controller.commit(session, result.reservation_id, [])
    assert service.arena.chunk_count == 0


async def test_ids_of_others_are_worth_nothing(service: Service, session: Session) -> None:
    await service.store(session, 1)
    result = service.controller.fetches.fetch(session, service.query(1))
    reserved = await service.reserve(session, 2)
    fills = service.stage(session, reserved, 2)
    thief = service.controller.open_session()
    service.controller.release(thief, [result.lease_id])
    assert service.controller.stats().lease_count == 1
    with pytest.raises(InvalidRequest, match="no reservation"):
        await service.controller.commit(thief, reserved.reservation_id, fills)
    await service.controller.abort(thief, reserved.reservation_id)
    own = await service.reserve(thief, 3)
    with pytest.raises(InvalidRequest, match="no staging"):
        await service.controller.fill(thief, own.reservation_id, fills)
    assert (await service.controller.commit(session, reserved.reservation_id, fills)).committed_count == 1
    with pytest.raises(Unauthenticated):
        service.controller.session(SystemRandom().bytes(32))


@pytest.mark.parametrize(
    "wrong",
    [
        {"chunk": 1}, {"chunk": -1}, {"strip_first": -1}, {"strip_first": 1}, {"strip_count": 0}, {"strip_count": 5},
        {"staging_offset": 1 << 40}, {"staging_offset": -4096}, {"staging_id": 999},
    ],
)  # fmt: skip
async def test_a_fill_outside_its_chunk_or_staging_is_refused(
    service: Service, session: Session, wrong: dict[str, int]
) -> None:
    result = await service.reserve(session, 1)
    good = service.stage(session, result, 1)[0]
    with pytest.raises(InvalidRequest):
        await service.controller.fill(session, result.reservation_id, [good._replace(**wrong)])
    done = await service.controller.commit(session, result.reservation_id, [good])
    assert done.committed_count == 1
    assert service.check(session, 1) == 1


async def test_filling_twice_is_refused(service: Service, session: Session) -> None:
    result = await service.reserve(session, 1)
    good = service.stage(session, result, 1)
    await service.controller.fill(session, result.reservation_id, good)
    with pytest.raises(InvalidRequest, match="filled before"):
        await service.controller.fill(session, result.reservation_id, [Fill(*good[0])])


async def test_limits_name_their_setting() -> None:
    service = Service(
        session_count_max=1, reservation_count_max=1, staging_bytes_max=8192, model_count_max=1, token_count_max=16,
        lease_count_max=1,
    )  # fmt: skip
    controller = service.controller
    session = controller.open_session()
    await service.store(session, 1)
    with pytest.raises(Exhausted, match="session_count_max"):
        controller.open_session()
    await service.reserve(session, 2)
    with pytest.raises(Exhausted, match="reservation_count_max"):
        await service.reserve(session, 3)
    with pytest.raises(Exhausted, match="staging_bytes_max"):
        controller.create_staging(session, 12288)
    with pytest.raises(Exhausted, match="model_count_max"):
        controller.register_model(replace(service.spec, model_id="other"))
    with pytest.raises(Exhausted, match="token_count_max"):
        await controller.lookup_wide(service.query(1, 2, 3))
    controller.fetches.fetch(session, service.query(1))
    with pytest.raises(Exhausted, match="lease_count_max"):
        controller.fetches.fetch(session, service.query(1))
    small = Service(leased_bytes_max=1, staging_bytes_total_max=4096)
    session = small.controller.open_session()
    with pytest.raises(Exhausted, match="staging_bytes_total_max"):
        small.controller.create_staging(session, 8192)
    roomy = Service(leased_bytes_max=1)
    session = roomy.controller.open_session()
    await roomy.store(session, 1)
    with pytest.raises(Exhausted, match="leased_bytes_max"):
        roomy.controller.fetches.fetch(session, roomy.query(1))


async def test_derived_lives_beside_exact(service: Service, session: Session) -> None:
    await service.store(session, 1, exactness=Exactness.DERIVED)
    assert service.controller.lookups.lookup(service.query(1)).hit_count == 0
    assert service.controller.lookups.lookup(service.query(1, exactness=Exactness.DERIVED)).hit_count == 1
    await service.store(session, 1)
    assert service.check(session, 1) == 1


async def test_draining_takes_no_new_stores_and_finishes_the_old(service: Service, session: Session) -> None:
    result = await service.reserve(session, 1)
    fills = service.stage(session, result, 1)
    draining = asyncio.ensure_future(service.controller.drain(100.0))
    await asyncio.sleep(0)
    with pytest.raises(Exception, match="stopping"):
        await service.reserve(session, 2)
    assert (await service.controller.commit(session, result.reservation_id, fills)).committed_count == 1
    await asyncio.wait_for(draining, 5.0)


async def test_leases_that_nobody_gives_back_end_by_their_age_when_their_session_needs_room(
    service: Service, session: Session
) -> None:
    """A fetch whose caller went before the reply came has a lease nobody knows of: it locks nobody out for ever."""
    limits = replace(service.controller.parts.limits, lease_count_max=3)
    service.parts.leases._limits = limits
    other = service.controller.open_session()
    await service.store(session, 1)
    kept = service.controller.fetches.fetch(other, service.query(1))
    for _ in range(3):
        service.controller.fetches.fetch(session, service.query(1))
    with pytest.raises(Exhausted, match="lease_count_max"):
        service.controller.fetches.fetch(session, service.query(1))
    service.clock.advance(limits.lease_age_s_max)
    assert service.check(session, 1) == 1
    assert not service.parts.leases.of(session)
    assert service.parts.leases.of(other) == [kept.lease_id], "another session's is taken only where memory is needed"
