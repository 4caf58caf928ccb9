"""What the crash tests store. A cache is a function of the model and of all tokens before each place, so that
whoever fetches it knows every bit without having kept it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from kvstore.spec import LayerKind, LayerSpec, ModelSpec, RopeSpec
from tests.specs import UNSIGNED, bits, small_spec

TOKENS_MAX = 640


@dataclass(frozen=True)
class Model:
    """A spec, which hidden states are stored with its cache, and how long its contexts get, in chunks."""

    spec: ModelSpec
    hidden_layers: tuple[int, ...]
    chunk_count_max: int
    tails: tuple[int, ...]
    """Token counts of the partial chunks: few, so that they need few slot sizes."""


def _wide() -> ModelSpec:
    return small_spec(
        model_id="wide", layers=(LayerSpec(kv_heads=4, k_dim=64, v_dim=64),) * 3, hidden_size=128, chunk_tokens=64,
        rope=RopeSpec(rotary_dim=64),
    )  # fmt: skip


def _sliding() -> ModelSpec:
    full = LayerSpec(kv_heads=2, k_dim=32, v_dim=16)
    window = LayerSpec(kind=LayerKind.SLIDING_WINDOW, kv_heads=2, k_dim=32, v_dim=16, window=8)
    return small_spec(
        model_id="sliding", layers=(full, LayerSpec(kind=LayerKind.NONE), window), cache_dtype="float8_e4m3fn",
        chunk_tokens=32, rope=RopeSpec(rotary_dim=16),
    )  # fmt: skip


MODELS = (
    Model(small_spec(model_id="small"), (1,), 12, (4, 11)),
    Model(_wide(), (), 5, (8, 40)),
    Model(small_spec(model_id="hidden", hidden_size=512, chunk_tokens=32), (0, 1), 6, (20,)),
    Model(_sliding(), (), 8, (5, 30)),
)


@lru_cache
def _pattern(model_id: str, name: str, heads: int, dim: int) -> Any:
    seed = [*f"{model_id}/{name}".encode()]
    return np.random.default_rng(seed).integers(1, 1 << 32, (heads, 1, dim), dtype=np.uint32) | np.uint32(1)


def _history(tokens: Any) -> Any:
    """A number per place that depends on every token up to it."""
    places = np.arange(1, len(tokens) + 1, dtype=np.uint64)
    mixed = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) ^ places << np.uint64(17)
    mixed = np.cumsum(mixed * np.uint64(0xBF58476D1CE4E5B9), dtype=np.uint64)
    return (mixed >> np.uint64(29)).astype(np.uint32)


def _plane(model_id: str, name: str, history: Any, heads: int, dim: int, item_bytes: int) -> Any:
    values = history[None, :, None] * _pattern(model_id, name, heads, dim)
    return (values >> np.uint32(32 - 8 * item_bytes)).astype(UNSIGNED[item_bytes])


def content(model: Model, tokens: Any) -> tuple[list[Any], dict[int, Any]]:
    """The cache of a context, per layer (K, V) as unsigned integers, and its hidden states."""
    spec, history = model.spec, _history(tokens)

    def planes(number: int, layer: LayerSpec) -> Any:
        if not layer.has_slab:
            return None
        sizes = (("k", layer.k_dim), ("v", layer.v_dim))
        return tuple(
            _plane(spec.model_id, f"{name}{number}", history, layer.kv_heads, dim, spec.item_size)
            for name, dim in sizes
        )

    cache = [planes(number, layer) for number, layer in enumerate(spec.layers)]
    hidden = {
        layer: _plane(spec.model_id, f"e{layer}", history, 1, spec.hidden_size, 2)[0] for layer in model.hidden_layers
    }
    return cache, hidden


def is_right(model: Model, tokens: Any, fetched: Any) -> bool:
    """Return True when every bit of what a fetch brought is what was stored."""
    cache, hidden = content(model, tokens[: fetched.token_count])
    wanted = [layer for layer in cache if layer is not None]
    pairs = [
        (one, other) for got, said in zip(fetched, wanted, strict=True) for one, other in zip(got, said, strict=True)
    ]
    pairs += [(fetched.hidden[layer], said) for layer, said in hidden.items()]
    return all(np.array_equal(bits(one), other) for one, other in pairs)
