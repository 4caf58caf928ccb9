"""Candidates: one way to the first token each, with what it takes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvstore.planning.setting import Recompute


class Way(StrEnum):
    """The ways in which a prompt comes to its first token."""

    PREFILL = "prefill"
    """Compute everything."""
    LOAD = "load"
    """Load all that is stored of the prefix, compute the rest."""
    FIRST = "first"
    """Load the first tokens only, compute the rest."""
    MEET = "meet"
    """Compute from the front while what lies behind is loaded."""
    BLEND = "blend"
    """Load, and compute a share of what is not exact again."""


@dataclass(frozen=True)
class Bar:
    """Something that goes on from ``start_s`` to ``stop_s``."""

    name: str
    start_s: float
    stop_s: float


@dataclass(frozen=True)
class Candidate:
    """Tokens from ``load_start`` to ``load_stop`` are loaded, in a ``form``; those before are computed meanwhile, those
    behind afterwards, layer by layer as the load lands. All seconds are from the request on.

    ``ttft_high_s``: the 90th percentile of ``ttft_s``, where tiers are as slow as they are in one case of ten.
    ``front_s``: until the tokens before are computed; ``load_s``: until the last byte has landed; ``compute_s``: how
    long the engine computes, ``tier_s``: how long tiers and the way from memory are busy. ``cost``: what is compared.
    ``refused``: why it may not be chosen; empty when it may.
    """

    way: Way
    form: str
    load_start: int
    load_stop: int
    ttft_s: float
    ttft_high_s: float
    front_s: float
    load_s: float
    compute_s: float
    tier_s: float
    cost: float
    setting: Recompute | None = None
    refused: str = ""

    @property
    def loaded_tokens(self) -> int:
        return self.load_stop - self.load_start

    @property
    def bars(self) -> tuple[Bar, ...]:
        """Return the spans of a plan's timeline, for a picture."""
        bars = []
        if self.front_s:
            bars.append(Bar("compute the front", 0.0, self.front_s))
        if self.load_s:
            bars.append(Bar("load", 0.0, self.load_s))
        rest_s = self.compute_s - self.front_s
        bars.append(Bar("compute the rest" if self.load_s else "compute", self.ttft_s - rest_s, self.ttft_s))
        return tuple(bars)
