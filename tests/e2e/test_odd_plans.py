"""Partial prefills whose other side says what cannot be: a sidecar costs its plan, never the answer; a client gets an
error that names what is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from kvstore_client import Client, connect
from kvstore_client.loading.call import PrefillCall
from kvstore_client.opaque.value import CHUNK_BYTES, UNIT_BYTES, Key, namespace_spec
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import InvalidRequest
from kvstore.planning.loading import Prefill
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1alpha import prefill_pb2
from kvstore.wire.plans import WAY_NUMBERS
from tests.e2e.prefills import RECEIVER, STEP, computed, keep
from tests.e2e.test_prefill_call import talk
from tests.engines.test_planned_loads import is_link
from tests.recompute.models import prompt
from tests.server.raw import eventually

CHUNKS = 6
TOKENS = prompt(CHUNKS * STEP + 3, 91)
FULL = computed(RECEIVER, TOKENS).logits


def of_plan(name: str, value: Any) -> Callable[[prefill_pb2.PartialPrefillResponse], None]:
    def say(answer: prefill_pb2.PartialPrefillResponse) -> None:
        for each in (answer.plan,) if hasattr(answer.plan, name) else answer.plan.candidates:
            setattr(each, name, value)

    return say


def of_chunks(**fields: int) -> Callable[[prefill_pb2.PartialPrefillResponse], None]:
    def say(answer: prefill_pb2.PartialPrefillResponse) -> None:
        for name, value in fields.items():
            setattr(answer if hasattr(answer, name) else answer.found, name, value)

    return say


LIES = {
    "no-tokens": of_plan("token_count", 0),
    "nan": of_plan("ttft_seconds", math.nan),
    "more-chunks-than-found": of_chunks(chunk_count=900),
    "chunks-behind-the-last": of_chunks(chunk_first=1),
    "a-ticket-for-no-chunks": of_chunks(chunk_count=0),
    "found-more-than-asked": of_chunks(hit_count=900),
}


@pytest.fixture
def client(sidecar: Sidecar) -> Iterator[Client]:
    with connect(sidecar.address, planning="on") as connected:
        is_link(connected, 1e12)
        for _ in range(40):
            connected.planner.computed(RECEIVER.spec, 0, Prefill(1000, 0, 1.0))
        yield connected


@dataclass
class Liar:
    """A call's answers, each with a lie in it."""

    stream: Any
    lie: Callable[[prefill_pb2.PartialPrefillResponse], None]

    def __iter__(self) -> Iterator[prefill_pb2.PartialPrefillResponse]:
        for answer in self.stream:
            self.lie(answer)
            yield answer


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_sidecar_that_contradicts_itself_plans_nothing(
    client: Client, monkeypatch: pytest.MonkeyPatch, lie: Callable[[Any], None]
) -> None:
    keep(client, RECEIVER, TOKENS[: CHUNKS * STEP])
    begin = PrefillCall._begin

    def lied_to(call: PrefillCall, session: Any, read: Callable[[Any], None]) -> None:
        begin(call, session, lambda stream: read(Liar(stream, lie)))

    monkeypatch.setattr(PrefillCall, "_begin", lied_to)
    monkeypatch.setattr(client, "peek", lambda *_, **__: None)  # as where shared memory does not show all of it
    found = client.partial_prefill(RECEIVER, TOKENS)
    assert found.plan.reused_token_count == CHUNKS * STEP, "it is looked up as any other"
    assert (found.logits - FULL).abs().max() < 1e-4

    def held() -> int:
        sessions = client.stats().sessions
        return sessions.lease_count + sessions.ticket_count + sessions.stream_count

    eventually(lambda: not held())


@pytest.mark.parametrize("mode", [prefill_pb2.PLANNING_MODE_OFF, prefill_pb2.PLANNING_MODE_ON])
def test_opaque_values_have_no_prefill(client: Client, mode: prefill_pb2.PlanningMode) -> None:
    client.put_bytes("odd-plans", "key", b"value").wait(10.0)
    _, name = client._context.ready(namespace_spec("odd-plans"))
    count = CHUNK_BYTES // UNIT_BYTES
    begin = prefill_pb2.BeginPrefill(
        query=pb.ChainQuery(fingerprint=name, digests=Key.of("key").whole), token_count=count,
        reusable_token_count=count, mode=mode, ways=WAY_NUMBERS.values(),
    )  # fmt: skip
    with pytest.raises(InvalidRequest, match="opaque values"):
        talk(client, prefill_pb2.PartialPrefillRequest(begin=begin))
