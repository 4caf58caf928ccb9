"""One call has one deadline: it is set when the request comes, and every wait takes what is left of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

import pytest

from kvstore.controller import Fill, ReserveRequest, Session, StoreResult
from kvstore.controller.fetches import Lookups
from kvstore.controller.prefills import PartialPrefills, PrefillRequest
from kvstore.controller.stores import fill
from kvstore.errors import DeadlineExceeded, Unavailable
from kvstore.planning import Terms
from kvstore.planning.loading import Way
from kvstore.seams.scheduler import run_for
from kvstore.spec import StoreState
from tests.controller.service import Service
from tests.scenario import scenario
from tests.simulated import LoopClock, simulate
from tests.tiers.values import ValueService

SEED = 5
DEADLINE_S = 0.2
"""Of the service."""
Scenario = Callable[[Service, "SlowWorkers"], Awaitable[None]]


class SlowWorkers:
    """A call takes ``seconds`` of simulated time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def submit(self, function: Callable[..., Any], /, *args: object) -> Future[Any]:
        future: Future[Any] = Future()
        asyncio.get_running_loop().call_later(self.seconds, lambda: run_for(future, function, *args))
        return future

    def close(self) -> None:
        return None


def run(scenario: Scenario, *, job_s: float, chunks: int = 8) -> None:
    """``job_s``: how long a byte mover needs for one job."""

    async def whole() -> None:
        workers = SlowWorkers(job_s)
        await scenario(Service(chunks, workers, LoopClock()), workers)

    simulate(whole(), seed=SEED)


async def seconds_of(call: Awaitable[Any], expected: type[Exception] | None = None) -> float:
    """How long it takes until a call has ended, as it is expected to."""
    loop = asyncio.get_running_loop()
    since_s = loop.time()
    if expected is None:
        await call
    else:
        with pytest.raises(expected):
            await call
    return loop.time() - since_s


async def begun(service: Service, *path: int) -> tuple[Session, StoreResult, list[Fill]]:
    session = service.controller.open_session()
    result = await service.reserve(session, *path)
    return session, result, service.stage(session, result, *path)


def test_a_commit_of_many_chunks_waits_once() -> None:
    """However many of them still move."""

    async def scenario(service: Service, workers: SlowWorkers) -> None:
        session, result, fills = await begun(service, *range(8))
        commit = service.controller.commit(session, result.reservation_id, fills)
        assert await seconds_of(commit, DeadlineExceeded) == pytest.approx(DEADLINE_S)

    run(scenario, job_s=100.0)


def test_a_commit_that_could_not_wait_is_ended_by_the_next_one() -> None:
    """A copy that has started is finished even if its caller is gone."""

    async def scenario(service: Service, workers: SlowWorkers) -> None:
        session, result, fills = await begun(service, *range(8))
        commit = service.controller.commit(session, result.reservation_id, fills)
        assert await seconds_of(commit, DeadlineExceeded) == pytest.approx(DEADLINE_S)
        await asyncio.sleep(workers.seconds)
        done = await service.controller.commit(session, result.reservation_id, [])
        assert done.committed_count == 8
        assert service.check(session, *range(8)) == 8

    run(scenario, job_s=1.0)


def test_what_a_cancelled_fill_began_is_filled() -> None:
    async def scenario(service: Service, workers: SlowWorkers) -> None:
        session, result, fills = await begun(service, 1)
        filling = asyncio.ensure_future(service.controller.fill(session, result.reservation_id, fills))
        await asyncio.sleep(0)
        filling.cancel()
        await asyncio.wait([filling])
        assert filling.cancelled()
        done = await service.controller.commit(session, result.reservation_id, [])
        assert done.committed_count == 1
        assert service.check(session, 1) == 1

    run(scenario, job_s=0.1)


def test_a_commit_waits_for_other_stores_and_for_movers_no_longer_than_its_caller() -> None:
    """First for the chunk that another store writes, at most half of the time, then for its own bytes."""

    async def scenario(service: Service, workers: SlowWorkers) -> None:
        other = service.controller.open_session()
        await service.reserve(other, 0)
        session, result, fills = await begun(service, 0, 1, 2)
        assert result.states == (StoreState.PENDING, StoreState.WANTED, StoreState.WANTED)
        deadline = service.controller.deadline(0.1)
        commit = service.controller.commit(session, result.reservation_id, fills, deadline=deadline)
        assert await seconds_of(commit, DeadlineExceeded) == pytest.approx(0.1)

    run(scenario, job_s=100.0)


