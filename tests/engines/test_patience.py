"""A tier that stops in the middle of a plan: the load is given up, the prompt is computed, and nothing stays held."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from kvstore_client import Client, connect
from kvstore_client.engines import pause
from kvstore_client.engines.transformers import CachedModel, TransformersRunner
from kvstore_client.loading import patience
from kvstore_client.loading.patience import Patience, prior_s, result_in_time
from kvstore_client.recompute import inquiry, recompute
from kvstore_ops.sidecar import Sidecar

from kvstore.planning import Recompute
from kvstore.planning.loading import LoadPlan, Prefill, Way
from kvstore.spec import Durability, MissReason
from tests.e2e.prefills import RECEIVER, SENDER, in_full, keep
from tests.e2e.third_tier import KIND, ThirdTierSidecar
from tests.engines.stalling import Cold, cold_prompts, is_free, is_tier, patient_sidecar
from tests.engines.test_planned_loads import COUNT, is_engine, is_link
from tests.engines.test_transformers import STEP, logits, model_of
from tests.engines.test_transformers import prompt as tokens
from tests.fakes import Switch
from tests.recompute.models import prompt
from tests.server.raw import eventually

OWN = {
    "test_a_generation_computes_what_a_stalled_tier_does_not_bring": 0,
    "test_a_partial_prefill_does_so_too": 1,
}


@pytest.fixture(scope="module")
def sidecar() -> Iterator[ThirdTierSidecar]:
    with patient_sidecar() as running:
        yield running


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return model_of(torch.float32, 11)


@pytest.fixture(scope="module")
def prompts(sidecar: ThirdTierSidecar, model: torch.nn.Module) -> list[Cold]:
    return cold_prompts(sidecar, model, range(71, 76))


@pytest.fixture
def cold(prompts: list[Cold], request: pytest.FixtureRequest) -> Cold:
    """One that no test has had before: a load goes on that nobody waits for any more."""
    return prompts[OWN.get(request.function.__name__, 2)]


@pytest.fixture
def client(sidecar: ThirdTierSidecar, prompts: object) -> Iterator[Client]:
    with connect(sidecar.address, planning="on") as connected:
        yield connected
    sidecar.switches.turn_off()


def test_a_generation_computes_what_a_stalled_tier_does_not_bring(
    sidecar: ThirdTierSidecar, client: Client, model: torch.nn.Module, cold: Cold
) -> None:
    ids, expected = cold
    cached = CachedModel(model, client, chunk_tokens=STEP)
    is_link(client, 1e12)
    is_tier(client)
    is_engine(client, cached, 1e-3)
    plan = client.plan(cached.spec, ids[0], step_tokens=STEP)
    assert plan.chosen.way is not Way.PREFILL
    assert client.lookup(cached.spec, ids[0]).chunks[0].tier is KIND
    sidecar.switches.turn_on(Switch.STALLED)
    began_s = client.planner.clock.monotonic()
    found, report = logits(cached, ids)
    assert client.planner.clock.monotonic() - began_s < client.planner.timeout_s, "a call's deadline was waited for"
    assert torch.equal(found, expected)
    assert report.reused_token_count == 0
    assert client.statistics()["loads_given_up"] == 1
    assert client.statistics()["unavailable"] == 0, "it was no call's deadline that ended it"
    is_free(client)


def test_an_answer_that_comes_too_late_is_undone() -> None:
    comes, undone = threading.Event(), SimpleQueue[str]()

    def slow() -> str:
        comes.wait(10.0)
        return "answer"

    assert result_in_time(slow, 0.0, undone.put) is None
    comes.set()
    assert undone.get(timeout=10.0) == "answer"
    assert result_in_time(slow, 10.0, undone.put) == "answer"
    with pytest.raises(ZeroDivisionError):
        result_in_time(lambda: 1 / 0, 10.0, lambda _: None)
    assert undone.empty()


def test_an_answer_that_comes_after_an_interrupt_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what a lookup holds is held until its ticket ends by itself."""
    comes, undone = threading.Event(), SimpleQueue[bool]()

    def interrupted(*_: object) -> None:
        comes.set()
        raise KeyboardInterrupt

    monkeypatch.setattr(patience, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        result_in_time(lambda: comes.wait(10.0), 10.0, undone.put)
    assert undone.get(timeout=10.0)


def test_where_no_prefill_was_measured_a_slow_engine_is_assumed(
    client: Client, model: torch.nn.Module, cold: Cold
) -> None:
    """Else a tier of 10 MB/s would cost the first prompts of an engine many prefills."""
    cached = CachedModel(model, client, chunk_tokens=STEP)
    plan = client.plan(cached.spec, cold[0][0], step_tokens=STEP)
    assert not plan.is_measured
    assert plan.loaded_tokens
    assert (
        prior_s(cached.spec, 2000, "cpu") > prior_s(cached.spec, 1000, "cpu") > prior_s(cached.spec, 1000, "cuda") > 0
    )
    given_up = threading.Event()
    with Patience(client, plan, 0.0, lambda: True, given_up.set, prior_s(cached.spec, COUNT, "cpu")) as patience:
        assert given_up.wait(10.0)
        assert patience.is_spent


def test_a_partial_prefill_does_so_too(
    sidecar: ThirdTierSidecar, client: Client, model: torch.nn.Module, cold: Cold
) -> None:
    ids, expected = cold
    runner = TransformersRunner(model, chunk_tokens=STEP)
    is_link(client, 1e12)
    is_tier(client)
    for _ in range(40):  # slow enough for what the sidecar takes its files for
        client.planner.computed(runner.spec, 0, Prefill(1000, 0, 5.0))
    sidecar.switches.turn_on(Switch.STALLED)
    began_s = client.planner.clock.monotonic()
    found = client.partial_prefill(runner, ids[0])
    assert client.planner.clock.monotonic() - began_s < client.planner.timeout_s, "a call's deadline was waited for"
    assert torch.allclose(found.logits[-1], expected.reshape(-1, expected.shape[-1])[0], atol=1e-4)
    assert found.plan.reason.startswith("loading took longer than"), found.plan.reason
    assert client.statistics()["loads_given_up"] == 1
    is_free(client)


@pytest.mark.parametrize(("number", "is_measured"), [(3, False), (4, True)])
def test_a_prompt_with_documents_does_so_too(
    sidecar: ThirdTierSidecar, client: Client, model: torch.nn.Module, prompts: list[Cold], number: int,
    is_measured: bool,
) -> None:  # fmt: skip
    """Also where no prefill was measured, so that a plan knows no times."""
    ids, expected = prompts[number]
    runner = TransformersRunner(model, chunk_tokens=STEP)
    is_link(client, 1e12)
    is_tier(client)
    for _ in range(40 * is_measured):
        client.planner.computed(runner.spec, 0, Prefill(1000, 0, 5.0))
    sidecar.switches.turn_on(Switch.STALLED)
    began_s = client.planner.clock.monotonic()
    document = [range(COUNT - STEP, COUNT - 2)]
    found = client.partial_prefill(runner, ids[0], segments=document, recompute=Recompute.reuse())
    assert client.planner.clock.monotonic() - began_s < client.planner.timeout_s, "a call's deadline was waited for"
    assert torch.allclose(found.logits[-1], expected.reshape(-1, expected.shape[-1])[0], atol=1e-4)
    assert client.statistics()["loads_given_up"] == 1
    is_free(client)


def test_a_siblings_hidden_states_do_so_too() -> None:
    """They come first, and by a transfer of their own."""
    tokens, setting = prompt(COUNT, 77), Recompute.droidspeak(1, 2)
    with patient_sidecar() as sidecar:
        with connect(sidecar.address) as writer:
            keep(writer, SENDER, tokens, 1)
        sidecar.stop()
        sidecar.start()
        with connect(sidecar.address, planning="on") as client:
            is_link(client, 1e12)
            is_tier(client)
            for _ in range(40):
                client.planner.computed(RECEIVER.spec, 0, Prefill(1000, 0, 5.0))
            sidecar.switches.turn_on(Switch.STALLED)
            began_s = client.planner.clock.monotonic()
            found = client.partial_prefill(RECEIVER, tokens, senders=[SENDER.spec], recompute=setting)
            assert client.planner.clock.monotonic() - began_s < client.planner.timeout_s, "a call's deadline"
            in_full(found, tokens)
            assert found.plan.reason.startswith("loading took longer than"), found.plan.reason
            assert client.statistics()["loads_given_up"] == 1
            is_free(client)
            sidecar.switches.turn_off()


def test_it_is_loaded_once_the_tier_is_back(
    sidecar: ThirdTierSidecar, client: Client, model: torch.nn.Module, cold: Cold
) -> None:
    ids, expected = cold
    sidecar.switches.turn_off()
    cached = CachedModel(model, client, chunk_tokens=STEP)
    is_link(client, 1e12)
    is_tier(client)
    is_engine(client, cached, 1.0)
    found, report = logits(cached, ids)
    assert torch.equal(found, expected)
    assert report.reused_token_count > 0
    assert client.statistics()["loads_given_up"] == 0


def planned(client: Client, model: torch.nn.Module, ids: torch.Tensor) -> LoadPlan:
    cached = CachedModel(model, client, chunk_tokens=STEP)
    is_link(client, 1e12)
    is_tier(client)
    is_engine(client, cached, 1e-3)
    return client.plan(cached.spec, ids[0], step_tokens=STEP)


def test_what_nobody_waits_for_is_not_given_up(client: Client, model: torch.nn.Module, cold: Cold) -> None:
    plan, waits, given_up, looked = planned(client, model, cold[0]), [False], threading.Event(), threading.Event()

    def is_waiting() -> bool:
        looked.set()
        return waits[0]

    with Patience(client, plan, 0.0, is_waiting, given_up.set) as patience:
        assert looked.wait(10.0)
        assert not given_up.is_set()
        waits[0] = True
        assert given_up.wait(10.0)
        assert patience.is_spent


@pytest.mark.parametrize("mode", ["off", "observe"])
def test_without_a_plan_that_is_carried_out_loads_are_waited_for(
    client: Client, model: torch.nn.Module, cold: Cold, mode: str
) -> None:
    plan = planned(client, model, cold[0])
    client.planner.mode = mode
    before = threading.active_count()
    with Patience(client, plan, 0.0, lambda: True, lambda: None) as patience:
        assert threading.active_count() == before
    assert not patience.is_spent


def test_a_sidecar_that_stands_still_is_not_waited_for(
    sidecar: ThirdTierSidecar, client: Client, model: torch.nn.Module, cold: Cold
) -> None:
    """Neither the answer to a lookup nor the opening of a fetch takes a call's deadline."""
    ids, expected = cold
    cached = CachedModel(model, client, chunk_tokens=STEP)
    is_link(client, 1e12)
    is_tier(client)
    is_engine(client, cached, 1e-3)
    os.kill(sidecar.pid, signal.SIGSTOP)
    try:
        began_s = client.planner.clock.monotonic()
        found, report = logits(cached, ids)
        assert client.planner.clock.monotonic() - began_s < client.planner.timeout_s, "a call's deadline was waited for"
    finally:
        os.kill(sidecar.pid, signal.SIGCONT)
    assert torch.equal(found, expected)
    assert (report.reused_token_count, report.reason) == (0, MissReason.UNAVAILABLE)
    assert client.statistics()["loads_given_up"] == 1
    cached.close()
    is_free(client)


@pytest.mark.parametrize("has_prefix", [True, False])
def test_nor_is_it_for_a_prompt_with_documents(
    own_sidecar: Sidecar, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, has_prefix: bool
) -> None:
    """A prefix is held by a call; without one, shared memory says what there is, and the document's fetch is a call."""
    monkeypatch.setattr(inquiry, "ANSWER_S_MIN", 0.1)
    with connect(own_sidecar.address, planning="on", timeout_s=3.0) as client:
        cached, ids = CachedModel(model, client, chunk_tokens=STEP), tokens(COUNT, 88)
        if has_prefix:
            cached.generate(ids[:, : STEP + 1], max_new_tokens=1).report.wait_stored(10.0)
        for receipt in cached.remember([ids[0, 64:128]]):
            receipt.wait(10.0)
        runner, reuse = TransformersRunner(model, spec=cached.spec), Recompute.reuse()
        expected = recompute(runner, ids[0], [], reuse).logits
        before = client.statistics()["loads_given_up"]
        os.kill(own_sidecar.pid, signal.SIGSTOP)
        try:
            found = client.partial_prefill(runner, ids[0], segments=[(64, 128)], recompute=reuse)
            assert client.statistics()["loads_given_up"] == before + 1, "a call's deadline was waited for"
        finally:
            os.kill(own_sidecar.pid, signal.SIGCONT)
        assert torch.equal(found.logits, expected)
        assert found.plan.reused_token_count == 0
        is_free(client)
        cached.close()


def test_nor_is_it_to_give_back_what_it_held_before_it_stood_still(
    own_sidecar: Sidecar, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has answered the lookup, and stops before a document's fetch."""
    monkeypatch.setattr(inquiry, "ANSWER_S_MIN", 0.1)
    with connect(own_sidecar.address, planning="on", timeout_s=3.0) as client:
        cached, ids = CachedModel(model, client, chunk_tokens=STEP), tokens(COUNT, 89)
        cached.generate(ids[:, : STEP + 1], max_new_tokens=1).report.wait_stored(10.0)
        for receipt in cached.remember([ids[0, 64:128]]):
            receipt.wait(10.0)
        runner, reuse = TransformersRunner(model, spec=cached.spec), Recompute.reuse()
        begin = client.start_fetch_segment

        def stopped(*args: Any, **options: Any) -> Any:
            os.kill(own_sidecar.pid, signal.SIGSTOP)
            return begin(*args, **options)

        monkeypatch.setattr(client, "start_fetch_segment", stopped)
        before = client.statistics()[
            "loads_given_up"
        ]  # on a busy machine a tenth of a second is short for generate, too
        try:
            found = client.partial_prefill(runner, ids[0], segments=[(64, 128)], recompute=reuse)
            assert client.statistics()["unavailable"] == 0, "a call's deadline was waited for"
        finally:
            os.kill(own_sidecar.pid, signal.SIGCONT)
        assert found.plan.reused_token_count == 0
        assert client.statistics()["loads_given_up"] == before + 1
        is_free(client)
        cached.close()


@pytest.mark.parametrize("mode", ["off", "observe"])
def test_a_sidecar_that_stands_still_costs_one_wait_and_is_left_alone_for_a_while(
    own_sidecar: Sidecar, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """A prompt waits for a call's deadline where plans are not carried out: once, not each prompt, nor its store."""
    with connect(own_sidecar.address, planning=mode, timeout_s=1.0) as client:
        cached, prompts = CachedModel(model, client, chunk_tokens=STEP), [tokens(COUNT, 81 + each) for each in range(2)]
        expected = [logits(cached, ids) for ids in prompts]
        assert [report.wait_stored(10.0) for _, report in expected] == [Durability.MEMORY] * 2
        monkeypatch.setattr(pause, "SLOW_S", 0.5)
        os.kill(own_sidecar.pid, signal.SIGSTOP)
        try:
            logits(cached, prompts[0])
            waited = client.statistics()["unavailable"]
            for ids, (right, _) in zip(prompts, expected, strict=True):
                found, report = logits(cached, ids)
                assert torch.equal(found, right)
                assert (report.reused_token_count, report.reason) == (0, MissReason.UNAVAILABLE)
                assert report.wait_stored(10.0) is Durability.NONE
            cached.close()
            assert client.statistics()["unavailable"] == waited, "it was asked again"
        finally:
            os.kill(own_sidecar.pid, signal.SIGCONT)
        monkeypatch.setattr(pause, "PAUSE_S", 0.0)
        cached._pause.end()
        eventually(lambda: logits(cached, prompts[0])[1].reused_token_count > 0)


def test_stores_do_not_each_wait_for_a_sidecar_that_stands_still(
    own_sidecar: Sidecar, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that nobody has are not looked up by a call: their stores meet it first."""
    with connect(own_sidecar.address, timeout_s=1.0) as client:
        cached = CachedModel(model, client, chunk_tokens=STEP)
        logits(cached, tokens(COUNT, 84))[1].wait_stored(10.0)
        monkeypatch.setattr(pause, "SLOW_S", 0.5)
        os.kill(own_sidecar.pid, signal.SIGSTOP)
        try:
            reports = [logits(cached, tokens(COUNT, 85 + each))[1] for each in range(4)]
            cached.close()
        finally:
            os.kill(own_sidecar.pid, signal.SIGCONT)
        assert [report.wait_stored(10.0) for report in reports] == [Durability.NONE] * 4
        assert sum("left alone" in report.receipt.reason for report in reports) == 3
