"""Prompts drawn at random, of models whose rotation or attention is unusual: recompute is the reference there, too.

What is chosen by a measured score is left to `test_fused`: of many random scenes some have two tokens alike."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

import pytest
from kvstore_client.engines.transformers import TransformersRunner

from kvstore.planning import Recompute
from tests.recompute.models import LAYERS, YARN, model_of, prompt, sibling_of
from tests.recompute.scenes import Part, Scene, check, computed, decoder_of

PLAIN = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0, "partial_rotary_factor": 0.25}
ODD: dict[str, tuple[str, dict[str, Any]]] = {
    "half-of-the-dims-by-yarn": ("llama", {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}, "head_dim": 16}),
    "a-quarter-of-the-dims": ("llama", {"rope_parameters": LINEAR, "head_dim": 16}),
    "a-factor-that-nobody-reads": ("llama", {"rope_parameters": PLAIN, "head_dim": 16}),
    "a-window-of-one": ("mistral-window", {"sliding_window": 1}),
    "one-kv-head-and-a-wide-window": ("mistral-window", {"sliding_window": 131, "num_key_value_heads": 1}),
}


@lru_cache
def runners(name: str) -> tuple[Any, TransformersRunner, TransformersRunner]:
    family, more = ODD[name]
    model = model_of(family, **more)
    return decoder_of(model), TransformersRunner(model), TransformersRunner(sibling_of(model, 7))


def drawn(draw: random.Random, name: str, seed: int) -> Scene:
    """An exact prefix or none, then up to four runs of the model's own or of its sibling's, from anywhere."""
    decoder, runner, sibling = runners(name)
    tokens, parts, place = prompt(draw.choice((40, 160, 540)), seed), list[Part](), draw.choice((0, 0, 17))
    if place:
        parts.append(Part(0, computed(runner, tokens[:place]), 0, None, is_exact=True))
    for _ in range(draw.randint(1, 4)):
        start = place + draw.choice((0, 0, 1, 3))
        stop = min(start + draw.choice((1, 5, 40, 300)), len(tokens) - 1)
        if start >= stop:
            break
        maker, ahead = draw.choice((runner, sibling)), draw.choice((0, 0, 5, start, 33))
        sender = None if maker is runner else sibling.spec
        parts.append(Part(start, computed(maker, tokens[start:stop], ahead), ahead, sender))
        place = stop
    return Scene(runner, decoder, tokens, tuple(parts), draw.randint(1, len(tokens) - place))


@pytest.mark.parametrize("name", ODD)
def test_any_prompt_of_an_odd_model_is_merged_and_mended_as_the_reference_does(name: str) -> None:
    for seed in range(12):
        draw = random.Random(f"{name} {seed}")
        scene, first = drawn(draw, name, seed), draw.choice((0, 0, 1, 2, 3))
        ratio = draw.choice((0.0, 0.0, 0.3, 0.9, 1.0))
        setting = Recompute(
            first, draw.randint(first - 1, LAYERS - 1), ratio, "first", gradual=draw.choice((0.0, 0.0, 0.4))
        )
        check(scene, setting)
