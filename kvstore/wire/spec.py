"""ModelSpec <-> its message."""

from __future__ import annotations

from kvstore.errors import InvalidRequest
from kvstore.spec import LayerKind, LayerSpec, ModelSpec, RopeSpec
from kvstore.v1 import cache_pb2 as pb

_KINDS = (LayerKind.FULL, LayerKind.SLIDING_WINDOW, LayerKind.RECURRENT, LayerKind.CROSS, LayerKind.NONE)


def spec_to_message(spec: ModelSpec) -> pb.ModelSpec:
    """The spec as a message."""
    return pb.ModelSpec(
        model_id=spec.model_id,
        weights_digest=spec.weights_digest,
        adapter_id=spec.adapter_id,
        layers=[
            pb.LayerSpec(
                kind=_KINDS.index(layer.kind) + 1,  # type: ignore[arg-type]  # enum numbers are plain ints at run time
                kv_heads=layer.kv_heads,
                k_dim=layer.k_dim,
                v_dim=layer.v_dim,
                window=layer.window,
                group=layer.group,
            )
            for layer in spec.layers
        ],
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        cache_dtype=spec.cache_dtype,
        hidden_dtype=spec.hidden_dtype,
        rope=pb.RopeSpec(
            theta=spec.rope.theta,
            kind=spec.rope.kind,
            rotary_dim=spec.rope.rotary_dim,
            factors=[pb.RopeFactor(name=name, value=value) for name, value in spec.rope.factors],
            mrope=spec.rope.mrope,
        ),
        chunk_tokens=spec.chunk_tokens,
        mla=spec.mla,
        scales=[pb.LayerScales(k=k, v=v) for k, v in spec.scales],
        keeps_e=spec.keeps_e,
        tokenizer_digest=spec.tokenizer_digest,
    )


def spec_from_message(message: pb.ModelSpec) -> ModelSpec:
    """The message as a validated spec. Raises InvalidRequest naming the field that is wrong."""
    for layer in message.layers:
        if not 1 <= layer.kind <= len(_KINDS):
            raise InvalidRequest(f"layer kind {layer.kind} is unknown to this version")
    return ModelSpec(
        model_id=message.model_id,
        weights_digest=message.weights_digest,
        adapter_id=message.adapter_id,
        layers=tuple(
            LayerSpec(
                kind=_KINDS[layer.kind - 1],
                kv_heads=layer.kv_heads,
                k_dim=layer.k_dim,
                v_dim=layer.v_dim,
                window=layer.window,
                group=layer.group,
            )
            for layer in message.layers
        ),
        hidden_size=message.hidden_size,
        vocab_size=message.vocab_size,
        cache_dtype=message.cache_dtype,
        hidden_dtype=message.hidden_dtype,
        rope=RopeSpec(
            theta=message.rope.theta,
            kind=message.rope.kind,
            rotary_dim=message.rope.rotary_dim,
            factors=tuple((factor.name, factor.value) for factor in message.rope.factors),
            mrope=tuple(message.rope.mrope),
        ),
        chunk_tokens=message.chunk_tokens,
        mla=message.mla,
        scales=tuple((scales.k, scales.v) for scales in message.scales),
        keeps_e=message.keeps_e,
        tokenizer_digest=message.tokenizer_digest,
    )
