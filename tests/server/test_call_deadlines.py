"""What a handler waits for ends when its caller gives up: the time that a call has left travels with the request."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.controller import Fill
from kvstore.errors import DeadlineExceeded
from kvstore.server.services import CacheService
from kvstore.spec import MissReason
from kvstore.v1 import cache_pb2 as pb
from tests.controller.service import Service
from tests.controller.test_deadlines import DEADLINE_S, SlowWorkers, begun, run, seconds_of
from tests.server.test_abandoned import Call

STEPS = ("fill", "commit", "abort")


def request_of(step: str, reservation_id: int, fills: list[Fill]) -> pb.StoreRequest:
    moved = [
        pb.Fill(
            chunk=each.chunk, strip_first=each.strip_first, strip_count=each.strip_count, staging_id=each.staging_id,
            staging_offset=each.staging_offset,
        )
        for each in fills
    ]  # fmt: skip
    if step == "fill":
        return pb.StoreRequest(fill=pb.FillStrips(reservation_id=reservation_id, fills=moved))
    if step == "commit":
        return pb.StoreRequest(commit=pb.Commit(reservation_id=reservation_id, fills=moved))
    return pb.StoreRequest(abort=pb.Abort(reservation_id=reservation_id))


@pytest.mark.parametrize("remaining_s", [None, 100.0, 0.05, 0.0])
@pytest.mark.parametrize("step", STEPS)
def test_a_step_of_a_store_waits_no_longer_than_its_caller(step: str, remaining_s: float | None) -> None:
    async def scenario(service: Service, workers: SlowWorkers) -> None:
        session, result, fills = await begun(service, 1, 2, 3)
        handlers = CacheService(service.controller, b"epoch")
        if step == "abort":
            reservation = service.controller.reservations.find(session, result.reservation_id)
            service.controller.fills.start(session, reservation, fills)
        request = request_of(step, result.reservation_id, fills)
        call: Any = Call(session.secret, remaining_s)
        expected_s = DEADLINE_S if remaining_s is None else min(DEADLINE_S, remaining_s)
        assert await seconds_of(handlers.Store(request, call), DeadlineExceeded) == pytest.approx(expected_s)

    run(scenario, job_s=100.0)


@pytest.mark.parametrize("remaining_s", [None, 5.0, 0.05, 0.0])
def test_a_fetch_waits_no_longer_than_its_caller(remaining_s: float | None) -> None:
    async def scenario(service: Service, workers: SlowWorkers) -> None:
        writer, reader = (service.controller.open_session() for _ in range(2))
        result = await service.reserve(writer, 1)
        handlers = CacheService(service.controller, b"epoch")

        async def fetched() -> None:
            call: Any = Call(reader.secret, remaining_s)
            replies = [each async for each in handlers.Fetch(pb.FetchRequest(ticket=result.ticket), call)]
            assert replies[-1].arrivals[0].lost == MissReason.UNAVAILABLE

        most_s = DEADLINE_S + service.parts.limits.reservation_age_s_max
        assert await seconds_of(fetched()) == pytest.approx(most_s if remaining_s is None else remaining_s)

    run(scenario, job_s=0.001)
