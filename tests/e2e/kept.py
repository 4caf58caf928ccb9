"""Random models and prompts, and what of them a dict has."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from kvstore_client import Extra

from kvstore.spec import DTYPES, LayerKind, LayerSpec, ModelSpec
from tests.specs import UNSIGNED, random_cache, small_spec, tokens_of

VOCABULARY = 1 << 30
"""No two prompts begin alike by chance."""


@dataclass(eq=False)
class Kept:
    """A prompt in the dict. ``planes``: (K, V) or (E,) of each layer that has a slab, as unsigned integers."""

    spec: ModelSpec
    tokens: Any
    planes: dict[int, tuple[Any, ...]]
    hidden: dict[int, Any] = field(default_factory=dict)
    extras: tuple[Extra, ...] = ()
    is_segment: bool = False

    @property
    def count(self) -> int:
        return int(self.tokens.size)

    @property
    def given(self) -> list[Any]:
        """As ``store`` takes it."""
        given = [self.planes.get(layer) for layer in range(self.spec.layer_count)]
        return [each[0] for each in given] if self.spec.keeps_e else given  # type: ignore[index]

    @property
    def head_count(self) -> int:
        """Heads that every layer has; 0 where they cannot be told apart."""
        spec = self.spec
        if spec.mla or spec.keeps_e:
            return 0
        return min(spec.layers[layer].kv_heads for layer in self.planes)


class Drawn:
    """Models and prompts of any shape, from a seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.numbers = np.random.default_rng(seed)

    def size(self, most: int) -> int:
        """Small ones are as likely as large ones."""
        return max(1, int(most ** self.chance.random()))

    def spec(self, number: int) -> ModelSpec:
        chance, dtype = self.chance, self.chance.choice(sorted(DTYPES))
        shape = chance.choice(["kv", "kv", "kv", "mla", "e"])

        def layer(first: bool) -> LayerSpec:
            if not first and shape != "e" and chance.random() < 0.15:
                return LayerSpec(kind=LayerKind.NONE)
            window = self.size(99) if chance.random() < 0.3 else 0
            kind = LayerKind.SLIDING_WINDOW if window else LayerKind.FULL
            heads = 1 if shape == "mla" else self.size(6)
            return LayerSpec(kind=kind, window=window, kv_heads=heads, k_dim=self.size(130), v_dim=self.size(70))

        layers = tuple(layer(not each) for each in range(self.size(4)))
        hidden_size = self.size(100)
        if shape == "e":  # it must save something
            hidden_size = min(hidden_size, *(each.kv_heads * (each.k_dim + each.v_dim) - 1 for each in layers))
        return small_spec(
            model_id=f"{self.seed}-{number}", layers=layers, weights_digest=self.numbers.bytes(32).hex(),
            vocab_size=VOCABULARY, cache_dtype=dtype, hidden_dtype=dtype, chunk_tokens=self.size(150),
            mla=shape == "mla", keeps_e=shape == "e", hidden_size=hidden_size,
        )  # fmt: skip

    def make(self, number: int, prompts: Sequence[Kept]) -> Kept:
        """A prompt of a new model, or another of a model of ``prompts``, which may begin as one of them."""
        chance = self.chance
        old = chance.choice(prompts) if prompts and chance.random() < 0.4 else None
        spec = old.spec if old else self.spec(number)
        count = self.size(400)
        tokens = tokens_of(count, self.seed * 1000 + number, VOCABULARY)
        planes = self.planes_of(spec, count)
        rows = UNSIGNED[DTYPES[spec.hidden_dtype]]
        hidden: dict[int, Any] = {}
        if not spec.keeps_e and chance.random() < 0.3:
            layer = chance.randrange(spec.layer_count)
            hidden[layer] = self.random((count, spec.hidden_size), rows)
        extras: tuple[Extra, ...] = ()
        if chance.random() < 0.3:
            extras = (Extra(chance.randrange(count), self.numbers.bytes(self.size(40))),)
        made = Kept(spec, tokens, planes, hidden, extras, chance.random() < 0.2)
        if old is not None and chance.random() < 0.6:
            self.begin_as(made, old)
        return made

    def planes_of(self, spec: ModelSpec, count: int) -> dict[int, tuple[Any, ...]]:
        if spec.keeps_e:
            dtype = UNSIGNED[DTYPES[spec.hidden_dtype]]
            return {layer: (self.random((count, spec.hidden_size), dtype),) for layer in range(spec.layer_count)}
        cache = random_cache(spec, count, self.chance.randrange(1 << 30))
        return {layer: pair for layer, pair in enumerate(cache) if pair is not None}

    def random(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Sometimes such as an encoding makes small."""
        high = int(np.iinfo(dtype).max) if self.chance.random() < 0.6 else 3
        return self.numbers.integers(0, high, shape, dtype, endpoint=True)

    def begin_as(self, made: Kept, old: Kept) -> None:
        """The same words in the same place have the same cache."""
        shared = min(self.chance.randint(1, old.count), made.count)
        made.tokens[:shared] = old.tokens[:shared]
        made.extras = tuple(extra for extra in old.extras if extra.position < shared)
        made.is_segment, made.hidden = old.is_segment, {}
        for layer, planes in made.planes.items():
            for ours, theirs in zip(planes, old.planes[layer], strict=True):
                axis = slice(shared) if made.spec.keeps_e else (slice(None), slice(shared))
                ours[axis] = theirs[axis]  # type: ignore[index]
