"""Selection of the rows to recompute. A selector gives each context token a score, and the highest are taken.

Ties go to the earlier token, and a score that is NaN counts as the highest, so that one input has one answer.
Sources: deviation and gradual filtering, CacheBlend (EuroSys '25); first tokens of each chunk, EPIC (2024); deviation
times the suffix's attention, as ProphetKV and A3 weigh it.
"""

from __future__ import annotations

import math
from enum import StrEnum

import torch

from kvstore.errors import InvalidRequest


class Selector(StrEnum):
    """The score by which tokens are chosen. RANDOM is a control."""

    DEVIATION = "deviation"
    SUFFIX_ATTENTION = "suffix_attention"
    SUFFIX_PEAK = "suffix_peak"
    PRODUCT = "product"
    FIRST = "first"
    RANDOM = "random"


def scores_of(
    selector: Selector,
    *,
    deviation: torch.Tensor | None = None,
    attention: torch.Tensor | None = None,
    chunk_starts: torch.Tensor | None = None,
    token_count: int = 0,
    seed: int = 0,
) -> torch.Tensor:
    """Return one fp32 score per context token; the highest are taken first.

    Shapes: ``deviation`` and ``attention`` (the suffix's attention mass) [tokens], needed by the selectors that use
    them. FIRST needs ``chunk_starts`` int64, ascending from 0, and ``token_count``; RANDOM ``token_count`` and
    ``seed``.
    Raises: InvalidRequest naming the argument that the selector needs.
    """
    if selector is Selector.DEVIATION:
        return _needed(deviation, "deviation", selector).float()
    if selector in (Selector.SUFFIX_ATTENTION, Selector.SUFFIX_PEAK):
        return _needed(attention, "attention", selector).float()
    if selector is Selector.PRODUCT:
        return _needed(deviation, "deviation", selector).float() * _needed(attention, "attention", selector).float()
    if selector is Selector.FIRST:
        return _first_scores(_needed(chunk_starts, "chunk_starts", selector), token_count)
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(token_count, generator=generator).float()


def row_count(ratio: float, token_count: int) -> int:
    """Return the number of ``token_count`` context tokens that a ratio is, rounded up: only a ratio of 0 gives none.

    Raises: InvalidRequest for a ratio outside [0, 1].
    """
    if not 0.0 <= ratio <= 1.0:
        raise InvalidRequest(f"ratio {ratio} must be in 0..1")
    return min(token_count, math.ceil(ratio * token_count - 1e-9))


def highest(scores: torch.Tensor, count: int, among: torch.Tensor | None = None) -> torch.Tensor:
    """Return the ``count`` tokens of the highest scores: int64, ascending.

    Shapes: ``scores`` [tokens], one per token, or one per entry of ``among`` (int64, ascending: the survivors of an
    earlier choice), whose entries are then returned.
    Raises: InvalidRequest when there are fewer scores than ``count``.
    """
    if among is not None and scores.shape != among.shape:
        raise InvalidRequest(f"scores has shape {tuple(scores.shape)}, among {tuple(among.shape)}")
    if not 0 <= count <= len(scores):
        raise InvalidRequest(f"count {count} must be in 0..{len(scores)}")
    ranked = torch.where(scores.isnan(), math.inf, scores.float())
    chosen = torch.sort(ranked, descending=True, stable=True).indices[:count].sort().values
    return chosen if among is None else among[chosen]


def gradual_ratios(ratio: float, layer_count: int, excess: float = 0.2) -> list[float]:
    """Return the ratios of gradual filtering, one per layer: from ``ratio`` (1 + ``excess``) at the check layer down to
    ``ratio`` (1 - ``excess``) at the last, in equal steps, so that their mean is ``ratio``. They are capped at 1."""
    row_count(ratio, 0)
    if layer_count <= 1:
        return [ratio] * layer_count
    steps = (1 + excess - 2 * excess * index / (layer_count - 1) for index in range(layer_count))
    return [min(1.0, ratio * step) for step in steps]


def _first_scores(chunk_starts: torch.Tensor, token_count: int) -> torch.Tensor:
    """Return minus each token's place in its chunk: the first tokens of all chunks score above any second token."""
    if not len(chunk_starts) or int(chunk_starts[0]) != 0 or bool((chunk_starts.diff() <= 0).any()):
        raise InvalidRequest("chunk_starts must ascend from 0")
    tokens = torch.arange(token_count, device=chunk_starts.device)
    chunk = torch.searchsorted(chunk_starts, tokens, right=True) - 1
    return (chunk_starts[chunk] - tokens).float()


def _needed(value: torch.Tensor | None, name: str, selector: Selector) -> torch.Tensor:
    if value is None:
        raise InvalidRequest(f"selector {selector.value!r} needs {name}")
    return value
