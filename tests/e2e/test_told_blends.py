"""Plans over documents and siblings' caches: operators see them, and what came of them, like plans of prefixes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kvstore_client import Client, Gate, Recompute, connect
from kvstore_client.loading import patience
from kvstore_client.recompute import PartialPrefill, prefill
from kvstore_ops.cli import app
from kvstore_ops.sidecar import Sidecar
from typer.testing import CliRunner

from kvstore.errors import DataLoss
from kvstore.planning import Pair, Permit
from kvstore.planning.loading import Way
from kvstore.planning.profile import Origin
from kvstore.v1alpha import admin_pb2, prefill_pb2
from kvstore.wire import plans
from kvstore.wire.plans import plan_from_message, plan_to_message
from tests.e2e.prefills import RECEIVER, SENDER, STEP, computed, keep, keep_alone
from tests.e2e.test_partial_prefill import prompt
from tests.e2e.test_planned_prefill import speeds
from tests.server.raw import eventually

SETTING = Recompute.cacheblend(1, 0.2)
SAID = "tokens, again: layers 0 to 0, 20% by deviation"


@pytest.fixture
def client(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setattr(patience, "BUDGET", 1e4)  # these tests are about reports: no load is given up
    with connect(sidecar.address, planning="on") as connected:
        yield connected


@pytest.fixture
def operator(sidecar: Sidecar) -> Iterator[Client]:
    with connect(sidecar.socket_address) as connected:
        yield connected


def listed(operator: Client) -> list[admin_pb2.PlanEntry]:
    session = operator.connect_now()
    return list(session.call(session.admin.Plans, admin_pb2.PlansRequest(), 10.0).plans)


def told(client: Client, operator: Client, tokens: torch.Tensor, **options: Any) -> tuple[PartialPrefill, Any]:
    """Prefill, and return what the sidecar heard of it."""
    before = len(listed(operator))
    found = client.partial_prefill(RECEIVER, tokens, **options)
    client.planner._told_s = -math.inf
    client.planner._tell_soon()
    eventually(lambda: len(listed(operator)) == before + 1)
    return found, listed(operator)[0]


def with_document(client: Client, seed: int) -> tuple[torch.Tensor, dict[str, Any]]:
    document = prompt(STEP * 4, seed)
    keep_alone(client, RECEIVER, document)
    tokens = torch.cat((prompt(3, seed + 1), document, prompt(5, seed + 2)))
    return tokens, {"segments": [(3, 3 + len(document))], "recompute": SETTING}


def test_a_plan_over_documents_is_told_shown_and_compared(client: Client, operator: Client, sidecar: Sidecar) -> None:
    tokens, options = with_document(client, 800)
    speeds(client, RECEIVER, 1e12, 1e-3)
    before = dict(operator.stats().counters)
    found, entry = told(client, operator, tokens, **options)
    assert found.plan.loading is not None
    assert found.plan.loading.chosen.way is Way.BLEND
    assert plan_from_message(entry.plan) == found.plan.loading, "with the setting"
    assert (entry.state, entry.mode, entry.stored_token_count) == ("done", prefill_pb2.PLANNING_MODE_ON, STEP * 4)
    assert entry.end.ttft_seconds == pytest.approx(found.timeline.total_s)
    counts = operator.stats().counters
    added = {name: counts[name] - before[name] for name in counts if name.startswith(("plan", "partial"))}
    assert (added["plans_compared"], added["partial_prefills"], added["partial_prefills_given_up"]) == (1, 1, 0)
    took_s, planned_s = found.timeline.total_s, found.plan.loading.chosen.ttft_s
    assert added["plan_error_milliseconds"] == pytest.approx(1e3 * abs(took_s - planned_s), abs=2)
    best_s = min(each.ttft_s for each in found.plan.loading.candidates if not each.refused)
    assert added["plan_regret_milliseconds"] == pytest.approx(1e3 * max(0.0, took_s - best_s), abs=2)
    words = ["plans", "--number", str(entry.number), "--address", sidecar.socket_address]
    shown = CliRunner().invoke(app, words, env={"COLUMNS": "300"})
    assert shown.exit_code == 0, shown.output
    assert f"{STEP * 4} {SAID}" in shown.output


def test_who_observes_reuses_all_and_that_is_compared(client: Client, operator: Client) -> None:
    tokens, options = with_document(client, 810)
    client.planner.mode = "observe"
    speeds(client, RECEIVER, 1.0, 1e-6)
    before = dict(operator.stats().counters)
    found, entry = told(client, operator, tokens, **options)
    plan = plan_from_message(entry.plan)
    assert (plan.chosen.way, found.plan.recompute) == (Way.PREFILL, SETTING), "a prefill was faster"
    blend = next(each for each in plan.candidates if each.way is Way.BLEND)
    counts = operator.stats().counters
    assert counts["plan_foretold_milliseconds"] - before["plan_foretold_milliseconds"] == round(1e3 * blend.ttft_s)
    assert counts["plan_missed_milliseconds"] > before["plan_missed_milliseconds"]


def test_a_siblings_cache_is_told_and_so_is_its_loss(
    client: Client, operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(STEP * 6 + 3, 820)
    keep(client, SENDER, tokens[: STEP * 6])
    speeds(client, RECEIVER, 1e12, 1e-3)
    options = {"senders": [SENDER.spec], "recompute": SETTING}
    found, entry = told(client, operator, tokens, **options)
    plan = plan_from_message(entry.plan)
    assert (plan.chosen.way, plan.chosen.load_stop, entry.state) == (Way.BLEND, STEP * 6, "done")
    assert plan == found.plan.loading

    real = prefill._computed

    def lost(request: Any, runs: Any, *more: Any) -> Any:
        if runs:
            raise DataLoss("a chunk is gone")
        return real(request, runs, *more)

    monkeypatch.setattr(prefill, "_computed", lost)
    before = dict(operator.stats().counters)
    found, entry = told(client, operator, tokens, **options)
    assert torch.equal(found.logits, computed(RECEIVER, tokens).logits)
    assert (entry.state, entry.plan.candidates[entry.plan.chosen].way) == ("given up", prefill_pb2.WAY_BLEND)
    counts = operator.stats().counters
    assert counts["partial_prefills_given_up"] == before["partial_prefills_given_up"] + 1
    assert counts["plans_compared"] == before["plans_compared"], "its time is not the plan's"


def test_what_was_checked_by_a_full_prefill_tells_no_time(
    client: Client, operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, options = with_document(client, 830)
    speeds(client, RECEIVER, 1e12, 1e-3)
    pair = Pair.of(RECEIVER.spec, None, "position", Origin.STANDALONE)
    monkeypatch.setattr(Gate, "permit", lambda *_, **__: Permit(pair, SETTING))
    monkeypatch.setattr(Gate, "is_due", lambda *_: True)
    monkeypatch.setattr(Gate, "checked", lambda *_: "checked")
    _, entry = told(client, operator, tokens, segments=options["segments"])
    assert (entry.state, entry.HasField("end")) == ("planned", False)


def test_an_exact_plan_of_what_is_in_memory_is_told_too(client: Client, operator: Client) -> None:
    """No call asks the sidecar for it where shared memory shows it; elsewhere the call tells it, and only once."""
    tokens = prompt(STEP * 6 + 3, 840)
    keep(client, RECEIVER, tokens)
    speeds(client, RECEIVER, 1e12, 1e-3)
    found, entry = told(client, operator, tokens)
    assert plan_from_message(entry.plan) == found.plan.loading
    eventually(lambda: listed(operator)[0].state == "done")


def test_a_release_that_knows_no_blends_takes_the_plan_for_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = [prefill_pb2.Candidate(way=prefill_pb2.WAY_PREFILL, ttft_seconds=1.0)]
    ways += [prefill_pb2.Candidate(way=prefill_pb2.WAY_BLEND, load_stop=64, ttft_seconds=0.1)]
    message = prefill_pb2.LoadPlan(token_count=80, candidates=ways, chosen=1, is_measured=True)
    assert plan_from_message(plan_to_message(plan_from_message(message))) == plan_from_message(message)
    monkeypatch.setattr(plans, "WAYS", {number: way for number, way in plans.WAYS.items() if way is not Way.BLEND})
    plan = plan_from_message(message)
    assert (plan.chosen.way, plan.is_measured, len(plan.candidates)) == (Way.PREFILL, False, 1)
    assert "does not know" in plan.why


@pytest.mark.parametrize(
    "wrong", [{"selector": "by a later release"}, {"ratio": 2.0}, {"ratio": math.nan}, {"last_layer": -9}]
)
def test_a_setting_that_nobody_knows_leaves_the_way(wrong: dict[str, Any]) -> None:
    setting = {"first_layer": 0, "last_layer": 0, "ratio": 0.2, "selector": "deviation", "metric": "both", **wrong}
    blend = prefill_pb2.Candidate(way=prefill_pb2.WAY_BLEND, setting=prefill_pb2.RecomputeSetting(**setting))
    plan = plan_from_message(prefill_pb2.LoadPlan(candidates=[blend]))
    assert (plan.chosen.way, plan.chosen.setting) == (Way.BLEND, None)


def test_a_way_that_nobody_asked_for_is_computed() -> None:
    blend = prefill_pb2.Candidate(way=prefill_pb2.WAY_BLEND, load_stop=64)
    plan = plan_from_message(prefill_pb2.LoadPlan(candidates=[blend]), {Way.PREFILL, Way.LOAD})
    assert (plan.chosen.way, plan.chosen.load_stop) == (Way.PREFILL, 0)
