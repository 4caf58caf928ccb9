"""Writes what ``make gpu`` found: one JSON file, and one table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvstore_ops.gpu.process import Outcome

COLUMNS = ("part", "figure", "limit", "ratio", "target", "met", "seconds")
WIDTH = 160


def write(path: Path, told: Mapping[str, Any], outcomes: Sequence[Outcome]) -> None:
    """Write all that is known so far. ``told``: commit, day, machine and hardware."""
    found = {**told, "parts": [asdict(each) for each in outcomes]}
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def show(told: Mapping[str, Any], outcomes: Sequence[Outcome]) -> None:
    """Print the table, and the ends of the output of what failed or was cut."""
    hardware = told["hardware"]
    card = "; ".join(", ".join(each.values()) for each in hardware["gpus"]) or "no GPU"
    made = ", ".join(
        f"{name} {hardware[name]}" for name in ("torch", "cuda", "triton", "transformers") if hardware[name]
    )
    table = Table(*COLUMNS, title=f"{told['commit']}, {told['date']}: {card}; {made}", title_justify="left")
    for outcome in outcomes:
        for row in _rows(outcome):
            table.add_row(*row)
    console = Console(width=WIDTH)
    for outcome in outcomes:
        if outcome.state != "done":
            console.print(f"--- {outcome.name}: {outcome.state}", markup=False)
            console.print(outcome.tail, markup=False, highlight=False)
    console.print(table)
    for outcome in outcomes:
        for what, why in outcome.result.get("conditions", {}).get("errors", {}).items():
            console.print(f"{outcome.name}: {what}: {why}", markup=False, highlight=False)
    console.print(hardware["machine"], markup=False)


def _rows(outcome: Outcome) -> Iterator[Sequence[str]]:
    """Yield a row of tests; or a row for each case of a benchmark, which has one of its own or names them."""
    result, seconds = outcome.result, f"{outcome.seconds:.0f}"
    if outcome.state == "cut":
        yield outcome.name, f"cut at {outcome.limit_s:.0f} s", "", "", "", "no", seconds
    elif "passed" in result:
        figure = f"{result['passed']} passed, {result['failed']} failed, {result['skipped']} skipped"
        yield outcome.name, figure, "", "", "none fails", _yes(not result["failed"]), seconds
    elif not result or "value" not in result:
        yield outcome.name, outcome.state, "", "", "", "no", seconds
    else:
        cases: Mapping[str, Any] = result.get("conditions", {}).get("cases", {"": result})
        for case, found in cases.items():
            yield (f"{outcome.name} {case}".strip(), *_case({"unit": result["unit"], **found}), seconds)
            seconds = ""


def _case(found: Mapping[str, Any]) -> tuple[str, str, str, str, str]:
    """Return figure, limit, ratio, target and met. A case without a target is not judged."""
    unit, limit, target = found["unit"], found.get("limit"), str(found.get("target", ""))
    beside = (_figure(limit, unit), f"{found['ratio']:.3f}") if limit else ("", "")
    return _figure(found["value"], unit), *beside, target, _yes(found.get("met", False)) if target else ""


def _figure(value: float, unit: str) -> str:
    is_rate = unit.endswith("/s") and value >= 1e6
    return f"{value / 1e9:,.2f} G{unit}" if is_rate else f"{value:.4g} {unit}"


def _yes(met: bool) -> str:
    return "yes" if met else "no"
