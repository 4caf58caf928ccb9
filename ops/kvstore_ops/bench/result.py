"""The result of a benchmark: a figure, the limit that it is compared with, and the conditions of both."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(kw_only=True)
class Result:
    """``ratio``: the median of pairwise ratios. ``spread``: their quartiles. ``met``: true when the target is met."""

    name: str
    value: float
    unit: str
    limit: float
    ratio: float
    target: str
    met: bool
    runs: int
    spread: tuple[float, float]
    conditions: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain values, which are printed as the benchmark's last line."""
        rounded = {
            key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in asdict(self).items()
        }
        return {**rounded, "spread": [float(f"{each:.4g}") for each in self.spread]}


@dataclass(frozen=True)
class Goal:
    """A figure and its target, which is a lower bound; with ``is_upper`` an upper one."""

    name: str
    figure: float
    target: float
    is_upper: bool = False

    @property
    def is_met(self) -> bool:
        return self.figure <= self.target if self.is_upper else self.figure >= self.target

    def __str__(self) -> str:
        end = "" if self.is_met else ", missed"
        return f"{self.name} {'<=' if self.is_upper else '>='} {self.target:.4g} ({self.figure:.4g}{end})"


def judged_by(*goals: Goal) -> dict[str, Any]:
    """Return ``target`` and ``met`` of a result that several figures decide. The target shows each figure behind its
    bound, because ``ratio`` is only one of them."""
    return {"target": "; ".join(map(str, goals)), "met": all(each.is_met for each in goals)}


def verdict_line(result: dict[str, Any]) -> str:
    """Return the line that says to people whether a result met its target."""
    end = "" if result["target"] == "none" else f"; target {result['target']}: {'met' if result['met'] else 'NOT met'}"
    return f"{result['name']}: ratio {result['ratio']:.4g}{end}"


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the first and the third quartile."""
    if len(values) < 2:
        return (values[0], values[0])
    low, _, high = statistics.quantiles(values, n=4)
    return (low, high)


def note(text: str) -> None:
    """Print a long run's progress on stderr: the output itself is only the table and the line for machines."""
    print(text, file=sys.stderr, flush=True)


def show(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print a small table for people, before the line for machines."""
    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in rows:
        table.add_row(name, value)
    Console().print(table)