def test_a_commit_answers_before_its_caller_gives_up_when_another_store_does_not_end() -> None:
    async def scenario(service: Service, workers: SlowWorkers) -> None:
        other = service.controller.open_session()
        await service.reserve(other, 0)
        session, result, fills = await begun(service, 0, 1)
        deadline = service.controller.deadline(0.1)
        commit = service.controller.commit(session, result.reservation_id, fills, deadline=deadline)
        assert await seconds_of(commit) == pytest.approx(0.05)

    run(scenario, job_s=0.001)


def test_time_spent_before_a_call_waits_is_part_of_its_deadline() -> None:
    async def scenario(service: Service, workers: SlowWorkers) -> None:
        session, result, fills = await begun(service, 1)
        deadline = service.controller.deadline(0.15)
        await asyncio.sleep(0.1)
        fill = service.controller.fill(session, result.reservation_id, fills, deadline)
        assert await seconds_of(fill, DeadlineExceeded) == pytest.approx(0.05)
        abort = service.controller.abort(session, result.reservation_id, service.controller.deadline(0.02))
        assert await seconds_of(abort, DeadlineExceeded) == pytest.approx(0.02)

    run(scenario, job_s=100.0)


def test_no_caller_makes_a_call_wait_longer_than_the_service_does() -> None:
    async def scenario(service: Service, workers: SlowWorkers) -> None:
        session, result, fills = await begun(service, 1)
        fill = service.controller.fill(session, result.reservation_id, fills, service.controller.deadline(1000.0))
        assert await seconds_of(fill, DeadlineExceeded) == pytest.approx(DEADLINE_S)

    run(scenario, job_s=100.0)


@pytest.mark.parametrize("remaining_s", [None, 1000.0, 5.0, 0.1, 0.0])
def test_a_shard_waits_for_the_others_as_long_as_a_store_may_take_and_its_caller_waits(
    remaining_s: float | None,
) -> None:
    async def scenario(service: Service, workers: SlowWorkers) -> None:
        session = service.controller.open_session()
        result = await service.reserve(session, 1, shards=2)
        deadline = service.controller.deadline(remaining_s)
        commit = service.controller.commit(session, result.reservation_id, [], deadline=deadline)
        most_s = service.parts.limits.reservation_age_s_max + DEADLINE_S
        expected_s = most_s if remaining_s is None else min(most_s, remaining_s)
        assert await seconds_of(commit, DeadlineExceeded) == pytest.approx(expected_s)

    run(scenario, job_s=0.001)


@pytest.mark.parametrize("remaining_s", [None, 1000.0, 5.0, 0.1, 0.0])
def test_a_reader_of_a_store_in_flight_waits_as_long_as_that_may_take_and_its_caller_waits(
    remaining_s: float | None,
) -> None:
    async def scenario(service: Service, workers: SlowWorkers) -> None:
        writer, reader = (service.controller.open_session() for _ in range(2))
        result = await service.reserve(writer, 1)
        deadline = service.controller.deadline(remaining_s)
        found = await service.controller.redeem(reader, result.ticket)

        async def read() -> None:
            news = [each async for batch in service.controller.arrivals(found, deadline) for each in batch]
            assert news[-1].lost

        most_s = service.parts.limits.reservation_age_s_max + DEADLINE_S
        assert await seconds_of(read()) == pytest.approx(most_s if remaining_s is None else min(most_s, remaining_s))

    run(scenario, job_s=0.001)


@pytest.mark.parametrize("job_s", [0.01, 100.0])
def test_a_long_list_of_fills_leaves_the_movers_to_others_in_between(
    monkeypatch: pytest.MonkeyPatch, job_s: float
) -> None:
    """A client sends as many small ones as a message has room for: what others ask of the movers is behind a few."""
    monkeypatch.setattr(fill, "BATCH_COUNT", 1)
    monkeypatch.setattr(fill, "JOBS_AHEAD_MAX", 2)

    async def scenario(service: Service, workers: SlowWorkers) -> None:
        session = service.controller.open_session()
        result = await service.reserve(session, *range(8))
        reservation = service.controller.reservations.find(session, result.reservation_id)
        submit, ahead = workers.submit, []

        def noted(function: Callable[..., Any], /, *args: object) -> Future[Any]:
            ahead.append(reservation.busy)
            return submit(function, *args)

        monkeypatch.setattr(workers, "submit", noted)
        begin = service.controller.begin_fill(
            session, result.reservation_id, service.stage(session, result, *range(8)), service.controller.deadline()
        )
        if job_s > DEADLINE_S:
            assert await seconds_of(begin, DeadlineExceeded) == pytest.approx(DEADLINE_S)
            assert len(ahead) == 2
        else:
            assert len(await begin) == 1
            assert len(ahead) == 7
        assert max(ahead) < 2

    run(scenario, job_s=job_s)


