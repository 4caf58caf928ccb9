"""Drift: finds out when lossy reuse no longer answers as it did when it was profiled.

The check is a full prefill beside the lossy one. Checking exact KV of a few tokens instead would be no cheaper: KV
deeper than the group depends on all tokens in all layers below, so even one token's exact KV costs nearly as much, and
says less about the answer.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

HALF = math.log(2.0)
FALSE_ALARM_CHECKS = 10_000


def misled(full: torch.Tensor, lossy: torch.Tensor) -> torch.Tensor:
    """Return True where a lossy prefill's next token is not even half as probable as the best one, by full prefill: so
    near ties do not count. Shapes: logits [..., vocab_size] of both; bool [...]. Logits that are not finite count as
    misled."""
    said = lossy.float().argmax(-1, keepdim=True)
    known = full.float().log_softmax(-1)
    gap = known.amax(-1) - known.gather(-1, said)[..., 0]
    return ~(gap <= HALF) | ~lossy.isfinite().all(-1)


class DriftWatch:
    """A running sum of evidence that answers mislead more often than they did on calibration.

    Each check adds ln(p1 / p0) when it misled, ln((1 - p1) / (1 - p0)) when not, and the sum never falls below 0. p0 is
    the profile's rate (with one answer more of each kind, because it may be 0); p1 is four times that, at least 0.2
    more, but at most three quarters of the way to 1. A sum above ln(10,000) is drift: without drift, at most one alarm
    in 10,000 checks on average. Departure: p1 is set, not estimated. Source: CUSUM (Page, 1954); the bound, Lorden
    (1971).
    """

    def __init__(self, rate: float, answers: int) -> None:
        before = (rate * answers + 1) / (answers + 2)
        after = min(max(4 * before, before + 0.2), (3 + before) / 4)
        self._steps = (math.log((1 - after) / (1 - before)), math.log(after / before))
        self.checks = 0
        self.misled = 0
        self._evidence = 0.0

    def add(self, was_misled: bool) -> None:
        self.checks += 1
        self.misled += was_misled
        self._evidence = max(0.0, self._evidence + self._steps[was_misled])

    @property
    def is_suspicious(self) -> bool:
        """True when there is any evidence: then the next request is checked too."""
        return self._evidence > 0.0

    @property
    def has_drifted(self) -> bool:
        return self._evidence > math.log(FALSE_ALARM_CHECKS)
