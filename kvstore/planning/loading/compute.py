"""The compute model: t(n new tokens after P) = c0 + c1 n + c2 (n P + n^2 / 2), learned from prefills."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from kvstore.planning.loading.least_squares import CAUTION_MAX, caution_of, confidence_of, least_squares

WINDOW = 32
"""Number of prefills from which the slow coefficients are fitted."""
RECENT = 3
"""Number of prefills of which the load factor is the median."""
LOAD_MAX = 16.0
SPREAD = 4.0
"""Least ratio of the largest to the smallest measurement at which two coefficients can be told apart."""
VISIBLE = 0.1
"""The share of a prefill's time that attention over the context must make up before its coefficient is fitted."""
PREFILL_S_MIN, PREFILL_S_MAX = 1e-9, 3600.0
"""Bounds of a plausible prefill: a clock resolves nothing shorter, and no engine takes longer."""
TOKENS_MAX = 1 << 30
READING_TOKENS = 300
"""Largest pass, in tokens, that may take no longer than a pass of one token, because reading the weights dominates. An
H100 computes 295 tokens in that time (990 Tflop/s, 3.35 TB/s, two bytes a weight); most devices compute fewer."""


@dataclass(frozen=True)
class Prefill:
    """``seconds`` for ``new_tokens`` behind ``context_tokens``, computed in ``passes`` forward passes."""

    new_tokens: int
    context_tokens: int
    seconds: float
    passes: int = 1

    @property
    def pairs(self) -> float:
        """Number of (query token, attended token) pairs."""
        return self.new_tokens * (self.context_tokens + self.new_tokens / 2)

    @property
    def is_sound(self) -> bool:
        """False for counts or times that no engine can have."""
        counts = 0 < self.new_tokens <= TOKENS_MAX and 0 <= self.context_tokens <= TOKENS_MAX
        seconds = PREFILL_S_MIN <= self.seconds <= PREFILL_S_MAX
        return counts and seconds and 0 < self.passes <= self.new_tokens


