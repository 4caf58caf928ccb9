"""Filled means moved: whatever becomes of a mover's job, what is served is right to the bit or nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvstore.chunk import are_right, strip_run
from kvstore.controller import Fill, Session, StoreResult
from kvstore.errors import DeadlineExceeded, Internal, InvalidRequest, KVStoreError, Unavailable
from kvstore.seams import WorkerThreads
from kvstore.seams.scheduler import run_for
from kvstore.spec import StoreState
from tests.controller.service import Service, soon
from tests.faulty_workers import WAYS, FaultyWorkers, Job, answers_short, lost, refused

STORE_WAYS = (*WAYS, answers_short)


def pieces(service: Service, session: Session, result: StoreResult, *path: int) -> list[Fill]:
    """The fills of a store in three runs of strips a chunk, so that each chunk takes several jobs."""
    count, cuts = service.layout.strip_count, service.layout.strip_offsets
    bounds = [0, 1, count // 2, count]
    found: list[Fill] = []
    for fill in service.stage(session, result, *path):
        for first, stop in zip(bounds, bounds[1:], strict=False):
            offset = fill.staging_offset + int(cuts[first])
            found.append(Fill(fill.chunk, first, stop - first, fill.staging_id, offset))
    return found


def balanced(service: Service, session: Session) -> None:
    """Nothing is left of a store but what was committed."""
    stats = service.controller.stats()
    assert (stats.reserved_bytes, stats.reservation_count) == (0, 0)
    assert stats.used_bytes == service.layout.total_bytes * stats.chunk_count
    for staging_id in list(session.stagings):
        service.controller.close_staging(session, staging_id)
    assert service.controller.stats().staging_bytes == 0


@pytest.mark.parametrize("way", STORE_WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("with_commit", [False, True], ids=["fill", "commit"])
async def test_each_job_of_a_store_in_turn_fails_and_nothing_wrong_is_served(way: Any, with_commit: bool) -> None:
    workers = FaultyWorkers()
    service = Service(workers=workers)
    session = service.controller.open_session()
    job_count = 6
    for target in range(job_count):
        path = (target, 100 + target)
        result = await service.reserve(session, *path)
        fills = pieces(service, session, result, *path)
        workers.names.clear()
        workers.fail(way, target)
        if not with_commit:
            with pytest.raises((Unavailable, Internal), match="copying from staging failed"):
                await service.controller.fill(session, result.reservation_id, fills)
            fills = []
        done = await service.controller.commit(session, result.reservation_id, fills)
        assert workers.names == ["move"] * job_count
        whole = 0 if target < job_count // 2 else 1
        assert done.committed_count == whole
        assert [state is StoreState.COMMITTED for state in done.states] == [whole == 1, False]
        assert "copying from staging failed" in done.refusal
        assert service.check(session, *path) == whole
        balanced(service, session)
        again = await service.store(session, *path)
        assert again.committed_count == 2, "what failed can be stored again"
        assert service.check(session, *path) == 2
        balanced(service, session)


async def test_what_failed_takes_no_second_fill_and_is_dropped_whole() -> None:
    """The strips that were refused stay the refused fill's: a writer that sends them again has lost count."""
    workers = FaultyWorkers()
    service = Service(workers=workers)
    session = service.controller.open_session()
    result = await service.reserve(session, 1)
    fills = pieces(service, session, result, 1)
    workers.fail(refused, 1)
    with pytest.raises(Unavailable):
        await service.controller.fill(session, result.reservation_id, fills)
    with pytest.raises(InvalidRequest, match="filled before"):
        await service.controller.fill(session, result.reservation_id, fills[1:2])
    await service.controller.abort(session, result.reservation_id)
    assert service.check(session, 1) == 0
    balanced(service, session)


async def test_the_shards_of_a_store_hear_that_a_part_of_it_was_not_moved() -> None:
    workers = FaultyWorkers()
    service = Service(workers=workers)
    sessions = [service.controller.open_session() for _ in range(2)]
    result = await service.reserve(sessions[0], 1)
    session_fills = pieces(service, sessions[0], result, 1)
    reservation = service.controller.reservations.find(sessions[0], result.reservation_id)
    reservation.shard_count = 2
    service.controller.join(sessions[1], result.ticket, service.model)
    workers.fail(refused, 1)
    with pytest.raises(Unavailable):
        await service.controller.fill(sessions[0], result.reservation_id, session_fills)
    commits = [
        service.controller.commit(session, result.reservation_id, [], shard) for shard, session in enumerate(sessions)
    ]
    async with asyncio.timeout(5):
        for done in await asyncio.gather(*commits):
            assert done.committed_count == 0
            assert "copying from staging failed" in done.refusal
    assert service.check(sessions[0], 1) == 0
    balanced(service, sessions[0])


