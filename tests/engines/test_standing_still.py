"""A sidecar that stands still at one step of a partial prefill: the prompt is computed after one short wait, whatever
step it was, and nothing stays held once the sidecar goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kvstore_client import Client, connect
from kvstore_client.engines.transformers import TransformersRunner
from kvstore_client.loading import patience
from kvstore_client.recompute import inquiry

from kvstore.planning import Recompute
from kvstore.planning.loading import Prefill, TierFacts, TierRate
from tests.e2e.third_tier import KIND, ThirdTierSidecar
from tests.engines.stalling import Cold, cold_prompts, is_free, is_tier, patient_sidecar
from tests.engines.test_planned_loads import COUNT, is_link
from tests.engines.test_transformers import STEP, model_of
from tests.recompute.models import sibling_of

TIMEOUT_S = 10.0
DOCUMENT = {"segments": [(COUNT - STEP, COUNT - 2)], "recompute": Recompute.reuse()}


@pytest.fixture(scope="module")
def sidecar() -> Iterator[ThirdTierSidecar]:
    with patient_sidecar() as running:
        yield running


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return model_of(torch.float32, 11)


@pytest.fixture(scope="module")
def prompts(sidecar: ThirdTierSidecar, model: torch.nn.Module) -> list[Cold]:
    """Each for one test: what a test loads is in memory afterwards."""
    return cold_prompts(sidecar, model, range(271, 277))


@pytest.fixture
def client(sidecar: ThirdTierSidecar, prompts: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setattr(inquiry, "ANSWER_S_MIN", 0.5)  # for what it answers, too, on a busy machine
    with connect(sidecar.address, planning="on", timeout_s=TIMEOUT_S) as connected:
        is_link(connected, 1e12)
        is_tier(connected)
        yield connected


def measured(client: Client, runner: TransformersRunner) -> None:
    """An engine that is slow enough for what the sidecar takes its files for."""
    for _ in range(40):
        client.planner.computed(runner.spec, 0, Prefill(1000, 0, 5.0))


def stopped(sidecar: ThirdTierSidecar, step: Callable[..., Any]) -> Callable[..., Any]:
    """The step; the sidecar stops before it is made for the first time."""
    stop = [True]

    def late(*args: Any, **options: Any) -> Any:
        if stop:
            stop.pop()
            os.kill(sidecar.pid, signal.SIGSTOP)
        return step(*args, **options)

    return late


def computed(
    sidecar: ThirdTierSidecar, client: Client, runner: TransformersRunner, cold: Cold, **options: Any
) -> str:  # fmt: skip
    """The answer's reason. The answer is that of a prefill, and no call's deadline was waited for."""
    ids, expected = cold
    began_s = client.planner.clock.monotonic()
    try:
        found = client.partial_prefill(runner, ids[0], **options)
        assert client.planner.clock.monotonic() - began_s < TIMEOUT_S, "a call's deadline was waited for"
    finally:
        os.kill(sidecar.pid, signal.SIGCONT)
    assert torch.allclose(found.logits[-1], expected.reshape(-1, expected.shape[-1])[0], atol=1e-4)
    assert found.plan.reused_token_count == 0
    is_free(client)
    return found.plan.reason


def test_it_plans_nothing(
    sidecar: ThirdTierSidecar, client: Client, model: torch.nn.Module, prompts: list[Cold],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    runner = TransformersRunner(model, chunk_tokens=STEP)
    measured(client, runner)
    monkeypatch.setattr(client.planner, "begin", stopped(sidecar, client.planner.begin))
    assert computed(sidecar, client, runner, prompts[0]) == "the sidecar is unavailable"


@pytest.mark.parametrize(("number", "options"), [(1, {}), (2, DOCUMENT)])
def test_it_opens_no_fetch_of_what_it_holds(
    sidecar: ThirdTierSidecar, client: Client, model: torch.nn.Module, prompts: list[Cold],
    monkeypatch: pytest.MonkeyPatch, number: int, options: dict[str, Any],
) -> None:  # fmt: skip
    """A load that is not raced by computing is given up; its transfer waits for the sidecar's first word."""
    runner = TransformersRunner(model, chunk_tokens=STEP)
    monkeypatch.setattr(client, "start_fetch", stopped(sidecar, client.start_fetch))
    assert "computed in full" in computed(sidecar, client, runner, prompts[number], **options)
    assert client.statistics()["loads_given_up"] == 1


def test_it_opens_no_fetch_that_is_raced(
    sidecar: ThirdTierSidecar, client: Client, model: torch.nn.Module, prompts: list[Cold],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The prompt takes what is computed meanwhile."""
    monkeypatch.setattr(patience, "BUDGET", 1e4)
    runner = TransformersRunner(model, chunk_tokens=STEP)
    measured(client, runner)
    monkeypatch.setattr(client, "start_fetch", stopped(sidecar, client.start_fetch))
    assert "what was to come was computed" in computed(sidecar, client, runner, prompts[3])


@pytest.mark.parametrize("kept", [0, STEP])
def test_it_gives_no_ticket_for_the_part_that_is_worth_its_load(
    sidecar: ThirdTierSidecar, client: Client, model: torch.nn.Module, prompts: list[Cold],
    monkeypatch: pytest.MonkeyPatch, kept: int,
) -> None:  # fmt: skip
    """``kept``: tokens that are in memory, where a load is fast."""
    runner = TransformersRunner(model, chunk_tokens=STEP)
    measured(client, runner)
    client.fetch(runner.spec, prompts[4][0][0, :kept])
    client.planner._tiers = {KIND: TierFacts(TierRate(100.0, 1e-2, 1.0, 9))}
    monkeypatch.setattr(client, "release_ticket", stopped(sidecar, client.release_ticket))
    computed(sidecar, client, runner, prompts[4], **DOCUMENT)


def test_it_is_asked_once_however_many_senders_there_are(
    sidecar: ThirdTierSidecar, client: Client, model: torch.nn.Module, prompts: list[Cold],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    runner = TransformersRunner(model, chunk_tokens=STEP)
    senders = [TransformersRunner(sibling_of(model, seed), chunk_tokens=STEP).spec for seed in (3, 5)]
    ids, look, asked = prompts[5][0], client.lookup, list[Any]()
    look(runner.spec, ids[0])

    def looked(spec: Any, *args: Any, **options: Any) -> Any:
        asked.append(spec)
        if spec in senders:
            os.kill(sidecar.pid, signal.SIGSTOP)
        return look(spec, *args, **options)

    monkeypatch.setattr(client, "lookup", looked)
    computed(sidecar, client, runner, prompts[5], senders=senders, recompute=Recompute.reuse())
    assert senders[1] not in asked
