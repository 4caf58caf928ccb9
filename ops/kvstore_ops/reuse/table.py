"""The table: f, time, answers, tokens and KL of each row, and the row that one half of the contexts chooses."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from kvstore.planning import Recompute
from kvstore_ops.bench.result import Result, quartiles
from kvstore_ops.reuse.answers import Answers, Figures, Mean
from kvstore_ops.reuse.settings import Asked, Asking
from kvstore_ops.reuse.subject import Subject

KEPT, TOKENS, KL, FASTER = 0.90, 0.97, 0.08, 2.0
RIGHT = 0.9
"""Least share of right answers after a full prefill: a task with fewer says little about reuse."""
ERRORS = 2
"""Standard errors that are taken off before a row may be chosen, as profiles do: else the fastest row is chosen for its
luck, and misses where it is judged."""
CHOOSING, JUDGING = (0,), (1,)
"""Half of the contexts: every other one chooses a row, and the rest judge it. All of them judge prompts that are asked
anew: the first row was chosen before."""


@dataclass(frozen=True)
class Line:
    """One row of the table. ``by_tokens``: {tokens of a prompt: by how much each turn was faster}. ``chosen_by``: its
    figures on the half of the contexts that chooses; ``judged``: on the other. None: none of them chooses."""

    row: Asked
    share: float
    by_tokens: dict[int, list[float]]
    chosen_by: Figures | None
    judged: Figures

    @property
    def times(self) -> list[float]:
        return [each for ratios in self.by_tokens.values() for each in ratios]

    @property
    def faster(self) -> float:
        return statistics.median(self.times)

    def as_dict(self) -> dict[str, Any]:
        chosen_by = {} if self.chosen_by is None else {"chosen_by": self.chosen_by.as_dict()}
        return {
            "origin": self.row.origin, "setting": asdict(self.row.setting), "f": self.share, "faster": self.faster,
            "turns": len(self.times),
            "faster_by_tokens": {count: statistics.median(found) for count, found in self.by_tokens.items()},
            **self.judged.as_dict(), **chosen_by,
        }  # fmt: skip

    @property
    def told(self) -> str:
        from kvstore_ops.profiling.profiler import told

        return f"{self.row.origin}: {told(self.row.setting)}"


def lines_of(
    asking: Asking, subject: Subject, found: Answers, times: dict[Asked, dict[int, list[float]]]
) -> list[Line]:  # fmt: skip
    """Return a line for each row that was timed."""
    count = subject.asked
    if asking is Asking.ANEW:
        every = CHOOSING + JUDGING
        return [
            Line(row, found.share(row), ratios, None, found.judged(row, every, count)) for row, ratios in times.items()
        ]
    return [
        Line(row, found.share(row), ratios, found.judged(row, CHOOSING, count), found.judged(row, JUDGING, count))
        for row, ratios in times.items()
    ]


def holds(figures: Figures, errors: int = 0) -> bool:
    """Return whether a row keeps what the target asks for, with so many standard errors to spare."""
    return (
        figures.kept.bound(-errors) >= KEPT
        and figures.tokens.bound(-errors) >= TOKENS
        and figures.kl.bound(errors) <= KL
    )


def chosen(lines: list[Line]) -> Line | None:
    """Return the fastest row that surely keeps what the target asks for, on the half that chooses."""
    sure = (each for each in lines if each.chosen_by is not None and holds(each.chosen_by, ERRORS))
    return max(sure, key=lambda each: each.faster, default=None)


def shown(lines: list[Line]) -> None:
    table = Table("reused", "f", "TTFT", "answers kept", "of", "tokens", "KL")
    for each in lines:
        figures = each.judged
        table.add_row(
            each.told, f"{each.share:.3f}", f"{each.faster:.2f}x", _told(figures.kept), str(figures.answers),
            _told(figures.tokens), _told(figures.kl),
        )  # fmt: skip
    Console().print(table)


def _told(mean: Mean) -> str:
    return f"{mean.value:.3f} +- {mean.error:.3f}"


def result_of(asking: Asking, scale: str, subject: Subject, found: Answers, lines: list[Line]) -> Result:
    """Return the figure: f and the times of the chosen row."""
    one, right = lines[0] if asking is Asking.ANEW else chosen(lines), statistics.mean(found.right.values())
    ratio = one.faster if one is not None and holds(one.judged) else 0.0
    as_it_is = [each for each in lines if each.row.setting == Recompute.reuse() and each.row.origin != "preamble"]
    # Half the KL of documents alone, as they are; where these were not asked no row has it.
    least = as_it_is[0].judged.kl.value / 2 if as_it_is else 0.0
    five = [each.told for each in lines if each.faster >= 5 and each.judged.kl.value <= least]
    exact = [each.share for each in lines if each.judged.kept.value >= 0.99]
    return Result(
        name=asking, value=one.share if one else 1.0, unit="share of a prefill's compute (f)", limit=1.0, ratio=ratio,
        target=f">= {FASTER}, answers >= {KEPT}, tokens >= {TOKENS}, KL <= {KL}",
        met=ratio >= FASTER and right >= RIGHT, runs=len(found.right), spread=quartiles(one.times if one else [0.0]),
        conditions={
            **_conditions(scale, subject, found, lines), "right_in_full": right,
            "chosen": one.told if one else "none", "at_5x": five, "kept_0.99_at_f": min(exact, default=1.0),
            "rows": [each.as_dict() for each in lines],
        },
    )  # fmt: skip


def _conditions(scale: str, subject: Subject, found: Answers, lines: list[Line]) -> dict[str, Any]:
    lengths = sorted(len(each.tokens) for each in subject.prompts)
    return {
        "scale": scale, "model": subject.runner.spec.model_id, "why_not_pretrained": subject.why,
        "dtype": subject.dtype, "threads": 1, "tokens": [lengths[0], lengths[-1]], "prompts": len(subject.prompts),
        "prompts_of_a_context": subject.asked,
        "asked": {each.told: len(found.kept[each.row]) for each in lines},
    }  # fmt: skip