async def test_who_joins_a_store_is_shown_only_what_was_moved() -> None:
    workers = FaultyWorkers()
    service = Service(workers=workers)
    writer, reader = service.controller.open_session(), service.controller.open_session()
    result = await service.reserve(writer, 1)
    fill = service.stage(writer, result, 1)[0]
    joined = await service.controller.redeem(reader, result.ticket)
    slabs = service.layout.slabs
    fills = [
        Fill(0, slab.strip_first, slab.strip_count, fill.staging_id, fill.staging_offset + slab.offset)
        for slab in slabs
    ]
    workers.fail(refused, 1)
    with pytest.raises(KVStoreError):
        await service.controller.fill(writer, result.reservation_id, fills)
    loading = joined.chunks[0].loading
    assert loading is not None
    assert loading.landed == (1 << len(slabs)) - 1 & ~(1 << 1)
    body = service.body(service.query(1).digests[0])
    for number, slab in enumerate(slabs):
        found = joined.chunks[0].placement.pieces[1 + number]
        same = (found == body[slab.offset : slab.offset + slab.byte_count]).all()
        assert same == bool(loading.landed >> number & 1)
    await service.controller.abort(writer, result.reservation_id)
    assert loading.lost
    service.controller.release(reader, [joined.lease_id])
    balanced(service, writer)


async def test_a_job_that_never_answers_keeps_its_memory_and_nothing_of_it_is_served() -> None:
    """Nobody knows whether the mover still writes: neither the chunk's memory nor the staging is anybody else's."""
    workers = FaultyWorkers()
    service = Service(workers=workers)
    session = service.controller.open_session()
    result = await service.reserve(session, 1)
    fills = pieces(service, session, result, 1)
    workers.fail(lost, 1)
    for call in (
        service.controller.fill(session, result.reservation_id, fills),
        service.controller.commit(session, result.reservation_id, []),
        service.controller.abort(session, result.reservation_id),
    ):
        with pytest.raises(DeadlineExceeded, match="still moving"):
            await asyncio.wait_for(call, 10)
    with pytest.raises(InvalidRequest, match="being read"):
        service.controller.close_staging(session, fills[0].staging_id)
    service.clock.advance(service.controller.parts.limits.reservation_age_s_max + 1)
    service.controller.reservations.expire()
    await service.controller.close_session(session)
    assert session.stagings, "the movers may read it"
    other = service.controller.open_session()
    assert service.check(other, 1) == 0
    assert service.controller.stats().used_bytes == service.layout.total_bytes
    assert (await service.store(other, 2)).committed_count == 1


async def test_what_a_session_left_to_a_slow_mover_is_given_back_when_that_ends() -> None:
    """Its chunk would be another's store in flight for ever: nobody could keep it any more."""
    late: list[Callable[[], None]] = []

    def slow(function: Job, args: tuple[object, ...]) -> Future[Any]:
        future: Future[Any] = Future()
        late.append(partial(run_for, future, function, *args))
        return future

    workers = FaultyWorkers()
    service = Service(workers=workers)
    controller, session = service.controller, service.controller.open_session()
    result = await service.reserve(session, 1)
    fills = pieces(service, session, result, 1)
    workers.fail(slow, 1)
    controller.fills.start(session, controller.reservations.find(session, result.reservation_id), fills)
    await controller.close_session(session)
    sweeping = asyncio.ensure_future(controller.sweep(0.01))
    await asyncio.sleep(0.05)
    assert session.stagings, "the mover may read it"
    late[0]()
    await soon(lambda: not session.stagings)
    sweeping.cancel()
    other = controller.open_session()
    assert (await service.store(other, 1)).committed_count == 1
    assert service.check(other, 1) == 1
    balanced(service, other)


async def test_staging_is_not_closed_while_movers_read_it() -> None:
    service = Service(workers=WorkerThreads(1, "test"))
    session = service.controller.open_session()
    result = await service.reserve(session, 1)
    fills = service.stage(session, result, 1)
    filling = asyncio.ensure_future(service.controller.fill(session, result.reservation_id, fills))
    await asyncio.sleep(0)  # it has begun, and cannot have heard that the copy ended
    with pytest.raises(InvalidRequest, match="being read"):
        service.controller.close_staging(session, fills[0].staging_id)
    await filling
    assert (await service.controller.commit(session, result.reservation_id, [])).committed_count == 1
    assert service.check(session, 1) == 1
    service.controller.close_staging(session, fills[0].staging_id)
    service.parts.workers.close()


def test_a_header_without_checksums_fits_no_bytes() -> None:
    """What the checksums of strips that were never moved look like is what no strip checks to, whatever its bytes."""
    service = Service()
    strips = strip_run(service.layout, bytes(32), bytes(16), 0, service.layout.strip_count)
    nothing = bytes(16 * service.layout.strip_count)
    for fill in (0, 0xDB, 0xFF):
        data = np.full(service.layout.body_bytes, fill, np.uint8)
        assert not are_right([(data, strips)], nothing)
