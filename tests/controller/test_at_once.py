"""Chunks that are published as soon as they are whole, while their store's other bytes are still to come."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.controller.stores.publish import TURN_COUNT
from kvstore.errors import InvalidRequest
from kvstore.seams import WorkerThreads
from kvstore.spec import StoreState
from tests.controller.service import Service, soon
from tests.controller.test_moves import balanced, pieces
from tests.faulty_workers import FaultyWorkers, lost, refused

PATH = (1, 2, 3)


async def test_chunks_are_visible_before_the_commit_and_are_counted_by_it() -> None:
    service = Service(workers=WorkerThreads(2, "mover"))
    session = service.controller.open_session()
    result = await service.reserve(session, *PATH)
    fills = service.stage(session, result, *PATH)
    await service.controller.fill(session, result.reservation_id, fills[:2], at_once=True)
    await soon(lambda: service.check(session, *PATH) == 2)
    done = await service.controller.commit(session, result.reservation_id, fills[2:])
    assert (done.committed_count, done.refusal) == (3, "")
    assert done.states == (StoreState.COMMITTED,) * 3
    assert service.check(session, *PATH) == 3
    balanced(service, session)


async def test_a_chunk_waits_for_the_one_before_it() -> None:
    service = Service()
    session = service.controller.open_session()
    result = await service.reserve(session, *PATH)
    fills = pieces(service, session, result, *PATH)
    later, first = fills[3:], fills[:3]
    await service.controller.fill(session, result.reservation_id, later, at_once=True)
    await soon(lambda: not service.controller.reservations.are_moving(session))
    assert service.check(session, *PATH) == 0
    await service.controller.fill(session, result.reservation_id, first[:2], at_once=True)
    await soon(lambda: not service.controller.reservations.are_moving(session))
    assert service.check(session, *PATH) == 0, "a strip of it is still to come"
    await service.controller.fill(session, result.reservation_id, first[2:], at_once=True)
    await soon(lambda: service.check(session, *PATH) == 3)
    done = await service.controller.commit(session, result.reservation_id, [])
    assert (done.committed_count, done.refusal) == (3, "")
    balanced(service, session)


@pytest.mark.parametrize("is_committed", [True, False], ids=["commit", "abort"])
async def test_what_failed_is_never_visible_and_nothing_behind_it(is_committed: bool) -> None:
    workers = FaultyWorkers()
    service = Service(workers=workers)
    session = service.controller.open_session()
    result = await service.reserve(session, *PATH)
    fills = service.stage(session, result, *PATH)
    workers.fail(refused, 1)
    await service.controller.fill(session, result.reservation_id, fills, at_once=True)
    await soon(lambda: not service.controller.reservations.are_moving(session))
    assert service.check(session, *PATH) == 1
    if is_committed:
        done = await service.controller.commit(session, result.reservation_id, [])
        assert done.committed_count == 1
        assert "copying from staging failed" in done.refusal
    else:
        await service.controller.abort(session, result.reservation_id)
    assert service.check(session, *PATH) == 1
    balanced(service, session)
    assert (await service.store(session, *PATH)).committed_count == 3


async def test_staging_is_in_use_until_the_copies_end() -> None:
    workers = FaultyWorkers()
    service = Service(workers=workers)
    session = service.controller.open_session()
    result = await service.reserve(session, *PATH)
    fills = service.stage(session, result, *PATH)
    workers.fail(lost, 0)
    await service.controller.fill(session, result.reservation_id, fills[:1], at_once=True)
    with pytest.raises(InvalidRequest, match="being read"):
        service.controller.close_staging(session, fills[0].staging_id)


async def test_a_store_of_several_shards_is_published_by_its_commits() -> None:
    service = Service()
    session = service.controller.open_session()
    result = await service.reserve(session, *PATH, shards=2)
    fills = service.stage(session, result, *PATH)
    with pytest.raises(InvalidRequest, match="several shards"):
        await service.controller.fill(session, result.reservation_id, fills, at_once=True)
    assert service.check(session, *PATH) == 0
    await service.controller.abort(session, result.reservation_id)
    balanced(service, session)


async def test_others_have_their_turn_while_many_chunks_are_published() -> None:
    """All of them waited for the first one."""
    count = 4 * TURN_COUNT
    service, path = Service(chunks=count), tuple(range(1, count + 1))
    session = service.controller.open_session()
    result = await service.reserve(session, *path)
    fills = service.stage(session, result, *path)
    await service.controller.fill(session, result.reservation_id, fills[1:], at_once=True)
    await soon(lambda: not service.controller.reservations.are_moving(session))
    await service.controller.fill(session, result.reservation_id, fills[:1], at_once=True)
    seen = [0]
    while seen[-1] < count:
        await asyncio.sleep(0)
        seen.append(service.parts.counters.snapshot().get("store_committed_chunks", 0))
        assert len(seen) < 1000
    assert max(after - before for before, after in zip(seen, seen[1:], strict=False)) <= TURN_COUNT
    done = await service.controller.commit(session, result.reservation_id, [])
    assert done.committed_count == service.check(session, *path) == count
    balanced(service, session)
