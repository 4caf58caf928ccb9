"""An engine whose weights are replaced again and again, as a trainer does, with a reset each time."""

from __future__ import annotations

import os

import pytest
from kvstore_ops.sidecar import Sidecar

from tests.engines.vllm.engine import Engine, blocks_of, matched
from tests.engines.vllm.test_hashes import asked
from tests.specs import small_spec, tokens_of


@pytest.mark.parametrize("digests", ["kvstore", "vllm"])
def test_resets_leave_room_for_the_models_of_others(digests: str) -> None:
    """Nobody loads any more what was kept before a reset, but it stays until memory is short, and a model with chunks
    keeps its place. All that one engine keeps after resets is one model's."""
    environment = {**os.environ, "KVSTORE__LIMITS__MODEL_COUNT_MAX": "3"}
    with Sidecar("--capacity", "32 MiB", environment=environment) as own:
        engine, tokens = Engine(own.address, digests=digests), tokens_of(42, 80)
        for number in range(6):
            engine.keep(asked(f"first {number}", tokens), blocks_of(42), seed=number)
            assert matched(engine.scheduler, asked(f"again {number}", tokens), 0) == (40, True)
            engine.scheduler.reset()
            assert matched(engine.scheduler, asked(f"later {number}", tokens), 0) == (0, False)
        other = Engine(own.address, small_spec(model_id="another"), digests=digests)
        other.keep(asked("another", tokens), blocks_of(42))
        engine.close()
        other.close()
