"""The result of a recompute: the cache to decode from, its logits, and where the time went."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from kvstore.planning import Plan
from kvstore.spec import Exactness
from kvstore_client.derived import LayeredKV, mark_derived, written_anew


class MergedKV(LayeredKV):
    """Per layer (K, V), each [kv_heads, tokens, dim], with its exactness, which its memory is marked with, too:
    ``client.store`` refuses to keep a derived cache under an exact key."""

    def __init__(self, planes: Iterable[tuple[torch.Tensor, torch.Tensor]], exactness: Exactness) -> None:
        super().__init__(planes, exactness)
        every = [plane for pair in self for plane in pair]
        if exactness is Exactness.EXACT:
            written_anew(every)
        else:
            mark_derived(every)


@dataclass(frozen=True)
class LayerTime:
    """One layer of one pass. ``load_s``: the wait for its bytes; ``recompute_s`` and ``suffix_s``: its computation,
    divided by the rows of each that took part; seconds. ``row_count``: all of these rows that left it."""

    layer: int
    load_s: float
    recompute_s: float
    suffix_s: float
    row_count: int


@dataclass(frozen=True)
class Timeline:
    """The parts of the total time, in seconds. ``prepare_s``: before the first layer: lookups and planning.
    ``layers``: in the order they were computed; the suffix's look ahead first."""

    total_s: float = 0.0
    layers: tuple[LayerTime, ...] = ()
    prepare_s: float = 0.0

    @property
    def load_s(self) -> float:
        """Seconds of waiting for bytes; bytes that came during computation cost none."""
        return sum(layer.load_s for layer in self.layers)

    @property
    def recompute_s(self) -> float:
        return sum(layer.recompute_s for layer in self.layers)

    @property
    def suffix_s(self) -> float:
        return sum(layer.suffix_s for layer in self.layers)


@dataclass(frozen=True, eq=False)
class Recomputed:
    """A prompt's cache.

    Shapes: ``kv`` per layer (K, V), each [kv_heads, tokens, dim]; ``logits`` [logit_count, vocab_size], of the last
    tokens; ``hidden`` {layer: [tokens, hidden_size]}.
    ``chosen``: {layer: int64 positions}, ascending, of the tokens carried beyond each layer that chose.
    ``share``: f, the share of compute over the reused tokens: rows times layers they were carried through, of all, and
    the look ahead, where there was one (``LOOK_AHEAD_SHARE``); 1 when nothing was reused. Papers' formula, which looks
    at nothing ahead: (group + (layers - check layer) * ratio) / layers.
    ``attention``: fp32 [reused tokens that are not exact], the suffix's, where it was looked at.
    ``exactness``: EXACT only if every row is what the model computes by itself; pass it to ``store``.
    """

    kv: MergedKV
    logits: torch.Tensor
    exactness: Exactness
    share: float
    timeline: Timeline
    chosen: dict[int, torch.Tensor] = field(default_factory=dict)
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)
    attention: torch.Tensor | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class PartialPrefill(Recomputed):
    """The result of ``client.partial_prefill``, with its plan."""

    plan: Plan
