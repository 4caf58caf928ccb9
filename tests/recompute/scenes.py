"""Prompts with caches for their parts, given to the code under test and to the reference alike."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from kvstore_client.engines.transformers import TransformersRunner
from kvstore_client.recompute import GivenKV, Recomputed, Run, recompute

from kvstore.planning import Recompute
from tests.recompute import reference
from tests.recompute.models import LAYERS, model_of, prompt, sibling_of

TOLERANCE = 3e-4
"""Of the largest value: fp32 through four layers, and angles that the model rounds to fp32."""


@dataclass(frozen=True)
class Part:
    """A run of a scene: its tokens' place in the prompt, and its cache as the runner computed it."""

    start: int
    made: Recomputed
    rotated_from: int
    sender: Any
    is_exact: bool = False


@dataclass(frozen=True)
class Scene:
    runner: TransformersRunner
    decoder: reference.Decoder
    tokens: torch.Tensor
    parts: tuple[Part, ...]
    suffix_count: int

    def runs(self, first_layer: int) -> list[Run]:
        return [
            Run(
                part.start,
                part.made.kv[0][0].shape[1],
                GivenKV(part.made.kv, part.made.hidden.get(first_layer)),
                part.rotated_from,
                part.sender,
                part.is_exact,
            )
            for part in self.parts
        ]

    def cached(self, first_layer: int) -> list[reference.Cached]:
        def wide(x: torch.Tensor) -> Any:
            return x.double().numpy()

        return [
            reference.Cached(
                part.start,
                [(wide(k), wide(v)) for k, v in part.made.kv],
                part.rotated_from,
                wide(part.made.hidden[first_layer]) if first_layer else None,
                part.is_exact,
            )
            for part in self.parts
        ]


def decoder_of(model: Any) -> reference.Decoder:
    config = model.config.to_dict()
    state = {name: tensor.detach().double().numpy() for name, tensor in model.state_dict().items()}
    if config.get("tie_word_embeddings"):
        state.pop("lm_head.weight", None)
    windows = [0] * LAYERS
    if config.get("sliding_window"):
        kinds = config.get("layer_types") or ["sliding_attention"] * LAYERS
        windows = [config["sliding_window"] if kind == "sliding_attention" else 0 for kind in kinds]
    return reference.Decoder(state, config, windows)


def computed(runner: TransformersRunner, tokens: torch.Tensor, ahead: int = 0) -> Recomputed:
    """The cache and E of tokens that are computed ``ahead`` tokens from the beginning, of which they saw others."""
    before = prompt(ahead, 900 + ahead)
    made = recompute(runner, torch.cat((before, tokens)), [], Recompute.full(LAYERS), hidden_layers=range(LAYERS))
    return Recomputed(
        [(k[:, ahead:], v[:, ahead:]) for k, v in made.kv], made.logits, made.exactness, made.share, made.timeline,
        hidden={layer: hidden[ahead:] for layer, hidden in made.hidden.items()},
    )  # fmt: skip


@lru_cache
def documents(family: str, sibling: bool = False) -> Scene:
    """Two documents in the other order than they were computed in, one of them begun at position 5; between them three
    tokens that nobody has seen; with ``sibling`` a sender's cache. A suffix of nine tokens."""
    model = model_of(family)
    runner = TransformersRunner(model)
    sender = TransformersRunner(sibling_of(model, 7)) if sibling else None
    tokens = prompt(55, 11)
    parts = (
        Part(0, computed(sender or runner, tokens[:20], 5), 5, sender and sender.spec),
        Part(23, computed(sender or runner, tokens[23:46]), 0, sender and sender.spec),
    )
    return Scene(runner, decoder_of(model), tokens, parts, 9)


@lru_cache
def prefix(family: str) -> Scene:
    """An exact prefix, then a document that was computed alone, then a suffix."""
    runner = TransformersRunner(model_of(family))
    tokens = prompt(50, 12)
    parts = (
        Part(0, computed(runner, tokens[:16]), 0, None, is_exact=True),
        Part(16, computed(runner, tokens[16:42]), 0, None),
    )
    return Scene(runner, decoder_of(model_of(family)), tokens, parts, 8)


def poisoned(scene: Scene) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Memory to merge in, in which what nobody wrote is NaN."""
    layers, count = scene.runner.spec.layers, len(scene.tokens)
    return [
        tuple(torch.full((layer.kv_heads, count, dim), torch.nan) for dim in (layer.k_dim, layer.v_dim))  # type: ignore[misc]
        for layer in layers
    ]


def check(scene: Scene, setting: Recompute) -> Recomputed:
    """Recompute is the reference: every layer's cache, the suffix's logits, and which tokens were chosen."""
    first = setting.first_layer if setting.needs_hidden else 0
    found = recompute(
        scene.runner, scene.tokens, scene.runs(first), setting, logit_count=scene.suffix_count, kv=poisoned(scene)
    )
    with np.errstate(invalid="ignore"):
        expected = reference.fused(
            scene.decoder, scene.tokens.numpy(), scene.cached(first), **vars(setting_of(setting))
        )
    assert {layer: rows.tolist() for layer, rows in found.chosen.items()} == expected.chosen
    planes = [(found.logits, expected.logits[-scene.suffix_count :])]
    for ours, theirs in zip(found.kv, expected.kv, strict=True):
        planes += zip(ours, theirs, strict=True)
    for ours, theirs in planes:
        error = np.abs(ours.double().numpy() - theirs)
        assert not np.isnan(error).any()
        assert error.max() <= TOLERANCE * np.abs(theirs).max()
    return found


def setting_of(setting: Recompute) -> Any:
    """The reference's names."""
    from types import SimpleNamespace

    fields = dict(vars(setting))
    return SimpleNamespace(first=fields.pop("first_layer"), last=fields.pop("last_layer"), **fields)
