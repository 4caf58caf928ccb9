"""Candidates: each is one way to the first token, with its predicted times."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvstore.planning.setting import Recompute


class Way(StrEnum):
    """The ways by which a prompt can come to its first token."""

    PREFILL = "prefill"
    """Compute everything."""
    LOAD = "load"
    """Load the stored part of the prefix, compute the rest."""
    FIRST = "first"
    """Load the first tokens only, compute the rest."""
    MEET = "meet"
    """Compute the first tokens while those behind them are loaded."""
    BLEND = "blend"
    """Load documents or a sibling's cache too, and compute a share of them again."""


@dataclass(frozen=True)
class Bar:
    """One activity of a timeline, from ``start_s`` to ``stop_s``."""

    name: str
    start_s: float
    stop_s: float


@dataclass(frozen=True)
class Candidate:
    """One way to the first token: tokens from ``load_start`` to ``load_stop`` are loaded, in a ``form``. The tokens
    before are computed meanwhile. Those behind are computed layer by layer as the load lands. A blend's tokens stand
    anywhere: of them ``load_stop`` is the number. All seconds count from the request.

    ``ttft_high_s``: the 90th percentile of ``ttft_s``, with tiers as slow as they are in one case of ten.
    ``front_s``: seconds until the tokens before are computed. ``load_s``: seconds until the last byte has landed.
    ``compute_s``: busy seconds of the engine. ``tier_s``: busy seconds of the tiers and of the link. ``cost``: the
    number by which candidates are compared. ``refused``: why it may not be chosen; empty when it may.
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
        """The activities and their times, for a picture."""
        bars = []
        if self.front_s:
            bars.append(Bar("compute the front", 0.0, self.front_s))
        if self.load_s:
            bars.append(Bar("load", 0.0, self.load_s))
        rest_s = self.compute_s - self.front_s
        bars.append(Bar("compute the rest" if self.load_s else "compute", self.ttft_s - rest_s, self.ttft_s))
        return tuple(bars)
