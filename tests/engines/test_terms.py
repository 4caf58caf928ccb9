"""CachedModel under a caller's terms: the quality that documents may cost, a deadline, determinism, the class."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kvstore_client import Client, Gate, Recompute, connect
from kvstore_client.engines.transformers import CachedModel
from kvstore_client.gate.profiles import Profiles
from kvstore_client.loading import patience
from kvstore_ops.sidecar import TOKEN, Sidecar

from kvstore.errors import DataLoss, InvalidRequest
from kvstore.planning import Calibration, Pair, Point, Profile, Side
from kvstore.planning.loading import Way
from kvstore.planning.loading.outcome import PlanOutcome
from kvstore.planning.loading.planner import OVERDUE
from kvstore.planning.profile import Origin
from kvstore.spec import Exactness, ModelSpec
from kvstore.v1alpha import admin_pb2, prefill_pb2
from tests.engines.test_planned_loads import cached, is_engine, is_link
from tests.engines.test_transformers import STEP, prompt
from tests.server.raw import eventually

COUNT = STEP * 6 + 5
STORED = STEP * 6
CHEAP, DEAR = Recompute.cacheblend(1, 0.1), Recompute.cacheblend(2, 0.5)
PREAMBLE = torch.arange(20)
ONE, TWO = (torch.randint(0, 256, (64,), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
QUESTION = torch.randint(0, 256, (9,), generator=torch.Generator().manual_seed(3))
IDS = torch.cat((PREAMBLE, TWO, ONE, QUESTION))[None]


@pytest.fixture(scope="module")
def sidecar() -> Iterator[Sidecar]:
    with Sidecar("--capacity", "64 MiB", nvme="64 MiB") as running:
        yield running


@pytest.fixture
def client(sidecar: Sidecar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setattr(patience, "BUDGET", 1e4)  # these tests are about choices: no load is given up
    with connect(sidecar.address, planning="on") as connected:
        connected.gate = Gate(tmp_path, check_every=1 << 30)
        yield connected


def answer(model: CachedModel, ids: torch.Tensor, **terms: Any) -> tuple[torch.Tensor, Any]:
    output = model.generate(ids, max_new_tokens=4, do_sample=False, **terms)
    return output.sequences, output.report


def profiled(directory: Path, spec: ModelSpec) -> None:
    """A profile in which the cheap setting keeps less than the dear one."""
    points = tuple(
        Point(setting, setting.share(3), quality, 0.0, 0.0, 0.01) for setting, quality in ((CHEAP, 0.5), (DEAR, 0.95))
    )
    made = Profile(
        receiver=Side.of(spec), sender=None, reuse="position", provenance=Origin.PREAMBLE, layer_count=3,
        calibration=Calibration("c3" * 32, (1,), 64, 512, 32), full_quality=1.0, full_standard_error=0.0,
        points=points, measured_at_s=1_700_000_000,
    )  # fmt: skip
    profiles = Profiles(directory)
    profiles.write(made, profiles.path(Pair.of(spec, None, "position", Origin.PREAMBLE)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"quality": 1.5}, {"quality": -0.1}, {"quality": math.nan}, {"quality": "0.9"}, {"quality": True},
        {"deadline_ms": math.nan}, {"deadline_ms": math.inf}, {"deadline_ms": "soon"}, {"deadline_ms": 10**400},
        {"deterministic": 1},
        {"request_class": "urgent"}, {"quality": 0.9, "preamble": [1.5]},
    ],
    ids=str,
)  # fmt: skip
def test_terms_that_mean_nothing_are_refused_before_anything_is_computed(client: Client, wrong: dict[str, Any]) -> None:
    model = cached(client, seed=20)
    model.model.generate = lambda *_, **__: pytest.fail("it computed")
    name = "preamble" if "preamble" in wrong else next(iter(wrong))
    with pytest.raises(InvalidRequest, match=name):
        model.generate(prompt(COUNT, 20), max_new_tokens=1, **wrong)


def mending(client: Client, seed: int, profiles: Path) -> CachedModel:
    """A model that knows both documents, and settings to mend them by. It checks no request."""
    model = cached(client, seed=seed)
    for receipt in model.remember([ONE, TWO], preamble=PREAMBLE):
        receipt.wait(10.0)
    profiled(profiles, model.spec)
    client.gate.is_due = lambda _: False  # type: ignore[method-assign]  # a checked request is answered in full
    return model


def test_quality_chooses_the_setting_by_which_documents_are_mended(client: Client, tmp_path: Path) -> None:
    model = mending(client, 21, tmp_path)
    told: list[PlanOutcome] = []
    client.planner.planned = lambda _spec, _step, outcome: told.append(outcome)  # type: ignore[method-assign]  # replaced
    for quality, setting in ((0.4, CHEAP), (0.9, DEAR)):
        ids, report = answer(model, IDS, quality=quality, preamble=PREAMBLE)
        assert report.mended.recompute == setting
        assert (report.exactness, report.reused_token_count) == (Exactness.DERIVED, 128)
        assert torch.equal(ids[:, : IDS.shape[1]], IDS)
        assert report.ttft_s > 0.0
    _, report = answer(model, IDS, quality=0.99, preamble=PREAMBLE)
    assert report.exactness is Exactness.EXACT, "no setting keeps so much"
    assert report.reused_token_count == 64, "the first document stands where it was computed"
    assert "no setting" in report.mended.reason
    assert {each.plan.chosen.way for each in told} == {Way.BLEND}
    assert [each.plan.chosen.setting for each in told] == [CHEAP, DEAR, Recompute.reuse()]
    assert all((each.ttft_s or 0.0) > 0.0 for each in told)


def test_who_sets_no_quality_or_wants_all_of_it_gets_what_is_exact(client: Client, tmp_path: Path) -> None:
    model = cached(client, seed=22)
    for receipt in model.remember([ONE, TWO], preamble=PREAMBLE):
        receipt.wait(10.0)
    profiled(tmp_path, model.spec)
    plain = model.model.generate(IDS, max_new_tokens=4, do_sample=False)
    lossy = {"quality": 0.4, "preamble": PREAMBLE}
    for terms in ({}, {**lossy, "quality": 1}, {**lossy, "deterministic": True}, {**lossy, "deadline_ms": -1}):
        ids, report = answer(model, IDS, **terms)
        assert (report.exactness, report.mended) == (Exactness.EXACT, None)
        assert torch.equal(ids, plain)


def test_what_was_measured_does_not_change_a_deterministic_plan(client: Client) -> None:
    model, ids = cached(client, seed=23), prompt(COUNT, 23)
    answer(model, ids)[1].wait_stored(10.0)
    is_link(client, 100.0)
    is_engine(client, model, 1e-6)
    _, report = answer(model, ids)
    assert (report.plan.chosen.way, report.reused_token_count) == (Way.PREFILL, 0), "as was measured"
    _, report = answer(model, ids, deterministic=True)
    assert (report.plan, report.reused_token_count) == (None, STORED), "all that is stored"


def test_after_its_deadline_a_prompt_is_computed_without_a_look_at_the_cache(client: Client) -> None:
    model, ids = cached(client, seed=24), prompt(COUNT, 24)
    first, report = answer(model, ids)
    report.wait_stored(10.0)
    client.peek = client.lookup = client.fetch_layers = lambda *_, **__: pytest.fail("it looked")  # type: ignore  # replaced
    for deadline_ms in (0, -5.0):
        ids_out, report = answer(model, ids, deadline_ms=deadline_ms)
        assert (report.reused_token_count, report.plan.why) == (0, OVERDUE)
        assert not report.is_in_time
        assert torch.equal(ids_out, first)


def test_a_deadline_that_passes_during_a_lookup_has_passed(client: Client, tmp_path: Path) -> None:
    model = mending(client, 25, tmp_path)
    look_up = client.lookup

    def late(*given: Any, **options: Any) -> Any:
        time.sleep(0.06)
        return look_up(*given, **options)

    client.lookup = late  # type: ignore[method-assign]  # replaced
    _, report = answer(model, IDS, quality=0.4, preamble=PREAMBLE, deadline_ms=50)
    assert (report.plan.why, report.mended.runs, report.is_in_time) == (OVERDUE, (), False)
    assert report.plan.deadline_s < 0.0
    client.lookup, peek = look_up, client.peek  # type: ignore[method-assign]  # put back

    def late_in_memory(*given: Any, **options: Any) -> Any:
        time.sleep(0.06)
        return peek(*given, **options)

    client.peek = late_in_memory  # type: ignore[method-assign]  # replaced
    ids = prompt(COUNT, 25)
    answer(model, ids)[1].wait_stored(10.0)
    _, report = answer(model, ids, deadline_ms=50)
    assert (report.plan.why, report.reused_token_count) == (OVERDUE, 0)


def test_the_deadline_and_the_class_travel_to_the_sidecar_which_plans_what_does_not_show(
    client: Client, sidecar: Sidecar
) -> None:
    model, ids = cached(client, seed=25), prompt(COUNT, 25)
    first, report = answer(model, ids)
    report.wait_stored(10.0)
    is_link(client, 1e12)
    is_engine(client, model, 1e-3)
    client.peek = lambda *_, **__: None  # type: ignore[method-assign]  # as on another host
    again, report = answer(model, ids, deadline_ms=60_000, request_class="batch")
    assert (report.plan.chosen.way, report.reused_token_count, report.is_in_time) == (Way.LOAD, STORED, True)
    assert torch.equal(first, again)
    with connect(sidecar.socket_address) as operator:
        session = operator.connect_now()

        def last() -> admin_pb2.PlanEntry:
            plans = session.call(session.admin.Plans, admin_pb2.PlansRequest(limit=1), 10.0).plans
            return next(iter(plans), admin_pb2.PlanEntry())

        eventually(lambda: last().state == "done")
        assert 59.0 < last().plan.deadline_seconds <= 60.0
        load = next(each for each in report.plan.candidates if each.way is Way.LOAD)
        assert load.cost > load.ttft_s, "the engine's time counts where nobody waits"
        eventually(lambda: operator.stats().sessions.ticket_count == 0)


def test_a_fetch_that_cannot_begin_leaves_nothing_held_at_the_sidecar(client: Client) -> None:
    model, ids = cached(client, seed=26), prompt(COUNT, 26)
    _, report = answer(model, ids)
    report.wait_stored(10.0)
    is_link(client, 1e12)
    is_engine(client, model, 1e-3)
    client.peek = lambda *_, **__: None  # type: ignore[method-assign]  # replaced
    client.fetch_layers = lambda *_, **__: 1 / 0  # type: ignore  # replaced
    with pytest.raises(ZeroDivisionError):
        answer(model, ids)
    eventually(lambda: client.stats().sessions.ticket_count + client.stats().sessions.stream_count == 0)


def test_what_it_plans_and_what_came_of_it_is_told_and_compared_in_every_mode(sidecar: Sidecar) -> None:
    with connect(sidecar.address, planning="observe") as client, connect(sidecar.socket_address) as operator:
        model, ids = cached(client, seed=27), prompt(COUNT, 27)
        before = dict(operator.stats().counters)
        answer(model, ids)[1].wait_stored(10.0)
        is_link(client, 100.0)
        is_engine(client, model, 1e-6)
        client.planner._told_s = -math.inf
        _, report = answer(model, ids)
        assert (report.plan.chosen.way, report.reused_token_count) == (Way.PREFILL, STORED)
        session = operator.connect_now()

        def listed() -> list[admin_pb2.PlanEntry]:
            plans = session.call(session.admin.Plans, admin_pb2.PlansRequest(limit=2), 10.0).plans
            return [each for each in plans if each.model_id == model.spec.model_id]

        eventually(lambda: [each.stored_token_count for each in listed()] == [STORED, 0])
        last, first = listed()
        assert (last.state, last.mode) == ("done", prefill_pb2.PLANNING_MODE_OBSERVE)
        assert last.end.ttft_seconds == pytest.approx(report.ttft_s)
        assert last.began_seconds >= first.began_seconds
        counts = operator.stats().counters
        added = {name: counts[name] - before[name] for name in counts if name.startswith("plan")}
        assert added["plans_compared"] == 1, "of the first prompt the engine's speed was not known"
        assert added["plan_missed_milliseconds"] == added["plan_regret_milliseconds"], "a prefill was fastest"
        assert added["plan_error_milliseconds"] > 1000


def test_a_load_that_fails_is_told_as_given_up(client: Client) -> None:
    model, ids = cached(client, seed=28), prompt(COUNT, 28)
    answer(model, ids)[1].wait_stored(10.0)
    is_link(client, 1e12)
    is_engine(client, model, 1e-3)
    told: list[PlanOutcome] = []
    client.planner.planned = lambda _spec, _step, outcome: told.append(outcome)  # type: ignore[method-assign]  # replaced
    real = client.fetch_layers

    def lost(*arguments: Any, **named: Any) -> Any:
        stream = real(*arguments, **named)
        stream.close()
        raise DataLoss("a chunk is gone")

    client.fetch_layers = lost  # type: ignore[method-assign]  # replaced
    answer(model, ids)
    assert [(each.is_given_up, each.ttft_s) for each in told] == [(True, None)]


@pytest.mark.parametrize("mode", ["observe", "on"])
def test_a_prompt_that_the_sidecar_may_not_hold_is_reused_all_the_same(mode: str) -> None:
    """The sidecar holds what it plans for. Where its limit leaves no room for that, the prompt is looked up."""
    limited = {**os.environ, "KVSTORE__LIMITS__TICKET_BYTES_MAX": "64 KiB"}
    with (
        Sidecar("--capacity", "64 MiB", plane="remote", environment=limited) as own,
        connect(own.address, token=TOKEN, planning=mode) as remote,
    ):
        model, ids = cached(remote, seed=30), prompt(COUNT, 30)
        is_link(remote, 1e12)
        for reused in (0, STORED):
            report = answer(model, ids)[1]
            report.wait_stored(10.0)
            is_engine(remote, model, 1.0)
            assert report.reused_token_count == reused
