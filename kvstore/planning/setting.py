"""Recompute: the setting for how much of an inexact cache is computed again. A value; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import InvalidRequest

SELECTORS = ("deviation", "suffix_attention", "suffix_peak", "product", "first", "random")
METRICS = ("k", "v", "both")
LOOKING_AHEAD = ("suffix_attention", "suffix_peak", "product")
"""Selectors that need the suffix's attention: the suffix first runs once over all rows as they were reused."""
LOOK_AHEAD_SHARE = 0.08
"""The time of that run, as a share of a prefill's over the reused tokens. Measured once, on a pretrained model of 135 M
parameters in bf16. How it changes with the model, or the length of prompts, was not measured."""


@dataclass(frozen=True)
class Recompute:
    """Compute layers ``first_layer`` to ``last_layer`` (the group) for every reused token that is not exact. At the
    check layer after them choose the share ``ratio`` of those tokens, and compute only these (and the suffix) in the
    remaining layers.

    Layers before ``first_layer`` reuse their caches as they are. A ``first_layer`` above 0 is the transition layer,
    whose E is needed. ``last_layer = first_layer - 1``: no layer is computed for all tokens. ``ratio`` 0: no token is
    checked, and none is carried on.
    ``selector``: the score by which tokens are chosen: the distance of cached K and V from fresh ones ("deviation"),
    the suffix's attention to the token, over all heads and layers ("suffix_attention") or in the head and layer where
    it is largest ("suffix_peak"), the "product" of deviation and attention, the token's place in its run ("first"), or
    "random", by ``seed``, as a control. ``metric``: the planes whose deviation counts, "k", "v" or "both".
    ``gradual``: 0, or the spread of gradual filtering: from ratio (1 + gradual) at the check layer down to
    ratio (1 - gradual) at the last, each layer choosing among the survivors.

    Raises: InvalidRequest naming the argument that is wrong.
    Source: CacheBlend (EuroSys '25) and DroidSpeak (NSDI '26), as one algorithm.
    """

    first_layer: int
    last_layer: int
    ratio: float = 0.0
    selector: str = "deviation"
    metric: str = "both"
    gradual: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("first_layer", "last_layer", "seed"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise InvalidRequest(f"{name} must be a whole number, not {value!r:.80}")
        if self.seed.bit_length() > 63:  # torch takes no longer one
            raise InvalidRequest(f"seed {self.seed!r:.80} must have 63 bits at most")
        if self.first_layer < 0 or self.last_layer < self.first_layer - 1:
            raise InvalidRequest(
                f"first_layer {self.first_layer} must be 0 or more, and last_layer {self.last_layer} at least one less"
            )
        for name in ("ratio", "gradual"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0.0 <= value <= 1.0:
                raise InvalidRequest(f"{name} {value!r:.80} must be in 0..1")
        if self.selector not in SELECTORS:
            raise InvalidRequest(f"selector {self.selector!r:.80} must be one of {', '.join(SELECTORS)}")
        if self.metric not in METRICS:
            raise InvalidRequest(f"metric {self.metric!r:.80} must be one of {', '.join(METRICS)}")

    @classmethod
    def cacheblend(
        cls, check_layer: int, ratio: float, *, selector: str = "deviation", metric: str = "both"
    ) -> Recompute:
        """Compute every layer before the check layer in full, then the chosen tokens: (0, check_layer - 1, ratio)."""
        return cls(0, check_layer - 1, ratio, selector, metric)

    @classmethod
    def droidspeak(cls, first_layer: int, last_layer: int) -> Recompute:
        """Compute a group of layers in full from the sender's E, reuse all others: (first_layer, last_layer, 0)."""
        return cls(first_layer, last_layer)

    @classmethod
    def reuse(cls) -> Recompute:
        """Compute nothing again: reuse caches as they are, moved to their positions."""
        return cls(0, -1)

    @classmethod
    def full(cls, layer_count: int) -> Recompute:
        """Compute everything again, as a plain prefill does: (0, layer_count - 1)."""
        return cls(0, layer_count - 1)

    @property
    def check_layer(self) -> int:
        """The layer behind the group, at which tokens are chosen."""
        return self.last_layer + 1

    @property
    def needs_hidden(self) -> bool:
        """True when E of ``first_layer`` is needed: reused tokens are computed, and not from the embeddings."""
        return self.first_layer > 0 and (self.last_layer >= self.first_layer or self.ratio > 0)

    @property
    def chooses(self) -> bool:
        """True when some tokens are carried beyond the group and some are not."""
        return self.ratio > 0 and not self.carries_all

    @property
    def carries_all(self) -> bool:
        """True when every token is carried beyond the group."""
        return self.ratio == 1 and self.gradual == 0

    @property
    def looks_ahead(self) -> bool:
        """True when tokens are chosen by the suffix's attention: then all layers are loaded before any is computed."""
        return self.chooses and self.selector in LOOKING_AHEAD

    def covers(self, other: Recompute) -> bool:
        """True when this setting computes at least as much as the other: its group contains the other's, and it carries
        no fewer tokens beyond the group, chosen in the same way."""
        group = self.first_layer <= other.first_layer and self.last_layer >= other.last_layer
        how = (self.selector, self.metric, self.gradual) == (other.selector, other.metric, other.gradual)
        return group and self.ratio >= other.ratio and (how or not other.ratio)

    def check(self, layer_count: int) -> None:
        """Raises: InvalidRequest for layers that a model of ``layer_count`` layers does not have."""
        if self.last_layer >= layer_count or self.first_layer >= layer_count:
            raise InvalidRequest(
                f"first_layer {self.first_layer} and last_layer {self.last_layer} must be below the model's "
                f"{layer_count} layers"
            )

    def computes_all(self, layer_count: int) -> bool:
        """True when every reused row is computed again."""
        return self.first_layer == 0 and (self.last_layer == layer_count - 1 or self.carries_all)

    def share(self, layer_count: int) -> float:
        """Return f, the setting's share of a prefill's compute over the reused tokens: the rows that are carried, and
        the look ahead; no more than a prefill."""
        return min(1.0, self.carried_share(layer_count) + self.look_ahead_share(layer_count))

    def carried_share(self, layer_count: int) -> float:
        """Return the part of f that rows take: the group in full, and the chosen tokens in the check layer and the
        layers behind it."""
        group = self.check_layer - self.first_layer
        return (group + self.ratio * (layer_count - self.check_layer)) / layer_count

    def look_ahead_share(self, layer_count: int) -> float:
        """Return the part of f that the look ahead takes; 0 where there is none."""
        return LOOK_AHEAD_SHARE if self.looks_ahead and self.check_layer < layer_count else 0.0

    def loaded_layers(self, layer_count: int) -> tuple[int, ...]:
        """Return the layers whose cached KV is used, for runs that are not exact. The others need not be fetched, nor
        stored.

        The check layer computes K and V of every token, so that only the deviation needs its cached ones."""
        spared = range(self.first_layer, self.check_layer)
        if self.carries_all:
            spared = range(self.first_layer, layer_count)
        elif self.looks_ahead and self.check_layer < layer_count:
            spared = range(0)
        elif self.chooses and self.selector != "deviation":
            spared = range(self.first_layer, self.check_layer + 1)
        return tuple(layer for layer in range(layer_count) if layer not in spared)
