"""A live transformers model and its spec: compared with the model, and updated when the model changes."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any, Protocol

import torch

from kvstore.errors import InvalidRequest
from kvstore.spec import ModelSpec
from kvstore.spec.configuration import UNVERIFIED
from kvstore.spec.from_transformers import spec_from_transformers
from kvstore.spec.live import identity_of

CHUNK_TOKENS = 256
_log = logging.getLogger("kvstore.client")


class CausalModel(Protocol):
    """A causal language model of transformers, as far as it is used here. ``config`` has the fields of its family.
    transformers ships no types."""

    config: Any
    generation_config: object
    base_model: Any
    dtype: torch.dtype
    device: torch.device
    training: bool

    def __call__(self, **inputs: object) -> Any: ...

    def modules(self) -> Iterable[torch.nn.Module]: ...

    def generate(self, input_ids: torch.Tensor, **options: object) -> Any: ...


def spec_and_steps(
    model: CausalModel, spec: ModelSpec | None, chunk_tokens: int | None, step_tokens: int | None
) -> tuple[ModelSpec, int]:
    """Return the model's spec, the given one where there is one, and the rows per prefill step, by default those of a
    chunk. Raises: InvalidRequest naming what does not fit the model, or the rest."""
    if not hasattr(model, "generation_config"):
        raise InvalidRequest(f"a {type(model).__name__} cannot generate: load one by AutoModelForCausalLM")
    if spec is None:
        chunk_tokens = CHUNK_TOKENS if chunk_tokens is None else chunk_tokens
        spec = ModelSpec.from_transformers(model.config, model, chunk_tokens)
    elif not isinstance(spec, ModelSpec):
        raise InvalidRequest(f"spec is a {type(spec).__name__}: give ModelSpec.from_transformers(model.config, model)")
    else:
        check_spec(spec, model)
    if chunk_tokens not in (None, spec.chunk_tokens):
        raise InvalidRequest(f"chunk_tokens {chunk_tokens} is not spec.chunk_tokens {spec.chunk_tokens}: give one")
    rows = spec.chunk_tokens if step_tokens is None else step_tokens
    if not isinstance(rows, int) or rows < 1 or rows % spec.chunk_tokens:
        raise InvalidRequest(f"step_tokens {rows!r:.40} must be a multiple of chunk_tokens {spec.chunk_tokens}")
    return spec, rows


def own_spec(model: CausalModel, like: ModelSpec) -> ModelSpec:
    """Return the model's spec, with the free choices of ``like``: name, chunk size, adapter's name, tokenizer and form.
    Where ``like`` is unverified, the result is too: nobody looks at the weights."""
    is_vouched = like.weights_digest.startswith(UNVERIFIED)
    own = spec_from_transformers(
        model.config, f"{UNVERIFIED}own" if is_vouched else model, like.chunk_tokens, like.adapter_id, like.keeps_e,
        like.tokenizer_digest, str(model.dtype).removeprefix("torch."),
    )  # fmt: skip
    digest = like.weights_digest if is_vouched else own.weights_digest
    return replace(own, model_id=like.model_id, weights_digest=digest)


def check_spec(spec: ModelSpec, model: CausalModel) -> None:
    """Raise InvalidRequest when the spec is not this model's, naming what differs in the spec and in the model."""
    own = own_spec(model, spec)
    wrong = [each.name for each in fields(ModelSpec) if getattr(spec, each.name) != getattr(own, each.name)]
    for name in sorted(wrong, key=lambda name: name == "weights_digest"):  # last: it differs whenever anything does
        ours, theirs = getattr(spec, name), getattr(own, name)
        if name == "layers" and len(ours) == len(theirs):
            index = next(index for index, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
            name, ours, theirs = f"layers[{index}]", ours[index], theirs[index]
        raise InvalidRequest(
            f"spec.{name} is {_told(ours)} in the spec and {_told(theirs)} in the model, which would take another "
            "model's cache for its own. Give ModelSpec.from_transformers(model.config, model), or its refreshed(model)"
        )


def _told(value: object) -> str:
    return f"{value!r:.400}" if not isinstance(value, tuple) else f"{len(value)} of them"


def is_of(spec: ModelSpec, model: CausalModel) -> bool:
    """Return True when the spec still names the model's weights, as far as a check of under a millisecond can tell. Of
    an unverified spec only the dtype is compared: its maker vouches for the rest. Raises InvalidRequest for a model
    that no key can name any more."""
    if spec.weights_digest.startswith(UNVERIFIED):
        return spec.cache_dtype == str(model.dtype).removeprefix("torch.")
    return identity_of(model).digest == spec.weights_digest


ActingAdapters = tuple[tuple[bool, tuple[str, ...]], ...]
"""By layer with adapters of PEFT, whether they are off, and which ones are active."""


def adapters_of(model: CausalModel) -> ActingAdapters:
    """Return which of the model's adapters act. A vouched name says nothing of them."""
    layers: list[Any] = [
        each for each in model.modules() if isinstance(getattr(type(each), "disable_adapters", None), property)
    ]
    return tuple((bool(each.disable_adapters), tuple(each.active_adapters)) for each in layers)


def followed(spec: ModelSpec, model: CausalModel, adapters: ActingAdapters) -> ModelSpec:
    """Return the spec of the model as it is now. ``adapters``: those that acted when somebody vouched for it. Cost:
    reads all weights when some changed. Raises: InvalidRequest for a model that no key can name any more."""
    is_vouched = spec.weights_digest.startswith(UNVERIFIED)
    if is_vouched and adapters_of(model) != adapters:
        raise InvalidRequest(
            f"other adapters act than when {spec.weights_digest[:80]!r} vouched for the model: switch them back, or "
            "make a CachedModel with a spec of another name for them"
        )
    if is_of(spec, model):
        return spec
    if is_vouched:
        raise InvalidRequest(f"the model is {model.dtype} now, the spec's cache is {spec.cache_dtype}")
    found = own_spec(model, spec)
    _log.info("kvstore: the model has changed: its caches are %s's now", found.weights_digest[:16])
    return found
