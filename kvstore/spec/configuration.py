"""The part of a transformers configuration that is in a cache's key: every attribute, except those listed here with a
reason.

An unknown attribute counts. So a new one can cost a miss, but never serve another model's bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from blake3 import blake3

from kvstore.errors import InvalidRequest

DOMAIN = b"kvstore/model/2\0"
"""Version 1 was a digest of the state dict alone, without the configuration. A cache under such a name may belong to
another configuration, so it is not found any more."""
UNVERIFIED = "unverified:"
WITHOUT_MEANING = {
    "_name_or_path": "a name; the model's, without its directory, is the spec's model_id",
    "_commit_hash": "says where the files came from, and the weights themselves are digested",
    "architectures": "names classes; which one the model is of is looked at itself",
    "transformers_version": "says who wrote the file",
    "dtype": "says how the weights were saved; those of the model are digested with their dtypes",
    "torch_dtype": "the older name of dtype",
    "use_cache": "whether K and V are kept, not what they are",
    "return_dict": "the form of an output",
    "output_hidden_states": "what is handed back beside the logits",
    "output_attentions": "what is handed back beside the logits",
    "id2label": "names of classes, of models that classify",
    "label2id": "names of classes, of models that classify",
    "problem_type": "the loss of models that classify",
    "initializer_range": "weights are drawn by it before they are trained, and they are digested",
    "attention_dropout": "read while training only, and a model in training is left alone",
    "tie_word_embeddings": "whether two tensors are one; both are digested",
    "bos_token_id": "generation's; the prompt's tokens are in the key",
    "eos_token_id": "generation's; it decides when to stop",
    "pad_token_id": "generation's; prompts with padding are left alone",
}
PLAIN_ROPES = ("default", "linear")
"""Rotations that do not depend on the longest context."""


def described(config: Any) -> str:
    """Return the configuration as canonical JSON: names sorted, 8 and 8.0 alike, None left out. The name of the
    attention kernels is added, because K and V of every layer but the first depend on their rounding.

    Raises: InvalidRequest for a value that is no plain data."""
    found = {name: value for name, value in config.to_dict().items() if name not in WITHOUT_MEANING}
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    if (rope.get("rope_type") or rope.get("type") or "default") in PLAIN_ROPES:
        found.pop("max_position_embeddings", None)  # plain ropes do not read this bound
    found["attention"] = getattr(config, "_attn_implementation", None) or "sdpa"  # transformers' default
    return json.dumps(_plain(found, "config"), sort_keys=True, separators=(",", ":"))


def named(weights: str, configuration: str, beside: Mapping[str, str] | None = None) -> str:
    """Return a spec's weights_digest. ``weights``: a digest of tensors, or 'unverified:<name>'. ``configuration``: from
    ``described``. ``beside``: digests of other inputs that the forward pass reads."""
    told = json.dumps([configuration, dict(beside or {})], sort_keys=True).encode()
    if weights.startswith(UNVERIFIED):
        return f"{weights}/{blake3(DOMAIN + told).hexdigest(16)}"
    return blake3(DOMAIN + weights.encode() + b"\0" + told).hexdigest()


def _plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return int(value) if math.isfinite(value) and value.is_integer() else value
    if isinstance(value, Mapping):
        return {str(name): _plain(each, f"{where}.{name}") for name, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [_plain(each, f"{where}[{index}]") for index, each in enumerate(value)]
    raise InvalidRequest(f"{where} is a {type(value).__name__}, which has no canonical form: a key cannot name it")
