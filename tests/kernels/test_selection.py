"""Deviation and selection against the formulas; ties, suffix, survivors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kvstore_kernels.deviation import Metric, deviation_of
from kvstore_kernels.selection import Selector, gradual_ratios, highest, row_count, scores_of

from kvstore.errors import InvalidRequest
from tests.kernels.reference import DIMS, DTYPES, HEADS, TOKENS, plane, wide


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dim", DIMS)
def test_deviation_equals_the_formula(heads: int, dim: int, dtype: torch.dtype) -> None:
    for tokens in TOKENS:
        fresh = (plane(heads, tokens, dim, dtype, 1), plane(heads, tokens, dim, dtype, 2))
        cached = (plane(heads, tokens, dim, dtype, 3), plane(heads, tokens, dim, dtype, 4))
        k, v = ((wide(fresh[which]) - wide(cached[which])) ** 2 for which in (0, 1))
        expected = {Metric.K: k.sum((0, 2)), Metric.V: v.sum((0, 2)), Metric.BOTH: (k + v).sum((0, 2))}
        for metric in Metric:
            found = deviation_of(fresh, cached, metric)
            assert found.dtype == torch.float32
            np.testing.assert_allclose(wide(found), expected[metric], rtol=1e-5)


def test_the_highest_come_ascending_and_ties_go_to_the_earlier() -> None:
    scores = torch.tensor([1.0, 5.0, 5.0, 0.0, 5.0, 2.0])
    assert highest(scores, 2).tolist() == [1, 2]
    assert highest(scores, 4).tolist() == [1, 2, 4, 5]
    assert highest(scores, 0).tolist() == []
    assert highest(torch.zeros(3000), 7).tolist() == list(range(7))
    assert highest(torch.tensor([1.0, float("nan"), 2.0]), 1).tolist() == [1]


@pytest.mark.parametrize("tokens", TOKENS)
def test_the_highest_equal_a_plain_sort(tokens: int) -> None:
    scores = torch.randint(0, 20, (tokens,), generator=torch.Generator().manual_seed(tokens)).float()
    for ratio in (0.0, 0.15, 1.0):
        count = row_count(ratio, tokens)
        order = sorted(range(tokens), key=lambda token: (-float(scores[token]), token))
        assert highest(scores, count).tolist() == sorted(order[:count])


def test_survivors_only_are_chosen_among() -> None:
    among = torch.tensor([3, 8, 20, 21])
    assert highest(torch.tensor([1.0, 4.0, 2.0, 4.0]), 2, among).tolist() == [8, 21]
    with pytest.raises(InvalidRequest, match="among"):
        highest(torch.zeros(3), 1, among)


def test_selectors() -> None:
    moved, mass = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([9.0, 0.0, 2.0, 1.0])
    assert highest(scores_of(Selector.DEVIATION, deviation=moved), 2).tolist() == [2, 3]
    assert highest(scores_of(Selector.SUFFIX_ATTENTION, attention=mass), 2).tolist() == [0, 2]
    assert highest(scores_of(Selector.PRODUCT, deviation=moved, attention=mass), 2).tolist() == [0, 2]
    starts = torch.tensor([0, 4, 9])
    assert highest(scores_of(Selector.FIRST, chunk_starts=starts, token_count=12), 5).tolist() == [0, 1, 4, 5, 9]
    picks = [highest(scores_of(Selector.RANDOM, token_count=1000, seed=seed), 100).tolist() for seed in (1, 1, 2)]
    assert picks[0] == picks[1] != picks[2]
    assert 350 < np.mean(picks[0]) < 650
    with pytest.raises(InvalidRequest, match="attention"):
        scores_of(Selector.PRODUCT, deviation=moved)
    with pytest.raises(InvalidRequest, match="chunk_starts"):
        scores_of(Selector.FIRST, chunk_starts=torch.tensor([1, 4]), token_count=12)


def test_ratios() -> None:
    assert [row_count(ratio, 100) for ratio in (0.0, 0.001, 0.15, 0.999, 1.0)] == [0, 1, 15, 100, 100]
    assert row_count(0.1, 30) == 3  # not 4, though 0.1 * 30 is above 3 in floating point
    for ratio in (-0.1, 1.1, float("nan")):
        with pytest.raises(InvalidRequest, match="ratio"):
            row_count(ratio, 10)
    ratios = gradual_ratios(0.15, 5)
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[0] > 0.15 > ratios[-1]
    assert sum(ratios) / 5 == pytest.approx(0.15)
    assert gradual_ratios(0.15, 1) == [0.15]
    assert max(gradual_ratios(1.0, 4)) == 1.0
