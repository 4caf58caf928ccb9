"""Partial prefill with a planner: the exact prefix is loaded as far as that is faster, and the answer is the same."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NoReturn

import pytest
import torch
from kvstore_client import Client, Exactness, connect
from kvstore_client.engines.transformers import TransformersRunner
from kvstore_client.loading import patience
from kvstore_client.recompute import PartialPrefill
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import Internal
from kvstore.planning.loading import BusyTime, BusyTimes, Prefill, Way, plan_loading
from kvstore.spec import Tier
from kvstore.v1alpha import admin_pb2
from tests.e2e.prefills import RECEIVER, SENDER, STEP, keep, same
from tests.e2e.test_partial_prefill import prompt
from tests.server.raw import eventually

COUNT, STORED = STEP * 12 + 3, STEP * 12


@pytest.fixture(scope="module")
def client(sidecar: Sidecar) -> Iterator[Client]:
    with connect(sidecar.address, planning="on") as connected:
        yield connected


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are about choices: no load is given up, however busy the machine is."""
    monkeypatch.setattr(patience, "BUDGET", 1e4)


def speeds(client: Client, runner: TransformersRunner, link_bytes_per_s: float, token_s: float) -> None:
    """The client has measured so."""
    sizes = [size for size in (1000, 100_000, 10_000_000) for _ in range(3)]
    client.planner._link = BusyTimes(tuple(BusyTime(size, size / link_bytes_per_s) for size in sizes))
    for _ in range(40):
        client.planner.computed(runner.spec, 0, Prefill(1000, 0, 1000 * token_s))


def prefilled(client: Client, tokens: torch.Tensor, **options: object) -> PartialPrefill:
    return client.partial_prefill(RECEIVER, tokens, **options)


def held(client: Client) -> admin_pb2.SessionStats:
    return client.stats().sessions


def test_it_is_loaded_where_that_is_faster(client: Client) -> None:
    tokens = prompt(COUNT, 31)
    keep(client, RECEIVER, tokens)
    speeds(client, RECEIVER, 1e12, 1e-3)
    found = prefilled(client, tokens)
    assert found.plan.loading is not None
    assert found.plan.loading.chosen.way is Way.LOAD
    assert found.plan.reused_token_count >= STORED
    assert found.exactness is Exactness.EXACT


def test_it_is_computed_where_that_is_faster_and_nothing_stays_held(client: Client) -> None:
    tokens = prompt(COUNT, 32)
    keep(client, RECEIVER, tokens)
    client.planner.mode = "off"
    cold = prefilled(client, prompt(COUNT, 33))
    plain = prefilled(client, tokens)
    client.planner.mode = "on"
    speeds(client, RECEIVER, 1.0, 1e-6)
    found = prefilled(client, tokens)
    assert found.plan.loading is not None
    assert found.plan.loading.chosen.way is Way.PREFILL
    assert found.plan.reused_token_count == 0
    assert torch.allclose(found.logits, plain.logits, atol=1e-4)
    assert held(client).ticket_count == 0
    client.planner.mode = "observe"
    observed = prefilled(client, tokens)
    assert observed.plan.loading is not None
    assert observed.plan.loading.chosen.way is Way.PREFILL
    assert observed.plan.reused_token_count >= STORED
    same(observed, plain)
    assert cold.plan.loading is None
    client.planner.mode = "on"


def test_the_first_tokens_are_loaded_while_the_rest_is_computed(client: Client) -> None:
    """In one pass a layer loads while the one before it is computed: with both alike fast, half and half."""
    tokens = prompt(COUNT, 34)
    keep(client, RECEIVER, tokens)
    token_bytes = sum(layer.kv_heads * (layer.k_dim + layer.v_dim) for layer in RECEIVER.spec.layers)
    token_bytes *= RECEIVER.spec.item_size
    speeds(client, RECEIVER, token_bytes / 1e-3, 1e-3)
    found = prefilled(client, tokens)
    assert found.plan.loading is not None
    if client.plane == "local":  # all of it shows in shared memory: nobody is asked
        assert found.plan.loading.chosen.way is Way.FIRST
        assert 0 < found.plan.reused_token_count == found.plan.loading.chosen.load_stop < STORED
    assert found.exactness is Exactness.EXACT
    assert held(client).ticket_count == 0


def test_what_a_prefill_takes_is_learned_from_plain_ones_alone(client: Client) -> None:
    client.planner._prefills.clear()
    prefilled(client, prompt(COUNT, 35))
    (learned,) = client.planner._prefills.values()
    assert [(each.new_tokens, each.context_tokens) for each in learned.prefills] == [(COUNT, 0)]


def test_a_sender_that_no_profile_allows_changes_nothing(client: Client) -> None:
    tokens = prompt(COUNT, 36)
    keep(client, RECEIVER, tokens)
    for link_bytes_per_s, token_s, is_loaded in ((1e12, 1e-3, True), (1.0, 1e-6, False)):
        speeds(client, RECEIVER, link_bytes_per_s, token_s)
        found = prefilled(client, tokens, senders=[SENDER.spec])
        assert found.plan.loading is not None
        assert (found.plan.reused_token_count >= STORED) is is_loaded
        assert (found.exactness, found.plan.recompute) == (Exactness.EXACT, None)
        assert "no valid profile" in found.plan.reason
    assert held(client).ticket_count == 0


@pytest.mark.parametrize("mode", ["off", "on"])
def test_the_way_from_memory_is_measured_by_what_it_brings(client: Client, mode: str) -> None:
    tokens = prompt(COUNT, 37)
    keep(client, RECEIVER, tokens)
    speeds(client, RECEIVER, 1e12, 1e-3)
    client.planner.mode = mode
    client.planner._link = BusyTimes()
    found = prefilled(client, tokens)
    client.planner.mode = "on"
    assert found.plan.reused_token_count >= STORED
    assert len(client.planner._link.times) == 1


def test_what_a_plan_leaves_out_is_measured_on_the_side(client: Client) -> None:
    tokens = prompt(COUNT, 38)
    keep(client, RECEIVER, tokens)
    speeds(client, RECEIVER, 1e9, 1e-9)
    client.planner._probed_s.clear()
    client.planner._looked_s = -math.inf
    before = len(client.planner._link.times)
    assert prefilled(client, tokens).plan.reused_token_count == 0
    eventually(lambda: len(client.planner._link.times) == before + 1)
    eventually(lambda: held(client).lease_count == 0)  # it is released behind the measurement


def test_a_sidecar_that_cannot_tell_its_rates_is_planned_without(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(COUNT, 64)
    keep(client, RECEIVER, tokens)
    session, asked = client.connect_now(), []

    def broken(_method: Any, request: Any, _timeout_s: float) -> NoReturn:
        asked.append(request)
        raise Internal("a figure is out of range")

    match = client.lookup(RECEIVER.spec, tokens)
    below = replace(match, chunks=tuple(each._replace(tier=Tier.NVME) for each in match.chunks))
    with monkeypatch.context() as patched:
        patched.setattr(session, "call", broken)
        patched.setattr(client.planner, "_asked_s", -math.inf)
        facts = client.planner.facts(RECEIVER.spec, below, COUNT, COUNT - 1, 0, frozenset(Way))
    assert asked == [admin_pb2.StatsRequest()]
    assert plan_loading(facts).chosen
