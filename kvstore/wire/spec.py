"""Converts a ModelSpec to its message and back."""

from __future__ import annotations

from typing import Any

from kvstore.errors import InvalidRequest
from kvstore.spec import LayerKind, LayerSpec, ModelSpec, RopeSpec
from kvstore.v1 import cache_pb2 as pb

_KINDS = (LayerKind.FULL, LayerKind.SLIDING_WINDOW, LayerKind.RECURRENT, LayerKind.CROSS, LayerKind.NONE)
_LAYER = ("kv_heads", "k_dim", "v_dim", "window", "group")
_ROPE = ("theta", "kind", "rotary_dim")
_SPEC = (
    "model_id", "weights_digest", "adapter_id", "hidden_size", "vocab_size", "cache_dtype", "hidden_dtype",
    "chunk_tokens", "mla", "keeps_e", "tokenizer_digest",
)  # fmt: skip
"""The fields that hold one number or text, and have the same name in the value and in the message."""


def _plain(found: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(found, name) for name in names}


def spec_to_message(spec: ModelSpec) -> pb.ModelSpec:
    """Return the spec as a message."""
    factors = [pb.RopeFactor(name=name, value=value) for name, value in spec.rope.factors]
    return pb.ModelSpec(
        **_plain(spec, _SPEC),
        layers=[pb.LayerSpec(kind=_KINDS.index(each.kind) + 1, **_plain(each, _LAYER)) for each in spec.layers],  # type: ignore[arg-type]  # enum numbers are plain ints at run time
        rope=pb.RopeSpec(**_plain(spec.rope, _ROPE), factors=factors, mrope=spec.rope.mrope),
        scales=[pb.LayerScales(k=k, v=v) for k, v in spec.scales],
    )


def spec_from_message(message: pb.ModelSpec) -> ModelSpec:
    """Return the message as a validated spec. Raises InvalidRequest naming the field that is wrong."""
    for layer in message.layers:
        if not 1 <= layer.kind <= len(_KINDS):
            raise InvalidRequest(f"layer kind {layer.kind} is unknown to this version")
    rope = message.rope
    factors = tuple((factor.name, factor.value) for factor in rope.factors)
    return ModelSpec(
        **_plain(message, _SPEC),
        layers=tuple(LayerSpec(kind=_KINDS[each.kind - 1], **_plain(each, _LAYER)) for each in message.layers),
        rope=RopeSpec(**_plain(rope, _ROPE), factors=factors, mrope=tuple(rope.mrope)),
        scales=tuple((scales.k, scales.v) for scales in message.scales),
    )
