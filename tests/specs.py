"""Specs and caches for tests."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from kvstore.spec import DTYPES, LayerKind, LayerSpec, ModelSpec, RopeSpec

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def small_spec(**changes: Any) -> ModelSpec:
    """Two layers, two heads, 16-token chunks."""
    fields: dict[str, Any] = {
        "model_id": "test",
        "weights_digest": "ab" * 32,
        "layers": (LayerSpec(kv_heads=2, k_dim=8, v_dim=8),) * 2,
        "hidden_size": 32,
        "vocab_size": 1000,
        "cache_dtype": "bfloat16",
        "rope": RopeSpec(rotary_dim=8),
        "chunk_tokens": 16,
    }
    return ModelSpec(**{**fields, **changes})


def read_back(canonical: bytes) -> ModelSpec:
    """The spec of a canonical form: proves that the form says all of it."""
    fields = json.loads(canonical)
    rope = fields["rope"]
    factors = tuple((name, value) for name, value in rope["factors"])
    layers = tuple(LayerSpec(**{**layer, "kind": LayerKind(layer["kind"])}) for layer in fields["layers"])
    scales = tuple((k, v) for k, v in fields["scales"])
    whole = RopeSpec(**{**rope, "factors": factors, "mrope": tuple(rope["mrope"])})
    return ModelSpec(**{**fields, "rope": whole, "layers": layers, "scales": scales})


def odd_spec(dtype: str, kv_heads: int, k_dim: int, v_dim: int, chunk_tokens: int, *, mla: bool = False) -> ModelSpec:
    """A full layer, an absent one and a sliding one (MLA: latents), dims that differ."""
    heads = 1 if mla else kv_heads
    full = LayerSpec(kv_heads=heads, k_dim=k_dim, v_dim=v_dim)
    sliding = LayerSpec(kind=LayerKind.SLIDING_WINDOW, kv_heads=heads, k_dim=k_dim, v_dim=v_dim, window=8)
    absent = LayerSpec(kind=LayerKind.NONE)
    name = f"odd-{heads}-{k_dim}-{v_dim}-{mla}"  # the same weights cannot have two geometries
    return small_spec(
        model_id=name, layers=(full, absent, sliding), cache_dtype=dtype, chunk_tokens=chunk_tokens, mla=mla
    )


def random_cache(spec: ModelSpec, token_count: int, seed: int = 0) -> list[Any]:
    """Per layer (K, V) of random bits as unsigned integers; None where a layer keeps nothing."""
    random = np.random.default_rng(seed)
    dtype = UNSIGNED[DTYPES[spec.cache_dtype]]
    high = np.iinfo(dtype).max

    def plane(heads: int, dim: int) -> Any:
        return random.integers(0, high, (heads, token_count, dim), dtype=dtype, endpoint=True)

    return [
        (plane(layer.kv_heads, layer.k_dim), plane(layer.kv_heads, layer.v_dim)) if layer.has_slab else None
        for layer in spec.layers
    ]


def tokens_of(count: int, seed: int = 0, vocab_size: int = 1000) -> Any:
    return np.random.default_rng(seed).integers(0, vocab_size, count, dtype=np.uint32)


def bits(value: Any) -> Any:
    """Any array or tensor as unsigned integers."""
    if not isinstance(value, np.ndarray):
        import torch

        signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[value.element_size()]
        value = value.contiguous().view(signed).numpy()
    return value.view(UNSIGNED[value.itemsize])


def same(found: Any, cache: Any) -> bool:
    """True when all layers of what was found have the cache's bits."""
    return all(
        np.array_equal(bits(got), bits(put))
        for pair, own in zip(found, cache, strict=True)
        for got, put in zip(pair, own, strict=True)
    )
