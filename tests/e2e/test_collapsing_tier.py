"""A tier that collapses in the middle of a load: the prompt is computed by the client's own clock, and nothing is held
for it. No message says so: the client's stream ends. What the sidecar had begun to read is there for the next one."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kvstore_client import Client, connect
from kvstore_client.engines.transformers import TransformersRunner
from kvstore_client.loading.call import Asked
from kvstore_client.loading.patience import BUDGET, patience_s
from kvstore_client.prompt import Prompt
from kvstore_ops.sidecar import TOKEN, Sidecar

from kvstore.planning.loading import Prefill, Way
from kvstore.v1alpha import admin_pb2
from kvstore.wire.plans import plan_from_message
from tests.e2e.prefills import RECEIVER, STEP, computed
from tests.e2e.test_partial_prefill import prompt
from tests.engines.test_planned_loads import is_link
from tests.fakes.proxy import Proxy
from tests.fakes.redis_server import RedisServer
from tests.server.raw import eventually

CHUNKS = 40
COUNT = STEP * CHUNKS + 3
SPEC = RECEIVER.spec
CHUNK_BYTES = STEP * SPEC.item_size * sum(each.kv_heads * (each.k_dim + each.v_dim) for each in SPEC.layers)
TOKEN_S = 0.05
"""Clients are told that a token's prefill takes so long: a good line is faster, however busy the machine is."""


def node(redis: str, plane: str = "local") -> Sidecar:
    own = {
        "TIERS__REDIS__URL": redis, "TIERS__REDIS__LOOKUP_S_MAX": "5 s", "TIERS__REDIS__WRITE": "back",
        "CONTROLLER__DEADLINE_S": "30", "POLICY__CANARY_INTERVAL_S": "0",
    }  # fmt: skip
    environment = {**os.environ, **{f"KVSTORE__{name}": value for name, value in own.items()}}
    return Sidecar("--capacity", "32 MiB", plane=plane, environment=environment)


class Line(Proxy):
    """To Redis; it collapses once so many bytes of the answers have passed."""

    def collapse_after(self, byte_count: float) -> None:
        passed_bytes, has_collapsed = 0, False

        def pass_on(piece: bytes) -> bytes:
            nonlocal passed_bytes, has_collapsed
            passed_bytes += len(piece)
            if passed_bytes >= byte_count and not has_collapsed:
                has_collapsed = self.is_silent = True
            return piece

        self.alter = pass_on

    def recover(self) -> None:
        self.is_silent = False


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def line(redis: RedisServer) -> Iterator[Line]:
    with Line(str(redis.path)) as proxy:
        yield proxy


@pytest.fixture
def reader(line: Line, plane: str) -> Iterator[Sidecar]:
    host, port = line.address
    with node(f"redis://{host}:{port}", plane) as running:
        yield running
        line.mend()


@pytest.fixture
def client(reader: Sidecar) -> Iterator[Client]:
    with connect(reader.address, token=TOKEN if reader.plane == "remote" else None, planning="on") as connected:
        is_link(connected, 1e12)
        for _ in range(40):
            connected.planner.computed(SPEC, 0, Prefill(1000, 0, 1000 * TOKEN_S))
        yield connected


def stored(redis: RedisServer, seed: int) -> torch.Tensor:
    """A prompt that only Redis has."""
    tokens = prompt(COUNT, seed)
    with node(redis.url) as writer, connect(writer.address) as client:
        client.store(SPEC, tokens, computed(RECEIVER, tokens).kv).wait(20.0)
        eventually(lambda: client.stats().backlog_chunk_count == 0, 20.0)
    return tokens


def held(client: Client) -> tuple[int, ...]:
    stats = client.stats()
    sessions = stats.sessions
    return sessions.lease_count, sessions.ticket_count, sessions.stream_count, stats.arena.leased_bytes


def test_a_tier_that_collapses_in_mid_load_costs_no_more_than_a_prefill(
    redis: RedisServer, line: Line, reader: Sidecar, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = stored(redis, 900)
    begun: list[int] = []  # tokens of each pass, and of those that came to their end
    ended: list[int] = []
    embed, logits = TransformersRunner.embed, TransformersRunner.logits
    monkeypatch.setattr(
        TransformersRunner, "embed", lambda runner, ids: (begun.append(len(ids)), embed(runner, ids))[1]
    )
    monkeypatch.setattr(
        TransformersRunner, "logits", lambda runner, hidden: (ended.append(begun[-1]), logits(runner, hidden))[1]
    )
    line.collapse_after(6 * CHUNK_BYTES)
    found = client.partial_prefill(RECEIVER, tokens)
    monkeypatch.undo()
    assert line.is_silent, "it collapsed in the middle"
    assert torch.allclose(found.logits[-1], computed(RECEIVER, tokens).logits[-1], atol=1e-4)
    assert found.plan.reason, "what was to come was computed"
    assert client.statistics()["loads_given_up"] in (1, 2), "what was asked for anew found the tier silent, too"
    eventually(lambda: held(client) == (0, 0, 0, 0))

    with connect(reader.socket_address) as operator:
        session = operator.connect_now()
        (entry,) = session.call(session.admin.Plans, admin_pb2.PlansRequest(limit=1), 10.0).plans
    plan = plan_from_message(entry.plan)
    assert (plan.chosen.way in (Way.LOAD, Way.FIRST), entry.state) == (True, "given up")
    assert patience_s(plan) <= (1 + BUDGET) * plan.prefill.ttft_s, "as the plan has it, the wait and its budget"
    assert plan.chosen.ttft_high_s <= plan.prefill.ttft_s
    assert sum(ended) <= COUNT, "no token was computed twice; a step that a layer ended is none"

    line.recover()
    eventually(lambda: client.stats().loading_bytes == 0, 40.0)
    client.planner.mode = "off"
    again = client.partial_prefill(RECEIVER, tokens)
    assert again.plan.reused_token_count >= STEP * CHUNKS
    assert torch.allclose(again.logits[-1], found.logits[-1], atol=1e-4)


@pytest.mark.parametrize("point", ["planned", "opening", "arriving"])
def test_after_a_cancel_nothing_is_held(redis: RedisServer, line: Line, client: Client, point: str) -> None:
    tokens = stored(redis, 910 + len(point))
    whole = Prompt.of(SPEC, tokens.numpy(), (), None)
    call = client.planner.begin(whole, Asked(STEP * CHUNKS, 0, (Way.LOAD,), "on"))
    assert call is not None
    assert call.answer.chunk_count == CHUNKS
    match = client.planner.found(whole, call)
    until = {"planned": math.inf, "opening": 1, "arriving": 6 * CHUNK_BYTES}[point]
    line.collapse_after(until)
    transfer: Any = None
    if point != "planned":
        transfer = client.start_fetch(match.ticket)
        eventually(lambda: line.is_silent)
        assert client.stats().loading_bytes
        assert transfer.cancel(10.0)
    call.close()
    if match.ticket and transfer is None:
        client.release_ticket(match.ticket)
    eventually(lambda: held(client) == (0, 0, 0, 0))
    line.recover()
    eventually(lambda: client.stats().loading_bytes == 0, 40.0)
