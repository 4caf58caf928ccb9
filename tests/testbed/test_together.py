"""Contexts computed together: the same logits and the same f as the client's pass has, context by context."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kvstore_ops.testbed import calibration, contexts
from kvstore_ops.testbed.trial import Reuse, Trial, one_thread

from kvstore.planning import Recompute

FROM_EMBEDDINGS = (
    Recompute.reuse(),
    Recompute.full(6),
    Recompute.droidspeak(0, 2),
    Recompute(0, -1, 0.3, "suffix_attention", gradual=0.6),
    Recompute(0, -1, 0.15, "random"),
    Recompute(0, 4, 0.2, "first"),
    Recompute(0, 1, 0.25, "product", "k"),
    Recompute(0, 1, 0.25, "deviation", "v", gradual=0.3),
    Recompute(0, 5, 0.2),
    Recompute(0, 1, 1.0),
)
FROM_E = (
    Recompute.droidspeak(1, 3),
    Recompute(2, 3, 0.15, "product", gradual=0.3),
    Recompute(2, 1, 0.2, "suffix_attention"),
    Recompute(2, 1, 0.2, "suffix_peak"),
    Recompute(3, 2, 0.25),
)


@pytest.fixture(autouse=True)
def single() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.parametrize(("reuse", "sender"), [("position", None), ("sibling", "l6-s2-plus3"), ("both", "l6-s2-plus3")])
@torch.inference_mode()
def test_together_is_one_by_one(reuse: Reuse, sender: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore_ops.testbed.trial.TOGETHER", 3)
    trial = Trial("l6-s2", contexts(calibration(), 8), reuse, sender)
    those = range(1, 5)
    naive = trial.answers(Recompute.reuse(), those)[0]
    for setting in (*FROM_EMBEDDINGS, *(FROM_E if sender else ())):
        alone = [trial.one(index, setting) for index in those]
        done: list[int] = []
        logits, share = trial.answers(setting, those, done.append)
        torch.testing.assert_close(logits, torch.stack([each.logits for each in alone]), rtol=1e-4, atol=1e-4)
        assert share == pytest.approx(sum(each.share for each in alone) / len(alone))
        assert done == [3, 4]
        if share:
            assert (logits - naive).abs().max() > 0.1


def test_keys_that_are_not_rotated_are_left_so_together_too() -> None:
    trial = Trial("l6-s2", contexts(calibration(), 8), "position")
    setting = Recompute(0, 0, 0.2, "product")
    found = [trial.answers(setting, range(2), turned=turned)[0] for turned in (False, True)]
    alone = torch.stack([trial.one(index, setting, turned=False).logits for index in range(2)])
    torch.testing.assert_close(found[0], alone, rtol=1e-4, atol=1e-4)
    assert (found[0] - found[1]).abs().max() > 0.1
