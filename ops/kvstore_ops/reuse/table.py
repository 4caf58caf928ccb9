"""The table: f, time, answers, tokens and KL of each row, and the row that one half of the contexts chooses."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from kvstore.planning import Recompute
from kvstore_ops.bench.result import Result, quartiles
from kvstore_ops.reuse.answers import Answers
from kvstore_ops.reuse.settings import Asked
from kvstore_ops.reuse.subject import ASKED, DTYPE, Subject

KEPT, TOKENS, KL, FASTER = 0.90, 0.97, 0.08, 2.0
RIGHT = 0.9
"""Least share of right answers after a full prefill: a task with fewer says little about reuse."""
CHOOSING, JUDGING = 0, 1
"""Half of the contexts: every other one chooses a row, and the rest judge it."""


@dataclass(frozen=True)
class Line:
    """One row of the table. ``chosen_by``: its figures on the half that chooses; ``judged``: on the other."""

    row: Asked
    share: float
    times: list[float]
    chosen_by: dict[str, float]
    judged: dict[str, float]

    @property
    def faster(self) -> float:
        return statistics.median(self.times)

    @property
    def told(self) -> str:
        from kvstore_ops.profiling.profiler import told

        return f"{self.row.origin}: {told(self.row.setting)}"


def lines_of(subject: Subject, found: Answers, times: dict[Asked, list[float]]) -> list[Line]:
    """Return a line for each row that was timed."""
    count = ASKED[subject.scale]
    return [
        Line(row, found.share(row), ratios, found.judged(row, CHOOSING, count), found.judged(row, JUDGING, count))
        for row, ratios in times.items()
    ]


def holds(figures: dict[str, float]) -> bool:
    return figures["kept"] >= KEPT and figures["tokens"] >= TOKENS and figures["kl"] <= KL


def chosen(lines: list[Line]) -> Line | None:
    """Return the fastest row that keeps what the target asks for, on the half that chooses."""
    return max((each for each in lines if holds(each.chosen_by)), key=lambda each: each.faster, default=None)


def shown(lines: list[Line]) -> None:
    table = Table("reused", "f", "TTFT", "answers kept", "of", "tokens", "KL")
    for each in lines:
        figures = each.judged
        table.add_row(
            each.told, f"{each.share:.3f}", f"{each.faster:.2f}x", f"{figures['kept']:.3f}", str(figures["answers"]),
            f"{figures['tokens']:.3f}", f"{figures['kl']:.3f}",
        )  # fmt: skip
    Console().print(table)


def result_of(name: str, scale: str, subject: Subject, found: Answers, lines: list[Line]) -> Result:
    """Return the figure: f and the times of the chosen row."""
    one, right = chosen(lines), statistics.mean(found.right.values())
    ratio = one.faster if one is not None and holds(one.judged) else 0.0
    as_it_is = [each for each in lines if each.row.setting == Recompute.reuse() and each.row.origin != "preamble"]
    least = (
        as_it_is[0].judged["kl"] / 2 if as_it_is else 0.0
    )  # of documents alone: where these were not asked, no row is
    five = [each.told for each in lines if each.faster >= 5 and each.judged["kl"] <= least]
    exact = [each.share for each in lines if each.judged["kept"] >= 0.99]
    return Result(
        name=name, value=one.share if one else 1.0, unit="share of a prefill's compute (f)", limit=1.0, ratio=ratio,
        target=f">= {FASTER}, answers >= {KEPT}, tokens >= {TOKENS}, KL <= {KL}",
        met=ratio >= FASTER and right >= RIGHT, runs=len(found.right), spread=quartiles(one.times if one else [0.0]),
        conditions={
            **_conditions(scale, subject, found, lines), "right_in_full": right,
            "chosen": one.told if one else "none", "at_5x": five, "kept_0.99_at_f": min(exact, default=1.0),
            "rows": [
                {"origin": each.row.origin, "setting": asdict(each.row.setting), "f": each.share,
                 "faster": each.faster, "turns": len(each.times), **each.judged} for each in lines
            ],
        },
    )  # fmt: skip


def _conditions(scale: str, subject: Subject, found: Answers, lines: list[Line]) -> dict[str, Any]:
    lengths = sorted(len(each.tokens) for each in subject.prompts)
    return {
        "scale": scale, "model": subject.runner.spec.model_id, "why_not_pretrained": subject.why, "dtype": DTYPE,
        "prompts": len(subject.prompts), "asked": {each.told: len(found.kept[each.row]) for each in lines},
        "prompts_of_a_context": ASKED[subject.scale], "tokens": [lengths[0], lengths[-1]], "threads": 1,
    }  # fmt: skip
