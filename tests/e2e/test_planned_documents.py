"""Documents and siblings on a real device of any speed: reused where that is faster, computed where it is not."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import pytest
import torch
from kvstore_client import Client, Exactness, Recompute, connect
from kvstore_client.loading import patience
from kvstore_client.recompute import PartialPrefill
from kvstore_ops.bench.throttled import ThrottledSidecar
from kvstore_ops.operators.calls import Operator

from kvstore.planning.loading import Way
from kvstore.v1alpha import admin_pb2
from tests.e2e.prefills import RECEIVER, SENDER, STEP, computed, keep, keep_alone
from tests.e2e.test_partial_prefill import prompt
from tests.e2e.test_planned_prefill import held, speeds
from tests.server.raw import eventually

SLOW_BYTES_PER_S = 100e3
SETTING = Recompute.cacheblend(1, 0.2)
LEARNING = 6
LEAST_S = 5e-3
"""Clients are told that a token's prefill takes so long: a device at full rate is faster even on a busy machine."""


@pytest.fixture(scope="module")
def sidecar() -> Iterator[ThrottledSidecar]:
    with ThrottledSidecar("--capacity", "8 MiB", nvme="64 MiB") as running:
        yield running


@pytest.fixture
def client(sidecar: ThrottledSidecar) -> Iterator[Client]:
    with connect(sidecar.address, planning="on") as connected:
        yield connected
    sidecar.set_rate(0)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are about choices: no load is given up, however busy the machine is."""
    monkeypatch.setattr(patience, "BUDGET", 1e4)


def down(client: Client) -> None:
    """Leave every chunk on the device alone, those too that are on their way to memory."""
    asked, in_memory = Operator(client), admin_pb2.Selection(tier="memory")
    wanted = admin_pb2.ChangeRequest(selection=in_memory, move=admin_pb2.Move(tier="nvme"))
    until = time.monotonic() + 20.0
    while client.stats().loading_bytes or any(total.chunk_count for total in asked.totals(in_memory)):
        assert time.monotonic() < until, "a chunk stays in memory"
        for _ in asked.change(wanted):
            pass


def ask(client: Client, tokens: torch.Tensor, mode: str = "on", **options: object) -> PartialPrefill:
    """Prefill from the device, with its rates as the sidecar knows them now."""
    down(client)
    client.planner.mode = mode
    speeds(client, RECEIVER, 1e12, LEAST_S)
    client.planner._asked_s = -math.inf
    return client.partial_prefill(RECEIVER, tokens, **options)


def learn(client: Client, sidecar: ThrottledSidecar, rate: float, tokens: torch.Tensor, **options: object) -> None:
    sidecar.set_rate(rate)
    for _ in range(LEARNING):
        ask(client, tokens, "off", **options)


def test_documents_are_blended_from_a_fast_device_and_computed_beside_a_slow_one(
    client: Client, sidecar: ThrottledSidecar
) -> None:
    one, two, tail = prompt(STEP * 2 + 5, 700), prompt(STEP * 2, 701), prompt(4, 702)
    for document in (one, two):
        keep_alone(client, RECEIVER, document)
    tokens = torch.cat((prompt(3, 703), two, one, tail))
    places = [range(3, 3 + len(two)), range(3 + len(two), 3 + len(two) + len(one))]
    options = {"segments": places, "recompute": SETTING}
    for _ in range(5):  # what was measured while the machine was busy with others' work is forgotten
        learn(client, sidecar, 0, tokens, **options)
        fast = ask(client, tokens, **options)
        assert fast.plan.loading is not None
        if fast.plan.loading.chosen.way is Way.BLEND:
            break
    assert fast.plan.loading.chosen.way is Way.BLEND, str(fast.plan.loading)
    assert fast.plan.loading.chosen.ttft_high_s <= fast.plan.loading.prefill.ttft_s
    assert [run.is_standalone for run in fast.plan.runs] == [True, True]
    assert (fast.exactness, fast.plan.recompute, fast.plan.reason) == (Exactness.DERIVED, SETTING, "")

    learn(client, sidecar, SLOW_BYTES_PER_S, tokens, **options)
    slow = ask(client, tokens, **options)
    assert slow.plan.loading is not None
    assert slow.plan.loading.chosen.way is Way.PREFILL, str(slow.plan.loading)
    assert (slow.plan.runs, slow.exactness) == ((), Exactness.EXACT)
    assert "not worth their load" in slow.plan.reason
    assert torch.equal(slow.logits, computed(RECEIVER, tokens).logits)
    eventually(lambda: held(client).ticket_count == held(client).lease_count == 0)

    observed = ask(client, tokens, "observe", **options)
    assert observed.plan.loading is not None
    assert observed.plan.loading.chosen.way is Way.PREFILL
    assert observed.plan.recompute == SETTING
    assert torch.equal(observed.logits, fast.logits)


def test_a_device_that_is_fast_again_is_noticed_by_documents_alone(client: Client, sidecar: ThrottledSidecar) -> None:
    document, tail = prompt(STEP * 4, 710), prompt(5, 711)
    keep_alone(client, RECEIVER, document)
    tokens = torch.cat((prompt(3, 712), document, tail))
    options = {"segments": [(3, 3 + len(document))], "recompute": SETTING}
    learn(client, sidecar, SLOW_BYTES_PER_S, tokens, **options)
    assert ask(client, tokens, **options).plan.runs == ()
    sidecar.set_rate(0)
    for _ in range(40):
        client.planner._probed_s.clear()
        client.planner._looked_s = -math.inf
        found = ask(client, tokens, **options)
        if found.plan.runs:
            break
        eventually(lambda: held(client).lease_count == 0)
    assert found.plan.loading is not None
    assert found.plan.loading.chosen.way is Way.BLEND


def test_a_sibling_is_weighed_and_so_is_the_prefix_beside_it(client: Client, sidecar: ThrottledSidecar) -> None:
    tokens = prompt(STEP * 6 + 3, 720)
    keep(client, RECEIVER, tokens[: STEP * 2])
    keep(client, SENDER, tokens[: STEP * 6])
    options = {"senders": [SENDER.spec], "recompute": SETTING}
    learn(client, sidecar, 0, tokens, **options)
    fast = ask(client, tokens, **options)
    assert [(run.sender is None, run.token_start, run.token_stop) for run in fast.plan.runs] == [
        (True, 0, STEP * 2),
        (False, STEP * 2, STEP * 6),
    ]
    learn(client, sidecar, SLOW_BYTES_PER_S, tokens, **options)
    slow = ask(client, tokens, **options)
    assert slow.plan.runs == ()
    assert torch.equal(slow.logits, computed(RECEIVER, tokens).logits)
    eventually(lambda: held(client).ticket_count == held(client).lease_count == 0)


def test_an_engine_that_measured_nothing_reuses_all(client: Client, sidecar: ThrottledSidecar) -> None:
    document = prompt(STEP * 2, 740)
    keep_alone(client, RECEIVER, document)
    tokens = torch.cat((prompt(3, 741), document, prompt(5, 742)))
    sidecar.set_rate(SLOW_BYTES_PER_S)
    down(client)
    client.planner._engines = {}
    client.planner._asked_s = client.planner.clock.monotonic() + 3600.0
    found = client.partial_prefill(RECEIVER, tokens, segments=[(3, 3 + len(document))], recompute=SETTING)
    assert found.plan.loading is not None
    assert (found.plan.loading.is_measured, found.plan.recompute) == (False, SETTING)
