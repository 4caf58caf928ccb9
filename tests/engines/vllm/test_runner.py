"""vLLM's own modules one layer at a time, beside transformers' model of the same weights."""

from __future__ import annotations

import pytest
import torch
from kvstore_client import Recompute, connect
from kvstore_client.engines.transformers import TransformersRunner
from kvstore_client.engines.vllm.runner import VllmRunner, model_of
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import InvalidRequest
from tests.engines.vllm.lookalike import LlamaForCausalLM
from tests.recompute.models import model_of as made
from tests.recompute.models import prompt

HEAD, ONE, TWO, QUESTION = (prompt(count, seed).tolist() for count, seed in ((6, 1), (33, 2), (18, 3), (7, 4)))
ASKED = HEAD + TWO + ONE + QUESTION


@pytest.mark.parametrize("family", ["llama-biased-mha", "llama-llama3", "qwen3"])
def test_the_runner_computes_as_transformers_does(sidecar: Sidecar, family: str) -> None:
    theirs = made(family)
    reference = TransformersRunner(theirs, chunk_tokens=16)
    ours = LlamaForCausalLM(theirs)
    assert model_of(ours.model.layers[1].self_attn.attn) is ours
    runner = VllmRunner(ours, reference.spec, torch.device("cpu"))
    with connect(sidecar.address) as client:
        kv = [(torch.randn(each.kv_heads, 33, each.k_dim), torch.randn(each.kv_heads, 33, each.v_dim))
              for each in reference.spec.layers]  # fmt: skip
        client.store_segment(reference.spec, ONE, kv, preamble=HEAD).wait()
        setting = Recompute(0, -1, 0.4, "suffix_attention")
        wanted, found = (
            client.partial_prefill(each, ASKED, segments=[(24, 57)], preamble=HEAD, recompute=setting)
            for each in (reference, runner)
        )
    assert found.plan.reused_token_count == wanted.plan.reused_token_count == 33
    assert torch.allclose(found.logits, wanted.logits, atol=1e-4)
    for one, other in zip(found.kv, wanted.kv, strict=True):
        assert torch.allclose(one[0], other[0], atol=1e-4)
        assert torch.allclose(one[1], other[1], atol=1e-4)


@pytest.mark.parametrize("name", ["do_llama_4_scaling", "dual_chunk_attention_config", "ada_rms_norm_t_cond"])
def test_layers_that_compute_more_than_the_runner_are_refused(name: str) -> None:
    theirs = made("qwen3")
    spec, ours = TransformersRunner(theirs, chunk_tokens=16).spec, LlamaForCausalLM(theirs)
    first = ours.model.layers[0]
    setattr(first if name.startswith("ada") else first.self_attn, name, torch.nn.Linear(1, 1))
    with pytest.raises(InvalidRequest, match="computes its layers in a way that is not known here"):
        VllmRunner(ours, spec, torch.device("cpu"))