@dataclass(frozen=True)
class ComputeRate:
    """The time of a prefill: ``pass_s`` seconds per forward pass, ``token_s`` per token and ``pair_s`` per pair of
    attending tokens, all times ``load``: measured over expected time of the last few prefills. ``caution``: the 90th
    percentile over the mean. ``most_tokens``: the largest pass that was measured, where all were small. A larger pass
    of up to READING_TOKENS is expected to take as long as that one, and a still larger pass longer in proportion. 0:
    the coefficients hold for passes of any size."""

    pass_s: float = 0.0
    token_s: float = 0.0
    pair_s: float = 0.0
    load: float = 1.0
    caution: float = 2.0
    sample_count: int = 0
    most_tokens: int = 0

    def seconds(self, new_tokens: float, context_tokens: float = 0.0, step_tokens: int = 0) -> float:
        """Return the seconds for ``new_tokens`` that are computed ``step_tokens`` at a time; 0: in one pass."""
        if new_tokens <= 0:
            return 0.0
        passes = -(-new_tokens // step_tokens) if step_tokens else 1
        pairs = new_tokens * (context_tokens + new_tokens / 2)
        return self.load * self._unloaded_s(new_tokens, passes, pairs)

    def unloaded_s(self, done: Prefill) -> float:
        """Return the expected seconds of this prefill on a device without other load."""
        return self._unloaded_s(done.new_tokens, done.passes, done.pairs)

    def _unloaded_s(self, new_tokens: float, passes: float, pairs: float) -> float:
        rows = new_tokens / passes
        is_beyond = 0 < self.most_tokens < rows
        seen = self.most_tokens / min(rows, READING_TOKENS) if is_beyond else 1.0
        return self.pass_s * passes + seen * (self.token_s * new_tokens + self.pair_s * pairs)

    @property
    def is_known(self) -> bool:
        return self.sample_count > 0

    @property
    def is_sound(self) -> bool:
        """False for numbers that no engine can have. Rates come from other processes, so they are checked."""
        parts = (self.pass_s, self.token_s, self.pair_s)
        speeds = all(0 <= each <= PREFILL_S_MAX for each in parts) and sum(parts) >= PREFILL_S_MIN / TOKENS_MAX
        is_usual = 1 / LOAD_MAX <= self.load <= LOAD_MAX and 1 <= self.caution <= CAUTION_MAX
        return speeds and is_usual and 0 <= self.most_tokens <= READING_TOKENS

    @property
    def confidence(self) -> float:
        """From 0 (no prefill was measured) to 1."""
        return confidence_of(self.sample_count, self.caution)


def saved_seconds(token_count: float, rate: ComputeRate) -> float:
    """Return the seconds that computing a fetched prefix of ``token_count`` tokens would have taken; 0 while no prefill
    of the model was measured. The cost per forward pass is left out: the tokens behind the prefix need a pass in any
    case. The time of the fetch is not subtracted."""
    return replace(rate, pass_s=0.0).seconds(token_count)


@dataclass(frozen=True)
class Prefills:
    """The last prefills of one model in one engine, oldest first. ``pair_share``: c2 / c1 by the operation count of the
    spec. It is used until the measured contexts differ enough to fit c2 itself."""

    pair_share: float
    prefills: tuple[Prefill, ...] = ()

    def observed(self, prefill: Prefill) -> Prefills:
        """Return the prefills with one more; one that is not sound is left out. When the last few are off by more than
        any load explains, the engine has been replaced, and the measurements before them are dropped."""
        if not prefill.is_sound:
            return self
        after = replace(self, prefills=_kept((*self.prefills, prefill)))
        recent = after.prefills[-RECENT:]
        if len(after.prefills) > RECENT == len(recent):
            ratios = [each.seconds / self.rate.unloaded_s(each) for each in recent]
            if min(ratios) > LOAD_MAX or max(ratios) < 1 / LOAD_MAX:
                return replace(self, prefills=recent)
        return after

    @cached_property
    def rate(self) -> ComputeRate:
        """The rate fitted to these prefills. The slow coefficients are scaled to the median prefill, so that one that
        had to wait does not raise them. The load factor is the median of the last few."""
        if not self.prefills:
            return ComputeRate()
        seconds = [each.seconds for each in self.prefills]
        shape = self._shape(seconds)
        ratios = [each.seconds / shape.unloaded_s(each) for each in self.prefills]
        middle = _median(ratios)
        slow = replace(
            shape, pass_s=shape.pass_s * middle, token_s=shape.token_s * middle, pair_s=shape.pair_s * middle
        )
        ratios = [ratio / middle for ratio in ratios]
        load = min(max(_median(ratios[-RECENT:]), 1 / LOAD_MAX), LOAD_MAX)
        return replace(slow, load=load, caution=caution_of(ratios), sample_count=len(ratios))

    def _shape(self, seconds: Sequence[float]) -> ComputeRate:
        """Fit c0, c1 and c2, or as many of them as the spread of the measurements tells apart. When c0 and c1 cannot be
        told apart, ``most_tokens`` limits the fit: a small pass may have measured the reading of the weights. Counted
        per token, that time would make every prefill look slow. Then no prompt would be computed, and no measurement
        would ever correct the error."""
        share, done = self.pair_share, self.prefills
        work = [each.new_tokens + share * each.pairs for each in done]
        depths = [each.pairs / each.new_tokens for each in done]
        visible = share * (max(depths) - min(depths)) > VISIBLE and max(depths) >= SPREAD * min(depths)
        if visible and len(done) > 5:
            found = least_squares([(each.passes, each.new_tokens, each.pairs) for each in done], seconds)
            if found is not None and found[1] > 0:
                return ComputeRate(found[0], found[1], found[2])
        sizes = [each / prefill.passes for each, prefill in zip(work, done, strict=True)]
        if len(done) > 2 and max(sizes) >= SPREAD * min(sizes):
            found = least_squares([(each.passes, total) for each, total in zip(done, work, strict=True)], seconds)
            if found is not None and found[1] > 0:
                return ComputeRate(found[0], found[1], share * found[1])
        token_s = sum(seconds) / sum(work)
        most = math.ceil(max(each.new_tokens / each.passes for each in done))
        return ComputeRate(token_s=token_s, pair_s=share * token_s, most_tokens=most if most < READING_TOKENS else 0)


def _kept(prefills: tuple[Prefill, ...]) -> tuple[Prefill, ...]:
    """Drop the oldest when there are more than ``WINDOW``, but keep the newest large prefill, however old it is: when
    prefixes are loaded and only a few tokens are computed, only that one shows how long a whole prompt takes."""
    if len(prefills) <= WINDOW:
        return prefills
    sizes = [each.new_tokens / each.passes for each in prefills]
    large = max(place for place, size in enumerate(sizes) if 2 * size >= max(sizes))
    return prefills[1:] if large else (prefills[0], *prefills[2:])


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
