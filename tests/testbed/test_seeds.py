"""Calibration and evaluation seeds: disjoint, and never taken for one another."""

from __future__ import annotations

import pytest
from kvstore_ops.testbed import Seeds, calibration, contexts, evaluation
from kvstore_ops.testbed.models import RECIPES

from kvstore.errors import InvalidRequest


def test_calibration_evaluation_and_training_share_no_seed() -> None:
    training = {recipe.seed for recipe in RECIPES.values()}
    assert not set(calibration().numbers) & set(evaluation().numbers)
    assert not training & {*calibration().numbers, *evaluation().numbers}


def test_evaluation_seeds_do_not_choose() -> None:
    assert calibration().to_choose_with() == calibration()
    with pytest.raises(InvalidRequest, match=str(evaluation().numbers[0])):
        evaluation().to_choose_with()


def test_evaluation_seeds_cannot_pass_as_calibration() -> None:
    number = evaluation().numbers[0]
    with pytest.raises(InvalidRequest, match=rf"\[{number}\] are not committed for calibration"):
        Seeds("calibration", (calibration().numbers[0], number))
    with pytest.raises(InvalidRequest, match=r"\[7\]"):
        Seeds("evaluation", (7,))
    with pytest.raises(InvalidRequest, match="choose from"):
        Seeds("calibration", ())
    with pytest.raises(InvalidRequest, match="purpose"):
        Seeds("training", (1,))  # type: ignore[arg-type]


def test_contexts_come_from_every_seed_and_fewer_begin_the_more() -> None:
    few, many = contexts(calibration(), 8), contexts(calibration(), 16)
    assert (few.tokens == many.tokens[::2]).all()
    assert (contexts(evaluation(), 8).tokens != few.tokens).any()
    with pytest.raises(InvalidRequest, match="count is 9"):
        contexts(calibration(), 9)
