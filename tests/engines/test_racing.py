"""A load that is late races with computing what it was to bring: whichever is through first is taken, and no work is
lost. In this order: a sidecar learns from each stall, and plans accordingly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kvstore_client import Client, connect
from kvstore_client.engines.transformers import TransformersRunner
from kvstore_client.loading import patience
from kvstore_client.recompute.racing import Race
from kvstore_client.recompute.sources import FetchedRun

from kvstore.planning.loading import Prefill
from kvstore.spec import Tier
from tests.e2e.third_tier import ThirdTierSidecar
from tests.engines.stalling import Cold, cold_prompts, is_free, is_tier, patient_sidecar
from tests.engines.test_planned_loads import COUNT, is_link
from tests.engines.test_transformers import STEP, model_of
from tests.fakes import Switch
from tests.server.raw import eventually


@pytest.fixture(scope="module")
def sidecar() -> Iterator[ThirdTierSidecar]:
    with patient_sidecar() as running:
        yield running


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return model_of(torch.float32, 11)


@pytest.fixture(scope="module")
def prompts(sidecar: ThirdTierSidecar, model: torch.nn.Module) -> list[Cold]:
    return cold_prompts(sidecar, model, (74, 75))


@pytest.fixture
def client(sidecar: ThirdTierSidecar, prompts: object) -> Iterator[Client]:
    with connect(sidecar.address, planning="on") as connected:
        yield connected
    sidecar.switches.turn_off()


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each pass begins with, from now on."""
    begun: list[int] = []
    embed = TransformersRunner.embed

    def noting(runner: TransformersRunner, ids: torch.Tensor) -> torch.Tensor:
        begun.append(len(ids))
        return embed(runner, ids)

    monkeypatch.setattr(TransformersRunner, "embed", noting)
    return begun


def raced(
    client: Client, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, token_s: float
) -> tuple[TransformersRunner, list[int]]:
    """An engine that is so slow, by what the client knows, that all is loaded; and nobody gives a load up."""
    monkeypatch.setattr(patience, "BUDGET", 1e4)
    runner = TransformersRunner(model, chunk_tokens=STEP)
    is_link(client, 1e12)
    is_tier(client)
    for _ in range(40):
        client.planner.computed(runner.spec, 0, Prefill(1000, 0, 1000 * token_s))
    return runner, counted(monkeypatch)


def test_a_load_that_comes_late_is_taken_all_the_same(
    sidecar: ThirdTierSidecar, prompts: list[Cold], client: Client, model: torch.nn.Module,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    ids, expected = prompts[0]
    runner, begun = raced(client, model, monkeypatch, 0.005)
    sidecar.switches.turn_on(Switch.STALLED)
    step, has_come, comes = Race._step, FetchedRun.has_come, FetchedRun.comes
    is_stepping, looks = [False], []

    def stepping(race: Race, run: FetchedRun, layer: int) -> None:
        is_stepping[0] = True
        step(race, run, layer)
        is_stepping[0] = False

    def looking(run: FetchedRun, layer: int) -> bool:
        if not is_stepping[0]:
            return has_come(run, layer)
        looks.append(layer)
        if len(looks) == 1:
            return False
        sidecar.switches.turn_off()
        is_stepping[0] = False
        # There is time for it, however busy the machine is.
        eventually(lambda: all(each.tier is Tier.DRAM for each in client.lookup(runner.spec, ids[0]).chunks[:-1]))
        return comes(run, layer, 10.0)

    monkeypatch.setattr(Race, "_step", stepping)
    monkeypatch.setattr(FetchedRun, "has_come", looking)
    found = client.partial_prefill(runner, ids[0])
    assert torch.allclose(found.logits[-1], expected.reshape(-1, expected.shape[-1])[0], atol=1e-4)
    assert not found.plan.reason
    assert found.plan.reused_token_count > 0
    assert len(begun) == 2, "one step, and then it came"
    assert len(looks) == 2, "the step was not computed to its end"
    assert client.statistics()["loads_given_up"] == 0
    is_free(client)


def test_what_was_computed_while_a_load_was_late_is_not_computed_again(
    sidecar: ThirdTierSidecar, prompts: list[Cold], client: Client, model: torch.nn.Module,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    ids, expected = prompts[1]
    runner, begun = raced(client, model, monkeypatch, 0.05)
    learned: list[Prefill] = []
    monkeypatch.setattr(client.planner, "computed", lambda spec, step, prefill: learned.append(prefill))
    sidecar.switches.turn_on(Switch.STALLED)
    found = client.partial_prefill(runner, ids[0])
    assert torch.allclose(found.logits[-1], expected.reshape(-1, expected.shape[-1])[0], atol=1e-4)
    assert found.plan.reason == "loading took longer than computing: what was to come was computed"
    rest, *steps = begun
    assert sum(steps) == COUNT, "each token was computed once, but for those behind the load"
    assert steps[-1] == rest
    assert found.share == 1.0, "nothing was reused"
    assert not learned, "nothing that was computed in one piece"
    assert client.statistics()["loads_given_up"] == 1
    is_free(client)
