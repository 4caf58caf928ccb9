"""The result of a look."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from rich.table import Column, Table

from kvstore_ops.operators.harmless import cell


class Health(StrEnum):
    """GOOD; UNSEEN: it was not looked at, and ``said`` says why; WEAK: it works, and something is lost; BAD: it does
    not."""

    GOOD = "good"
    UNSEEN = "not looked at"
    WEAK = "weak"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """One look. ``why``: why it matters; ``remedy``: exactly what to do. Both are empty where all is well."""

    subject: str
    health: Health
    said: str
    why: str = ""
    remedy: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


_STYLES = {Health.GOOD: "green", Health.UNSEEN: "dim", Health.WEAK: "yellow", Health.BAD: "red"}


def render_findings(findings: Iterable[Finding]) -> Table:
    """A line per look; what is wrong has its reason and its remedy below it."""
    table = Table("", "health", Column("", overflow="fold"), show_header=False)
    for each in findings:
        lines = cell(each.said, most=1000)
        for label, text in (("why: ", each.why), ("do: ", each.remedy)):
            if text:
                lines.append("\n" + label, style="bold").append_text(cell(text, most=1000))
        table.add_row(each.subject, cell(each.health.value, _STYLES[each.health]), lines)
    return table
