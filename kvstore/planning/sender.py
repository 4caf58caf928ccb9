"""Senders: sibling models whose caches can stand in for a receiver's."""

from __future__ import annotations

from kvstore.errors import InvalidRequest
from kvstore.spec import ModelSpec


def check_sender(receiver: ModelSpec, sender: ModelSpec) -> None:
    """Check that a sibling's cache can stand in for the receiver's: same architecture and regime, other weights.

    Raises: InvalidRequest naming the first field that differs, and for a sender that keeps E: projecting K and V from
    it needs the sender's own weights.
    """
    if sender.keeps_e:
        raise InvalidRequest(
            f"sender {sender.model_id!r} keeps E in the place of KV (keeps_e), which only its own weights project: "
            "name a spec under which KV of it is stored"
        )
    pairs = [
        (name, getattr(receiver, name), getattr(sender, name))
        for name in (
            "layer_count", "hidden_size", "vocab_size", "tokenizer_digest", "cache_dtype", "hidden_dtype", "mla",
            "scales",
        )
    ]  # fmt: skip
    pairs += [
        (f"layers[{index}].{name}", getattr(ours, name), getattr(theirs, name))
        for index, (ours, theirs) in enumerate(zip(receiver.layers, sender.layers, strict=False))
        for name in ("kind", "kv_heads", "k_dim", "v_dim", "window")
    ]
    pairs += [
        (f"rope.{name}", getattr(receiver.rope, name), getattr(sender.rope, name))
        for name in ("kind", "theta", "rotary_dim", "factors", "mrope")
    ]
    for name, ours, theirs in pairs:
        if ours != theirs:
            raise InvalidRequest(
                f"sender {sender.model_id!r} has {name} {_told(theirs)}, the receiver {_told(ours)}: only models of "
                "one architecture, rope regime and tokenizer share caches"
            )


def _told(value: object) -> str:
    return "unset" if value == "" else f"{value}"
