"""Plans that engines tell: what no plan can be is left out, and a whole report fits its message."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from kvstore_client import Client, connect
from kvstore_client.loading.planner import TOLD_ENGINES_MAX, TOLD_MAX
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import InvalidRequest
from kvstore.keys import fingerprint
from kvstore.planning.loading import Candidate, LoadPlan, Prefill, Way
from kvstore.planning.loading.outcome import PlanOutcome
from kvstore.v1alpha import admin_pb2, prefill_pb2
from kvstore.wire.plans import outcome_to_message, prefill_to_message
from tests.specs import small_spec, tokens_of

SPEC = small_spec()
WHY = "12.3 ms to the first token, 40% less than a plain prefill; meet would take 9.9 ms, but this engine cannot do it"
WAYS = tuple(
    Candidate(way, "KV", 0, 256, *(0.1,) * 7, refused="not now " * 10) for way in (Way.PREFILL, Way.LOAD, Way.FIRST)
)
PLAN = LoadPlan(512, WAYS[1], WAYS, WHY)
NAME = fingerprint(SPEC, SPEC.kind)


@pytest.fixture(scope="module")
def sidecar() -> Iterator[Sidecar]:
    with Sidecar("--capacity", "16 MiB") as running:
        yield running


@pytest.fixture
def operator(sidecar: Sidecar) -> Iterator[Client]:
    with connect(sidecar.socket_address) as connected:
        connected.lookup(SPEC, tokens_of(64))  # the model is registered
        yield connected


def told(operator: Client, request: admin_pb2.StatsRequest) -> list[admin_pb2.PlanEntry]:
    session = operator.connect_now()
    session.call(session.admin.Stats, request, 10.0)
    return list(session.call(session.admin.Plans, admin_pb2.PlansRequest(), 10.0).plans)


def message(**changed: Any) -> admin_pb2.PlannedPrompt:
    sound = {"mode": "on", "stored_tokens": 256, "ttft_s": 0.1}
    found = outcome_to_message(NAME, 256, PlanOutcome(PLAN, **sound))
    for name, value in changed.items():
        setattr(found, name, value)
    return found


def test_a_plan_with_numbers_that_none_has_is_left_out(operator: Client) -> None:
    wrong = [message(fingerprint=b"?" * 32), message(age_seconds=-1.0), message(age_seconds=math.nan)]
    wrong += [message(mode=77), message(step_tokens=(1 << 31))]
    for name in ("ttft_seconds", "cost", "ttft_high_seconds", "load_seconds"):
        for value in (math.nan, math.inf, -1.0, 1e300):
            wrong.append(message())
            setattr(wrong[-1].plan.candidates[1], name, value)
    before = len(told(operator, admin_pb2.StatsRequest()))
    assert len(told(operator, admin_pb2.StatsRequest(planned=wrong))) == before
    odd = [message(), message(), message()]
    odd[0].plan.chosen = 99
    odd[1].plan.candidates[1].way = 77
    odd[2].end.ttft_seconds = math.nan
    states = [each.state for each in told(operator, admin_pb2.StatsRequest(planned=[*odd, message()]))[:4]]
    assert states == ["done", "planned", "done", "done"]


def test_a_whole_report_fits_its_message(operator: Client) -> None:
    request = admin_pb2.StatsRequest(planned=[message() for _ in range(TOLD_MAX)])
    done = [prefill_to_message(Prefill(100_000 + index, 100_000, 12.345, 40)) for index in range(TOLD_MAX)]
    for step in range(TOLD_ENGINES_MAX):
        request.computed.append(admin_pb2.EnginePrefills(fingerprint=NAME, step_tokens=step, prefills=done))
    assert isinstance(request.planned[0].plan, prefill_pb2.LoadPlan)
    assert len(told(operator, request)) >= TOLD_MAX
    assert len(operator.stats().engines) == TOLD_ENGINES_MAX


def test_a_sidecar_that_takes_no_plans_hears_of_prefills(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older one bounds the message, and refuses all of a long one."""
    session = operator.connect_now()
    real, refused = session.admin.Stats, []

    def older(request: admin_pb2.StatsRequest, **options: Any) -> Any:
        if request.planned:
            refused.append(request)
            raise InvalidRequest("4496 bytes, at most 4096")
        return real(request, **options)

    monkeypatch.setattr(session.admin, "Stats", older)
    planner = operator.planner
    planner._tell(
        {(SPEC, 77): [Prefill(512, 0, 0.1)]},
        [(SPEC, 256, PlanOutcome(PLAN, "on", stored_tokens=256, ttft_s=0.1), 0.0)],
    )
    assert refused
    monkeypatch.undo()
    assert 77 in {each.step_tokens for each in operator.stats().engines}
