"""Decoders and fused recompute in numpy and float64, written from the formulas and dense throughout: every token has a
row in every array, NaN where it is not computed. Imports nothing of the code under test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any
"""float64."""


class Decoder:
    """Llama, Mistral, Qwen2 and Qwen3: RMS norms, rotary positions, grouped queries, SwiGLU."""

    def __init__(self, state: dict[str, Array], config: dict[str, Any], windows: Sequence[int]) -> None:
        self.state, self.windows, self.layer_count = state, windows, len(windows)
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim = config.get("head_dim") or config["hidden_size"] // self.heads
        self.epsilon = config["rms_norm_eps"]
        self.frequencies, self.scaling = frequencies(config["rope_parameters"], self.dim)

    def embed(self, tokens: Array) -> Array:
        return self.state["model.embed_tokens.weight"][tokens]

    def norm(self, x: Array, name: str) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.epsilon) * self.state[name + ".weight"]

    def linear(self, x: Array, name: str) -> Array:
        return x @ self.state[name + ".weight"].T + self.state.get(name + ".bias", 0.0)

    def project(self, layer: int, x: Array) -> tuple[Array, Array, Array]:
        """q, k (both rotated to where they stand) and v of all tokens, [heads, tokens, dim]."""
        name = f"model.layers.{layer}."
        x = self.norm(x, name + "input_layernorm")
        q, k, v = (
            self.linear(x, f"{name}self_attn.{which}_proj").reshape(len(x), -1, self.dim).transpose(1, 0, 2)
            for which in "qkv"
        )
        if f"{name}self_attn.q_norm.weight" in self.state:
            q, k = self.norm(q, name + "self_attn.q_norm"), self.norm(k, name + "self_attn.k_norm")
        positions = np.arange(len(x))
        return self.turned(q, positions) * self.scaled(), self.turned(k, positions) * self.scaled(), v

    def scaled(self) -> Array:
        """Yarn multiplies the dims that rotate."""
        factors = np.ones(self.dim)
        factors[: 2 * len(self.frequencies)] = self.scaling
        return factors

    def turned(self, x: Array, by: Array) -> Array:
        """R(by) x, as complex numbers (x_i + j x_{i + pairs}) e^(j angle). ``by`` [tokens], positions."""
        pairs = len(self.frequencies)
        numbers = (x[..., :pairs] + 1j * x[..., pairs : 2 * pairs]) * np.exp(1j * np.outer(by, self.frequencies))
        return np.concatenate((numbers.real, numbers.imag, x[..., 2 * pairs :]), -1)

    def attention(self, layer: int, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        """(output, weights [heads, tokens, tokens]); a token sees itself and what lies before it, in its window."""
        group = self.heads // self.kv_heads
        place = np.arange(q.shape[1])
        distance = place[:, None] - place
        seen = (distance >= 0) & ((distance < self.windows[layer]) | (self.windows[layer] == 0))
        scores = q @ k.repeat(group, 0).transpose(0, 2, 1) / math.sqrt(self.dim)
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return weights @ v.repeat(group, 0), weights

    def finish(self, layer: int, x: Array, seen: Array) -> Array:
        name = f"model.layers.{layer}."
        x = x + self.linear(seen.transpose(1, 0, 2).reshape(len(x), -1), name + "self_attn.o_proj")
        y = self.norm(x, name + "post_attention_layernorm")
        gate = self.linear(y, name + "mlp.gate_proj")
        return x + self.linear(
            gate / (1 + np.exp(-gate)) * self.linear(y, name + "mlp.up_proj"), name + "mlp.down_proj"
        )

    def logits(self, x: Array) -> Array:
        head = "lm_head" if "lm_head.weight" in self.state else "model.embed_tokens"
        return self.linear(self.norm(x, "model.norm"), head)


def frequencies(rope: dict[str, Any], dim: int) -> tuple[Array, float]:
    """(radians per position of each pair, what yarn multiplies by)."""
    kind, theta = rope["rope_type"], rope["rope_theta"]
    if kind != "default":
        dim = int(dim * rope.get("partial_rotary_factor", 1.0))
    plain = theta ** (-np.arange(0, dim, 2) / dim)
    if kind == "default":
        return plain, 1.0
    factor = rope["factor"]
    if kind == "linear":
        return plain / factor, 1.0
    context = rope["original_max_position_embeddings"]
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = context * plain / (2 * np.pi)
        share = np.clip((turns - low) / (high - low), 0, 1)
        return (1 - share) * plain / factor + share * plain, 1.0
    assert kind == "yarn"

    def pair_of(turns: float) -> float:
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(pair_of(32)), 0), min(math.ceil(pair_of(1)), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    return plain * (1 - ramp) + plain / factor * ramp, 0.1 * math.log(factor) + 1


@dataclass
class Cached:
    """One run: where it begins, K and V per layer, [kv_heads, tokens, dim], K rotated for ``rotated_from`` and on, and
    E of the transition layer."""

    start: int
    kv: list[tuple[Array, Array]]
    rotated_from: int = 0
    hidden: Array = None
    is_exact: bool = False

    @property
    def places(self) -> Array:
        return np.arange(self.start, self.start + self.kv[0][0].shape[1])


@dataclass
class Merged:
    kv: list[tuple[Array, Array]]
    logits: Array
    chosen: dict[int, list[int]]
    mass: Array
    """The attention of the tokens behind all runs, summed over them and heads: the geometric mean over layers,
    each with a thousandth of an even share added to every token."""
    peak: Array
    """The most attention of them that any head gives in any layer."""


def fused(
    model: Decoder, tokens: Array, runs: Sequence[Cached], first: int, last: int, ratio: float = 0.0,
    selector: str = "deviation", metric: str = "both", gradual: float = 0.0, seed: int = 0,
) -> Merged:  # fmt: skip
    """Algorithm of section 3: layers ``first`` to ``last`` for all context, the top ``ratio`` of it beyond."""
    count = len(tokens)
    context = np.zeros(count, bool)
    reused = np.zeros(count, bool)
    for run in runs:
        reused[run.places] = True
        context[run.places] = not run.is_exact
    suffix = ~reused
    tail = max((run.places[-1] for run in runs), default=-1) + 1
    check = last + 1
    scores = np.zeros(count)
    if selector in ("suffix_attention", "suffix_peak", "product") and ratio:
        asked = fused(model, tokens, runs, 0, -1)
        scores = asked.peak if selector == "suffix_peak" else asked.mass
    active, x = suffix.copy(), np.where(suffix[:, None], model.embed(tokens), np.nan)
    merged, chosen, masses, peak = [], {}, [], np.zeros(count)
    survivors = context.copy()
    for layer in range(model.layer_count):
        if layer == first and (ratio or last >= first):
            active |= context
            x[context] = model.embed(tokens)[context]
            if first > 0 and context.any():
                x[context] = np.concatenate([run.hidden for run in runs if not run.is_exact])
        if layer == check and not ratio:
            active &= ~context
        old_k, old_v = cached_layer(model, layer, runs, count)
        q, fresh_k, fresh_v = model.project(layer, x)
        if ratio and (ratio < 1 or gradual) and (layer == check or (layer > check and gradual)):
            distance = {"k": (fresh_k - old_k,), "v": (fresh_v - old_v,)}
            planes = distance["k"] + distance["v"] if metric == "both" else distance[metric]
            deviation = sum((plane**2).sum((0, 2)) for plane in planes)
            share = ratio
            if gradual:
                layers = model.layer_count - check
                share = (
                    ratio * (1 + gradual - 2 * gradual * (layer - check) / max(layers - 1, 1)) if layers > 1 else ratio
                )
            wanted = math.ceil(round(min(share, 1.0) * context.sum(), 6))
            rank = {"deviation": deviation, "product": deviation * scores}
            rank |= {"suffix_attention": scores, "suffix_peak": scores}
            if selector == "first":
                rank["first"] = np.full(count, np.nan)
                for run in runs:
                    rank["first"][run.places] = -np.arange(len(run.places))
            names = sorted(np.flatnonzero(survivors), key=lambda token: (-rank[selector][token], token))
            survivors = np.zeros(count, bool)
            survivors[names[:wanted]] = True
            chosen[layer] = [int(token) for token in np.flatnonzero(survivors)]
        entered = active.copy()
        if chosen:
            active = suffix | survivors
        k = np.where(entered[:, None], fresh_k, old_k)
        v = np.where(entered[:, None], fresh_v, old_v)
        merged.append((k, v))
        seen, weights = model.attention(layer, q, k, v)
        given = weights[:, tail:].sum((0, 1)) if runs else np.ones(count)
        peak = np.maximum(peak, weights[:, tail:].sum(1).max(0)) if runs else peak
        masses.append(given + 1e-3 * given.sum() / count)
        x = np.where(active[:, None], model.finish(layer, x, seen), np.nan)
    return Merged(merged, model.logits(x), chosen, np.prod(masses, axis=0) ** (1 / model.layer_count), peak)


def cached_layer(model: Decoder, layer: int, runs: Sequence[Cached], count: int) -> tuple[Array, Array]:
    """What was reused of a layer, moved to where it stands; NaN elsewhere."""
    k, v = (np.full((model.kv_heads, count, model.dim), np.nan) for _ in "kv")
    for run in runs:
        moved = np.full(len(run.places), run.start - run.rotated_from)
        k[:, run.places] = model.turned(run.kv[layer][0], moved)
        v[:, run.places] = run.kv[layer][1]
    return k, v
