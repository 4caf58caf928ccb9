"""The spec of a Hugging Face model: geometry from its config, identity from a digest of its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from kvstore.errors import InvalidRequest
from kvstore.spec.configuration import UNVERIFIED, described, named
from kvstore.spec.model import LayerKind, LayerSpec, ModelSpec, RopeSpec, check_digest

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def spec_from_transformers(
    config: Any, weights: Any, chunk_tokens: int, adapter_id: str, keeps_e: bool, tokenizer: Any, dtype: str = ""
) -> ModelSpec:
    """See ``ModelSpec.from_transformers``. ``dtype``: the model's dtype, where ``weights`` does not tell it.
    Raises InvalidRequest for a family this release does not know."""
    if config.model_type not in FAMILIES:
        raise InvalidRequest(f"model_type {config.model_type!r} has no spec yet; known: {', '.join(FAMILIES)}")
    if not getattr(config, "is_causal", True):  # transformers then takes the mask away, of a decoder, too
        raise InvalidRequest(
            "config.is_causal is False: every token sees all others, so that K and V of a prompt's beginning depend on "
            "its end and no other prompt shares them. Set it to True, or call the model itself"
        )
    dtype = dtype or _dtype_of(config, weights)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = rope_of(config, head_dim)
    if rope.kind == "default":
        rope = replace(rope, rotary_dim=head_dim)  # plain rotation in these families ignores the partial factor
    return ModelSpec(
        model_id=Path(config.name_or_path).name or config.model_type,
        weights_digest=_identity(config, weights),
        layers=_layers_of(config, head_dim),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        cache_dtype=dtype,
        hidden_dtype=dtype,
        rope=rope,
        chunk_tokens=chunk_tokens,
        adapter_id=adapter_id,
        keeps_e=keeps_e,
        tokenizer_digest=tokenizer if isinstance(tokenizer, str) else tokenizer_digest(tokenizer) if tokenizer else "",
    )


def _layers_of(config: Any, head_dim: int) -> tuple[LayerSpec, ...]:
    """Return one spec per layer. Mistral has a window on all layers or none; Qwen's configuration says it per layer."""
    kv_heads, window = config.num_key_value_heads, getattr(config, "sliding_window", None)
    count = int(config.num_hidden_layers)
    full = LayerSpec(kv_heads=kv_heads, k_dim=head_dim, v_dim=head_dim)
    if not window or config.model_type == "llama":  # Llama's forward pass ignores the window
        return (full,) * count
    narrow = LayerSpec(kind=LayerKind.SLIDING_WINDOW, kv_heads=kv_heads, k_dim=head_dim, v_dim=head_dim, window=window)
    if config.model_type == "mistral":
        return (narrow,) * count
    return tuple(narrow if kind == "sliding_attention" else full for kind in config.layer_types)


def _dtype_of(config: Any, weights: Any) -> str:
    found = getattr(weights, "dtype", None) or getattr(config, "dtype", None)
    if found is None:
        raise InvalidRequest("the model's dtype is unknown: set config.dtype, or pass the model as weights")
    return str(found).removeprefix("torch.")


def rope_of(config: Any, head_dim: int) -> RopeSpec:
    parameters: Mapping[str, Any] = (
        getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    )
    theta: Any = parameters.get("rope_theta") or getattr(config, "rope_theta", 10000.0)
    partial = parameters.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    factors = sorted(
        (name, float(value))
        for name, value in parameters.items()
        if isinstance(value, int | float) and name not in ("rope_theta", "partial_rotary_factor")
    )
    return RopeSpec(
        theta=float(theta),
        kind=str(parameters.get("rope_type") or parameters.get("type") or "default"),
        rotary_dim=int(head_dim * partial),
        factors=tuple(factors),
    )


def tokenizer_digest(tokenizer: Any) -> str:
    """BLAKE3 over everything that decides the tokens of a text. For a tokenizer that the tokenizers library runs (all
    fast ones) that is its whole definition, without the last padding and truncation options; for another, its class,
    vocabulary and special tokens. Raises: InvalidRequest for an object that is no tokenizer."""
    definition = getattr(getattr(tokenizer, "backend_tokenizer", tokenizer), "to_str", None)
    if definition is not None:
        found = {name: part for name, part in json.loads(definition()).items() if name not in ("padding", "truncation")}
    elif hasattr(tokenizer, "get_vocab"):
        special = {name: str(token) for name, token in getattr(tokenizer, "special_tokens_map", {}).items()}
        found = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab(), "special": special}
    else:
        raise InvalidRequest(
            f"tokenizer is a {type(tokenizer).__name__}: give a transformers or tokenizers tokenizer, or its digest"
        )
    hasher = blake3(b"kvstore/tokenizer/1\0")
    hasher.update(json.dumps(found, sort_keys=True, separators=(",", ":")).encode())
    return hasher.hexdigest()


def weights_digest(weights: Any) -> str:
    """BLAKE3 over every tensor of a state dict, or of a model's: name, dtype, shape, bytes.
    ``ModelSpec.from_transformers`` takes it in place of weights; the spec's own digest includes the configuration, too.
    Cost: about 4 GB/s per core. Raises: InvalidRequest for a tensor without bytes."""
    from kvstore.spec.weights import digested

    return digested(weights if isinstance(weights, Mapping) else weights.state_dict()).digest


def _identity(config: Any, weights: Any) -> str:
    if isinstance(weights, str):
        check_digest(weights)
        return named(weights, described(config))
    if isinstance(weights, Mapping):
        return named(weights_digest(weights), described(config))
    if described(config) != described(weights.config):
        raise InvalidRequest("config is not the model's: give model.config, by which its weights are computed")
    from kvstore.spec.live import identity_of

    return identity_of(weights).digest


def refreshed(spec: ModelSpec, model: Any) -> ModelSpec:
    """See ``ModelSpec.refreshed``."""
    from kvstore.spec.live import identity_of

    if spec.weights_digest.startswith(UNVERIFIED):
        raise InvalidRequest(
            f"weights_digest {spec.weights_digest[:80]!r} is a name that somebody vouches for: no bytes of the "
            "weights are in it. Give other weights another name"
        )
    return replace(spec, weights_digest=identity_of(model, anew=True).digest)
