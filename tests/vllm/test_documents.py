"""A real vLLM computes prompts over documents that were computed alone, and gives what it made to nobody else."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kvstore_client import Recompute, connect
from kvstore_client.engines.transformers import TransformersRunner
from kvstore_client.engines.transformers_documents import remember
from kvstore_client.engines.vllm.documents import DERIVED
from kvstore_ops.sidecar import Sidecar
from transformers import AutoModelForCausalLM

from tests.vllm.engine import Engine
from tests.vllm.test_end_to_end import leases_of, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
PREAMBLE, ONE, TWO, QUESTION = (prompt(count, seed) for count, seed in ((40, 11), (150, 12), (131, 13), (21, 14)))
ASKED = PREAMBLE + TWO + ONE + QUESTION
RUNS = [(40, 171), (171, 321)]
NAMED = {"kvstore_documents": RUNS, "kvstore_preamble": 40}
SYNCHRONOUS: dict[str, Any] = {"async_scheduling": False}


def extra(**recompute: Any) -> dict[str, Any]:
    return {"extra": {"chunk_tokens": 64, "recompute": recompute}, **SYNCHRONOUS}


def remembered(engine: Engine, *documents: list[int], salt: str = "") -> None:
    """Have an engine compute each document behind the preamble, and wait until it has told the sidecar."""
    before = engine.counted.get("vllm:kvstore_saves", 0)
    for each in documents:
        named = {"kvstore_documents": [(40, 40 + len(each))], "kvstore_preamble": 40}
        engine.ask(PREAMBLE + each, transfer=named, salt=salt)
    until = time.monotonic() + 30.0
    while engine.counted["vllm:kvstore_saves"] < before + len(documents):
        assert time.monotonic() < until, engine.counted
        engine.ask(prompt(3), max_tokens=1)  # a step more: saves end beside steps, and are told with them


@pytest.mark.parametrize(
    ("name", "recompute"),
    [("llama", {"selector": "suffix_attention", "ratio": 0.3}), ("qwen3", {"last_layer": 0, "ratio": 0.3})],
)
def test_the_pages_hold_what_a_partial_prefill_makes(
    models: dict[str, Path], durable: Sidecar, name: str, recompute: dict[str, Any]
) -> None:
    """Of transformers' own model of these weights: another runner, to the rounding of other kernels. Mends are said to
    take long, so that vLLM computes the third one."""
    model = AutoModelForCausalLM.from_pretrained(models[name], dtype=torch.float32).eval()
    runner, preamble = TransformersRunner(model), np.array(PREAMBLE)
    with connect(durable.address) as client:
        for receipt in remember(client, runner, [ONE, TWO], preamble):
            receipt.wait()
        setting = Recompute(**{"first_layer": 0, "last_layer": -1, **recompute})
        wanted = client.partial_prefill(runner, ASKED, segments=RUNS, recompute=setting, preamble=preamble)
        assert wanted.plan.reused_token_count == 281
    remembering = {"kv_connector": "SlowMender", "kv_connector_module_path": "tests.vllm.breaking"}
    with Engine(models[name], durable.address, connector=remembering, **extra(**recompute)) as engine:
        remembered(engine, ONE, TWO)
        (answer,), cached = engine.ask(ASKED, transfer=NAMED, salt=DERIVED)
        (held,) = engine.held
        assert cached == [320]  # whole blocks of 32
        assert engine.counted["vllm:kvstore_mend_reused_tokens"] == 281
        assert 61 < engine.counted["vllm:kvstore_mend_computed_tokens"] < 61 + 281
        (again,), cached = engine.ask(ASKED, transfer=NAMED, salt=DERIVED)
        assert (again, cached) == (answer, [320])
        assert engine.counted["vllm:kvstore_mends"] == 1, "the second answer is of vLLM's own blocks"
        for skipped, mended in ((0, 2), (8, 2)):  # one slow mend says little, two say that mends are slow
            places = [(40 + skipped, 190 + skipped), (190 + skipped, 321 + skipped)]
            prompt = PREAMBLE + skipped * [5] + ONE + TWO
            engine.ask(prompt, transfer={**NAMED, "kvstore_documents": places}, salt=DERIVED)
            assert engine.counted["vllm:kvstore_mends"] == mended
    worst = 0.0
    for layer, (k, v) in enumerate(wanted.kv):
        first, pages = held[layer]
        assert first == 0
        for ours, theirs in zip(torch.from_numpy(pages), (k, v), strict=True):
            worst = max(worst, float((ours[:, :320] - theirs[:, :320]).abs().max() / theirs.abs().max()))
    assert worst < 1e-3
    assert leases_of(durable) == (0, 0)


def test_what_was_mended_reaches_nobody_else(models: dict[str, Path], durable: Sidecar) -> None:
    with Engine(models["llama"], None, enable_prefix_caching=False) as plain:
        said, _ = plain.ask(ASKED)
        of_tenant, _ = plain.ask(PREAMBLE + ONE + TWO)
    nothing_again = extra()
    with Engine(models["llama"], durable.address, **nothing_again) as engine:
        remembered(engine, ONE, TWO)
        mended, _ = engine.ask(ASKED, transfer=NAMED, salt=DERIVED)
        assert mended != said, "nothing is computed again, so that the caches differ"
        assert engine.ask(ASKED, transfer=NAMED)[0] == said  # no salt: vLLM's own blocks of it are exact
        salted = f"{DERIVED}:tenant"
        assert engine.ask(ASKED, transfer=NAMED, salt=salted)[0] == said, "these documents are not this tenant's"
        assert engine.counted["vllm:kvstore_mends"] == 1
    with Engine(models["llama"], durable.address, **nothing_again) as engine:
        found, cached = engine.ask(ASKED)
        assert (found, cached) == (said, [320])  # what the request without a salt had computed
        assert engine.ask(ASKED, salt="tenant") == (said, [0])
        remembered(engine, ONE, TWO, salt="tenant2")
        assert engine.ask(ASKED, transfer=NAMED, salt=f"{DERIVED}:tenant2") == (mended, [320])
        assert engine.ask(PREAMBLE + ONE + TWO)[0] == of_tenant
        assert engine.counted["vllm:kvstore_mends"] == 1


def test_a_prompt_that_cannot_be_mended_is_computed(models: dict[str, Path], durable: Sidecar) -> None:
    documents = prompt(150, 15), prompt(131, 16)
    asked = PREAMBLE + documents[0] + documents[1] + QUESTION
    named = {"kvstore_documents": [(40, 190), (190, 321)], "kvstore_preamble": 40}
    with Engine(models["llama"], None, enable_prefix_caching=False) as plain:
        said, _ = plain.ask(asked)
    breaking = {"kv_connector": "BreakingMender", "kv_connector_module_path": "tests.vllm.breaking"}
    by_parts = {"max_num_batched_tokens": 512, "long_prefill_token_threshold": 64}
    with Engine(models["llama"], durable.address, connector=breaking, **by_parts, **extra()) as engine:
        remembered(engine, *documents)
        assert engine.ask(asked, transfer=named, salt=DERIVED)[0] == said
        assert engine.counted["vllm:kvstore_failed_mends"] == 1
        assert engine.ask(asked, transfer=named, salt=DERIVED)[0] == said  # of the blocks that were computed
        # What vLLM computes of the first one takes it many steps, and the others have its blocks.
        assert engine.ask(*[asked] * 3, transfer=named, salt=f"{DERIVED}:")[0] == said * 3
        durable.stop(kill=True)
        assert engine.ask(asked, transfer=named, salt=f"{DERIVED}:other")[0] == said
        durable.start()
        for wrong in ([[0, 400]], "no list", [[50, 40]], [[20, 50]]):
            again = {"kvstore_documents": wrong, "kvstore_preamble": 40}
            assert engine.ask(asked, transfer=again, salt=f"{DERIVED}:{wrong}")[0] == said
        assert "neither kept nor reused" in engine.log()


def test_engines_whose_layers_are_not_whole_are_refused(models: dict[str, Path], durable: Sidecar) -> None:
    refused = {"extra": {"recompute": {}}, **SYNCHRONOUS}
    with pytest.raises(RuntimeError, match="several block tables, or windows"):
        Engine(models["gemma"], durable.address, **refused).__enter__()
    with pytest.raises(RuntimeError, match="several block tables, or windows"):
        Engine(models["gemma"], durable.address, disable_hybrid_kv_cache_manager=True, **refused).__enter__()
    deeper = {"extra": {"recompute": {"last_layer": 3}}, **SYNCHRONOUS}
    with pytest.raises(RuntimeError, match=r"recompute in kv_connector_extra_config: .* below the model's 3 layers"):
        Engine(models["llama"], durable.address, **deeper).__enter__()
    with pytest.raises(RuntimeError, match=r"Glm\w+ has no runner"):
        Engine(models["glm"], durable.address, **refused).__enter__()
    turned = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}
    with pytest.raises(RuntimeError, match="rope kind 'dynamic' cannot be moved"):
        Engine(models["llama"], durable.address, hf_overrides=turned, **refused).__enter__()
