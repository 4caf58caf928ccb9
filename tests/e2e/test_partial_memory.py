"""What a partial prefill over a real sidecar holds: one merged cache and one landing, whatever happens."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from kvstore_client import Client, Recompute, connect
from kvstore_client.arrays import destination
from kvstore_client.engines.transformers import TransformersRunner
from kvstore_client.fetch import owned
from kvstore_client.recompute import recompute
from kvstore_ops.bench.memory import merged_bytes
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import DataLoss
from tests.recompute.models import LAYERS, model_of, prompt, sibling_of

MODEL = model_of("llama", max_position_embeddings=1024)
RECEIVER = TransformersRunner(MODEL, chunk_tokens=16)
SENDER = TransformersRunner(sibling_of(MODEL, 3), chunk_tokens=16)
SETTING = Recompute(1, 1, 0.25)
TOKENS, CONTEXT = 320, 256


@dataclass
class Fresh:
    """Memory that was asked for to land or to merge in, and the most of it that was there at once."""

    held: int = 0
    most: int = 0

    def destination(self, byte_count: int) -> Any:
        memory = destination(byte_count)
        self.held += byte_count
        self.most = max(self.most, self.held)
        weakref.finalize(memory, self._gone, byte_count)
        return memory

    def _gone(self, byte_count: int) -> None:
        self.held -= byte_count


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fresh]:
    """No garbage collection: what is only dropped by one, later, is held."""
    counted = Fresh()
    monkeypatch.setattr(owned, "destination", counted.destination)
    gc.collect()
    gc.disable()
    yield counted
    gc.enable()


@pytest.fixture
def client(own_sidecar: Sidecar) -> Iterator[Client]:
    with connect(own_sidecar.address, timeout_s=5.0) as connected:
        theirs = recompute(SENDER, prompt(TOKENS, 1)[:CONTEXT], [], Recompute.full(LAYERS), hidden_layers=(1,))
        connected.store(SENDER.spec, prompt(TOKENS, 1)[:CONTEXT], theirs.kv, hidden=theirs.hidden).wait(10.0)
        yield connected


def landing_bytes() -> int:
    """E of one layer, and K and V of one."""
    spec = RECEIVER.spec
    return CONTEXT * spec.hidden_size * spec.item_size + merged_bytes(spec, CONTEXT) // LAYERS


def test_one_cache_and_one_layers_landing(client: Client, fresh: Fresh) -> None:
    found = client.partial_prefill(RECEIVER, prompt(TOKENS, 1), senders=[SENDER.spec], recompute=SETTING)
    assert found.plan.reused_token_count == CONTEXT
    whole = merged_bytes(RECEIVER.spec, TOKENS)
    assert whole < fresh.most <= whole + landing_bytes()
    assert fresh.held == whole


def test_a_lost_fetch_leaves_its_cache_before_another_is_begun(client: Client, fresh: Fresh) -> None:
    start_fetch = client.start_fetch

    def lose() -> None:
        raise DataLoss("lost, says the test")

    def losing(*arguments: Any, **options: Any) -> Any:
        client.faults.arm("fetch.copy.middle", lose)
        return start_fetch(*arguments, **options)

    client.start_fetch = losing  # type: ignore[method-assign]
    found = client.partial_prefill(RECEIVER, prompt(TOKENS, 1), senders=[SENDER.spec], recompute=SETTING)
    assert "computed in full" in found.plan.reason
    whole = merged_bytes(RECEIVER.spec, TOKENS)
    assert fresh.most <= whole + landing_bytes()
    assert fresh.held == whole
