"""A result that several figures decide shows each of them beside its bound, so that a reader sees which one missed."""

from __future__ import annotations

from kvstore_ops.bench.result import Goal, judged_by, verdict_line


def test_each_figure_is_shown_and_one_that_misses_is_named() -> None:
    judged = judged_by(
        Goal("tensors", 1.43, 0.95), Goal("verify", 0.64996, 0.65), Goal("p99", 1.2, 1.25, is_upper=True)
    )
    assert judged == {
        "target": "tensors >= 0.95 (1.43); verify >= 0.65 (0.65, missed); p99 <= 1.25 (1.2)", "met": False,
    }  # fmt: skip
    assert judged_by(Goal("tensors", 0.95, 0.95), Goal("p99", 1.25, 1.25, is_upper=True))["met"]


def test_the_line_for_people_says_whether_the_target_was_met() -> None:
    result = {"name": "remote", "ratio": 0.738, "target": ">= 0.7", "met": True}
    assert verdict_line(result) == "remote: ratio 0.738; target >= 0.7: met"
    assert verdict_line({**result, "met": False}).endswith("NOT met")
    assert verdict_line({**result, "target": "none"}) == "remote: ratio 0.738"