def test_a_session_that_ends_waits_once_for_the_movers_of_all_its_stores() -> None:
    async def scenario(service: Service, workers: SlowWorkers) -> None:
        session = service.controller.open_session()
        for number in range(4):
            result = await service.reserve(session, number)
            fills = service.stage(session, result, number)
            await service.controller.begin_fill(session, result.reservation_id, fills, service.controller.deadline())
            reservation = service.controller.reservations.find(session, result.reservation_id)
            service.controller.fills.start(session, reservation, fills)
        assert await seconds_of(service.controller.close_session(session)) == pytest.approx(DEADLINE_S)
        assert session.stagings, "the movers may read it"

    run(scenario, job_s=100.0)


@scenario(lambda: ValueService())
async def test_a_value_that_is_being_read_is_waited_for_as_long_as_the_caller_hears_the_answer(
    service: ValueService,
) -> None:
    await service.put(1)
    query = service.of_key("k")
    lease = service.controller.fetches.fetch(service.session, query)
    request = ReserveRequest(query, query.digests, replaces=query.digests)
    for remaining_s in (0.5, 2.0):
        deadline = service.controller.deadline(remaining_s)
        reserve = service.controller.reserve(service.session, request, deadline)
        assert await seconds_of(reserve, Unavailable) == pytest.approx(remaining_s / 2, abs=0.01)
    service.controller.release(service.session, [lease.lease_id])
    service.parts.pins.pin(service.row(), 0)
    assert await seconds_of(service.put(2), Unavailable) == 0.0, "nobody knows when its pin ends"
    service.parts.pins.unpin(service.row())
    await service.put(2)
    assert await service.get() == 2


async def test_a_prompt_is_planned_by_what_its_lookup_left_of_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service()
    session, controller = service.controller.open_session(), service.controller
    await service.store(session, 1, 2)
    prefills, look_up = PartialPrefills(service.parts, controller.lookups, controller.tickets), Lookups.lookup_wide

    async def late(*given: Any) -> Any:
        service.clock.advance(0.3)
        return await look_up(*given)

    monkeypatch.setattr(Lookups, "lookup_wide", late)
    for deadline_s, left_s in ((0.5, 0.2), (0.25, -0.05)):
        request = PrefillRequest(
            service.query(1, 2), 50, 49, ways=frozenset({Way.LOAD}), mode="on", terms=Terms(deadline_s=deadline_s)
        )
        planned = await prefills.begin(request, controller.deadline(None))
        assert planned.plan is not None
        assert planned.plan.deadline_s == pytest.approx(left_s)
        assert planned.plan.chosen.way is (Way.LOAD if left_s > 0 else Way.PREFILL)
        assert bool(planned.found.ticket) is (left_s > 0)
        prefills.drop(planned)


@scenario(lambda: ValueService(arena_chunks=4))
async def test_a_store_that_finds_no_room_hears_of_it_before_it_gives_up(
    service: ValueService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks that memory alone has are on their way to a device that takes nothing. An answer in the moment in which
    its caller goes would leave a reservation that nobody can end."""
    monkeypatch.setattr(service.nvme._writers._chance, "uniform", lambda *_: 1000.0)  # type: ignore[attr-defined]  # simulated
    session, controller = service.session, service.controller
    for number in range(4):
        query = service.of_key(str(number))
        claimed = await controller.reserve(session, ReserveRequest(query, query.digests))
        staging = controller.create_staging(session, service.layout.body_bytes)
        fill = Fill(0, 0, service.layout.strip_count, staging.staging_id, 0)
        assert (await controller.commit(session, claimed.reservation_id, [fill])).committed_count == 1
    await asyncio.sleep(0)
    assert controller.parts.movement.is_making_room
    query = service.of_key("more")
    request = ReserveRequest(query, query.digests)
    reserve = controller.reserve(session, request, controller.deadline(0.25))
    assert await seconds_of(reserve) == pytest.approx(0.125)
