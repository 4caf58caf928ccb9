"""TransformersRunner: layer by layer, the model's own forward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kvstore_client.engines.transformers import TransformersRunner
from kvstore_client.recompute import GivenKV, Run, recompute
from transformers import GPT2Config, GPT2LMHeadModel, LlamaModel

from kvstore.errors import InvalidRequest
from kvstore.planning import Recompute
from kvstore.spec import Exactness, LayerKind, ModelSpec
from tests.recompute.models import FAMILIES, LAYERS, LLAMA3, model_of, prompt


def in_full(model: Any, tokens: torch.Tensor) -> Any:
    return recompute(
        TransformersRunner(model), tokens, [], Recompute.full(LAYERS), logit_count=len(tokens), hidden_layers=(0, 2)
    )


def check(model: Any, tokens: torch.Tensor, tolerance: float) -> None:
    """Logits, every layer's cache and E are what the model's forward pass gives, in units of their largest value."""
    with torch.no_grad():
        expected = model(tokens[None], output_hidden_states=True)
        cache = model(tokens[None], use_cache=True).past_key_values
    found = in_full(model, tokens)
    pairs = [(found.logits, expected.logits[0])]
    pairs += [(found.hidden[layer], expected.hidden_states[layer][0]) for layer in (0, 2)]
    for layer, (k, v) in enumerate(found.kv):
        kept = cache.layers[layer].keys.shape[-2]  # a windowed layer's cache forgets
        pairs += [(k[:, -kept:], cache.layers[layer].keys[0]), (v[:, -kept:], cache.layers[layer].values[0])]
    for ours, theirs in pairs:
        assert ours.shape == theirs.shape
        assert float((ours - theirs).abs().max() / theirs.abs().max()) <= tolerance
    assert (found.exactness, found.share) == (Exactness.EXACT, 1.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_full_prefill_is_the_models_forward(family: str) -> None:
    check(model_of(family), prompt(41, 1), 2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_any_dtype(dtype: torch.dtype) -> None:
    """PyTorch 2.6's own products of bfloat16 on a CPU are a little further from ours than later ones'."""
    check(model_of("qwen3-windows-yarn", dtype=dtype), prompt(41, 2), 6e-2 if dtype is torch.bfloat16 else 3e-2)


def test_more_rows_than_a_step_has() -> None:
    check(model_of("llama", max_position_embeddings=2048), prompt(1100, 3), 2e-5)


def test_partial_rotation_is_that_of_a_model_whose_other_dims_stand_still() -> None:
    """Half of each head's 8 dims rotate, (0, 2) and (1, 3). The same model with its dims in another order rotates
    (0, 4) and (1, 5) and, at frequency 0, not the others: that one transformers can run."""
    half = {**LLAMA3, "partial_rotary_factor": 0.5}
    partial = model_of("llama", rope_parameters=half)
    whole = model_of("llama")
    whole.load_state_dict(partial.state_dict())
    order = torch.tensor([0, 1, 4, 5, 2, 3, 6, 7])
    with torch.no_grad():
        for block in whole.model.layers:
            for linear in (block.self_attn.q_proj, block.self_attn.k_proj):
                heads = linear.weight.view(-1, 8, linear.weight.shape[1])
                linear.weight.copy_(heads[:, order].flatten(0, 1))
        whole.model.rotary_emb.inv_freq.copy_(torch.cat((partial.model.rotary_emb.inv_freq, torch.zeros(2))))
        expected = whole(prompt(41, 4)[None]).logits[0]
    runner = TransformersRunner(partial)
    assert runner.rotary.rotary_dim == 4
    found = recompute(runner, prompt(41, 4), [], Recompute.full(LAYERS), logit_count=41)
    assert torch.allclose(found.logits, expected, atol=1e-4)


def test_a_table_of_rotations_that_another_thread_replaces_is_not_looked_at_again() -> None:
    """Two threads make theirs at the same time, and the shorter one stays."""

    class Shared(TransformersRunner):
        _table: Any = None

        @property
        def _tables(self) -> Any:
            return self._table

        @_tables.setter
        def _tables(self, made: Any) -> None:
            self._table = made and tuple(each[:16] for each in made)

    model, hidden = model_of("llama"), torch.ones(40, 32)
    expected = TransformersRunner(model).project(0, hidden, torch.arange(40))
    found = Shared(model).project(0, hidden, torch.arange(40))
    assert all(map(torch.equal, found, expected))


def spec_of(family: str) -> ModelSpec:
    model = model_of(family)
    return ModelSpec.from_transformers(model.config, model)


def test_the_spec_knows_windows() -> None:
    def windows(family: str) -> list[int]:
        return [layer.window for layer in spec_of(family).layers]

    assert windows("mistral-window") == [9] * LAYERS
    assert windows("mistral") == [0] * LAYERS
    assert windows("qwen2-windows") == [0, 0, 7, 7]
    assert windows("qwen3") == [0] * LAYERS
    kinds = [layer.kind for layer in spec_of("qwen3-windows-yarn").layers]
    assert kinds == [LayerKind.FULL] * 2 + [LayerKind.SLIDING_WINDOW] * 2


def test_what_it_hands_back_is_the_callers() -> None:
    found = in_full(model_of("llama"), prompt(9, 5))
    found.kv[0][0][:] = 0
    found.kv[0][0].requires_grad_()
    found.logits.div_(2)
    runner = TransformersRunner(model_of("llama"))
    recompute(runner, prompt(9, 5), [], Recompute.full(LAYERS), hidden_layers=[1]).hidden[1].div_(2)


def test_a_model_without_a_runner_is_named() -> None:
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=16)
    with pytest.raises(InvalidRequest, match=r"gpt2.*no runner"):
        TransformersRunner(GPT2LMHeadModel(config))
    with pytest.raises(InvalidRequest, match="no runner"):
        TransformersRunner(LlamaModel(model_of("llama").config))
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(InvalidRequest, match="dynamic"):
        TransformersRunner(model_of("llama", rope_parameters=dynamic))


def test_a_model_cast_to_half_moves_keys_by_the_frequencies_it_has_left() -> None:
    """Those of Llama 3's slowest pairs are below what float16 has at full precision."""
    rope = {**LLAMA3, "rope_theta": 500000.0, "factor": 32.0, "original_max_position_embeddings": 8192}
    model = model_of("llama-llama3", dtype=torch.float16, head_dim=64, rope_parameters=rope)
    runner, tokens = TransformersRunner(model), prompt(40, 6)
    alone, there = in_full(model, tokens[10:30]), in_full(model, tokens)
    moved = recompute(runner, tokens, [Run(10, 20, GivenKV(alone.kv))], Recompute.reuse())
    assert torch.allclose(moved.kv[0][0].float(), there.kv[0][0].float(), atol=2e-2)


def test_another_models_spec_is_refused() -> None:
    other = TransformersRunner(model_of("llama-llama3")).spec
    with pytest.raises(InvalidRequest, match=r"spec\.rope"):
        TransformersRunner(model_of("llama", head_dim=16), spec=other)
    with pytest.raises(InvalidRequest, match="kv_heads"):
        TransformersRunner(model_of("llama-llama3", num_key_value_heads=4), spec=other)
    with pytest.raises(InvalidRequest, match="cache_dtype"):
        TransformersRunner(model_of("llama-llama3", dtype=torch.bfloat16), spec=other)


def test_nothing_is_computed_under_autocast() -> None:
    """It failed with an error of torch's."""
    runner = TransformersRunner(model_of("llama", 3))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InvalidRequest, match="autocast is on"):
        recompute(runner, prompt(9, 2), [], Recompute.full(LAYERS))
    assert recompute(runner, prompt(9, 2), [], Recompute.full(LAYERS)).exactness is Exactness.EXACT
