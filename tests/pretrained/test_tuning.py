"""The sibling: another model in every layer, whole or not there."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from kvstore_ops.pretrained import Absent, sibling, tuning
from kvstore_ops.pretrained.questions import Question
from kvstore_ops.pretrained.tuning import make_sibling, tune

from kvstore.errors import InvalidRequest
from tests.pretrained.test_pretrained import whole
from tests.recompute.models import VOCABULARY, model_of


def prompts(count: int) -> list[Question]:
    draw = random.Random(5)
    rows = [tuple(draw.randrange(VOCABULARY) for _ in range(30)) for _ in range(count)]
    return [Question(row[:4], (row[4:20],), row[20:], (7, 9)) for row in rows]


def test_every_layers_weights_change_and_the_answers_follow() -> None:
    base = model_of("llama", num_hidden_layers=2)
    tuned = copy.deepcopy(base)
    losses: list[float] = []
    torch.manual_seed(0)
    tune(tuned, prompts(40), lambda _, loss: losses.append(loss), rate=2e-2)
    assert sum(losses[-5:]) < sum(losses[:5]) / 2
    before, after = base.state_dict(), tuned.state_dict()
    assert before.keys() == after.keys()  # nothing of the fine-tuning is left in the model
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    projections = {name for name in before if any(f".{each}.weight" in name for each in tuning.ADAPTED)}
    assert changed == projections
    assert len(projections) == 14
    assert loss_of(tuned) < loss_of(base) / 2  # with the additions merged into its weights


def loss_of(model: Any) -> float:
    """The loss of the answers over some prompts."""
    total = 0.0
    for each in prompts(8):
        with torch.inference_mode():
            logits = model(torch.tensor([[*each.tokens, *each.answer]])).logits[0, -3:-1]
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(each.answer)))
    return total


def test_without_the_model_there_is_no_sibling_and_the_remedies_are_said(tmp_path: Path) -> None:
    target = tmp_path / "sibling"
    absent = sibling(target)
    assert isinstance(absent, Absent)
    assert "pretrained sibling makes it" in str(absent)
    with pytest.raises(InvalidRequest, match="make model"):
        make_sibling(target, tmp_path / "nothing")
    base = whole(tmp_path / "model")
    target.mkdir()
    (target / "mine.txt").write_text("keep me")
    with pytest.raises(InvalidRequest, match="something else in it"):
        make_sibling(target, base)
    assert (target / "mine.txt").read_text() == "keep me"


def test_a_sibling_that_was_not_finished_is_not_there(tmp_path: Path) -> None:
    base = whole(tmp_path / "model")  # nothing that could be loaded
    with pytest.raises((OSError, ValueError)):
        make_sibling(tmp_path / "sibling", base)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model"]
    assert (
        make_sibling(whole(tmp_path / "sibling"), base) == tmp_path / "sibling"
    )  # one that is whole is not made again
