"""Rotation: the frequencies are transformers', and a key that moved is the key that was computed there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kvstore_kernels.rotary import Rotary, rotary_of, rotate, rotation
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.glm.modeling_glm import GlmConfig, GlmRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kvstore.errors import InvalidRequest
from kvstore.spec import RopeSpec
from kvstore.spec.from_transformers import rope_of
from tests.kernels.reference import DIMS, DTYPES, HEADS, TOKENS, close, plane, rotated, wide

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 4096}
REGIMES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "default", "rope_theta": 1000000},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0, "partial_rotary_factor": 0.4},
    LLAMA3,
    {**LLAMA3, "factor": 32.0, "partial_rotary_factor": 0.5},
    YARN,
    {**YARN, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0, "beta_fast": 24.0, "beta_slow": 2.0},
    {**YARN, "attention_factor": 1.25, "partial_rotary_factor": 0.5},
    {**YARN, "truncate": False},
)


def config_of(regime: dict[str, Any], head_dim: int = 80) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, max_position_embeddings=32768,
        rope_parameters=dict(regime),
    )  # fmt: skip


@pytest.mark.parametrize("regime", REGIMES, ids=lambda regime: "-".join(str(value) for value in regime.values()))
@pytest.mark.parametrize("head_dim", [80, 128])
def test_frequencies_and_scaling_are_transformers_to_the_bit(regime: dict[str, Any], head_dim: int) -> None:
    config = config_of(regime, head_dim)
    compute = ROPE_INIT_FUNCTIONS.get(regime["rope_type"], LlamaRotaryEmbedding.compute_default_rope_parameters)
    expected, scaling = compute(config)
    found = rotary_of(rope_of(config, head_dim))
    assert torch.equal(found.frequencies, expected)
    assert found.scaling == scaling


def test_partial_rotary_of_the_default_kind_is_transformers() -> None:
    config = GlmConfig(hidden_size=256, num_attention_heads=4, head_dim=64)
    assert config.rope_parameters["partial_rotary_factor"] == 0.5
    assert torch.equal(rotary_of(rope_of(config, 64)).frequencies, GlmRotaryEmbedding(config).inv_freq)


def test_a_rotation_turns_as_the_model_does() -> None:
    module = LlamaRotaryEmbedding(config_of(YARN, 64))
    rotary = rotary_of(rope_of(module.config, 64))
    positions = torch.tensor([0, 5, 4095, 30000])
    x = plane(4, 4, 64, torch.float32)
    cos, sin = module(x, positions[None])
    expected = apply_rotary_pos_emb(x[None], x[None], cos, sin)[1][0]
    found = rotate(x, rotation(rotary, positions)) * rotary.scaling
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dim", DIMS)
def test_rotate_equals_the_formula(heads: int, dim: int, dtype: torch.dtype) -> None:
    rotary = rotary_of(RopeSpec(rotary_dim=dim if heads % 2 else dim // 2, theta=500.0))
    for tokens in TOKENS:
        x, turns = plane(heads, tokens, dim, dtype, tokens), torch.arange(tokens) + 31
        expected = rotated(wide(x), rotary.frequencies.double().numpy(), turns.numpy())
        close(rotate(x, rotation(rotary, turns)), expected, dtype, 2)
        once = rotated(wide(x), rotary.frequencies.double().numpy(), np.array(-7))
        close(rotate(x, rotation(rotary, -7)), once, dtype, 2)


def test_a_wrong_sign_is_caught() -> None:
    rotary = rotary_of(RopeSpec(rotary_dim=64))
    x = plane(2, 17, 64, torch.float32)
    expected = rotated(wide(x), rotary.frequencies.double().numpy(), np.array(3))
    turn = rotation(rotary, 3)
    close(rotate(x, turn), expected, torch.float32)
    with pytest.raises(AssertionError):
        close(rotate(x, type(turn)(turn.cos, -turn.sin)), expected, torch.float32)


@pytest.mark.parametrize("regime", [REGIMES[0], LLAMA3, YARN], ids=["default", "llama3", "yarn"])
def test_a_key_that_moved_is_the_key_computed_there(regime: dict[str, Any]) -> None:
    """R(p + o) = R(o) R(p), also far from 0, where fp32 angles of the model are coarse."""
    rotary = rotary_of(rope_of(config_of(regime, 128), 128))
    x = plane(2, 257, 128, torch.float32)
    source, target = torch.arange(257), torch.arange(257) + 100_003
    moved = rotate(rotate(x, rotation(rotary, source)), rotation(rotary, target, source))
    torch.testing.assert_close(moved, rotate(x, rotation(rotary, target)), rtol=0, atol=5e-6)


def test_rotating_in_place_equals_rotating_apart() -> None:
    rotary = rotary_of(RopeSpec(rotary_dim=64))
    for dtype in DTYPES:
        x = plane(5, 257, 80, dtype)
        turn = rotation(rotary, torch.arange(257))
        expected = rotate(x, turn)
        assert rotate(x, turn, out=x) is x
        assert torch.equal(x, expected)


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        (RopeSpec(rotary_dim=64, kind="dynamic", factors=(("factor", 2.0),)), "dynamic"),
        (RopeSpec(rotary_dim=64, kind="longrope"), "longrope"),
        (RopeSpec(rotary_dim=64, kind="linear"), "factor"),
        (RopeSpec(rotary_dim=64, kind="linear", factors=(("factor", 0.0),)), "factor"),
        (RopeSpec(rotary_dim=64, kind="yarn", factors=(("factor", 2.0),)), "original_max_position_embeddings"),
        (RopeSpec(rotary_dim=64, mrope=(16, 24, 24)), "mrope"),
        (RopeSpec(), "rotary_dim"),
    ],
)
def test_what_cannot_be_moved_is_refused_by_name(rope: RopeSpec, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        rotary_of(rope)


def test_shapes_that_do_not_fit_are_refused() -> None:
    rotary: Rotary = rotary_of(RopeSpec(rotary_dim=64))
    with pytest.raises(InvalidRequest, match="dims"):
        rotate(plane(1, 3, 32, torch.float32), rotation(rotary, torch.arange(3)))
    with pytest.raises(InvalidRequest, match="tokens"):
        rotate(plane(1, 3, 64, torch.float32), rotation(rotary, torch.arange(4)))
