"""Findings: the results of checks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from rich.table import Column, Table

from kvstore_ops.operators.harmless import cell
from kvstore_ops.tier_words import tier_words


class Health(StrEnum):
    """The result of a check. UNSEEN: it was not checked, and ``said`` has the reason. WEAK: it works with a drawback.
    BAD: it does not work."""

    GOOD = "good"
    UNSEEN = "not looked at"
    WEAK = "weak"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. ``why``: the effect of the problem. ``remedy``: the exact steps to take. Both are empty
    when all is well."""

    subject: str
    health: Health
    said: str
    why: str = ""
    remedy: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


_STYLES = {Health.GOOD: "green", Health.UNSEEN: "dim", Health.WEAK: "yellow", Health.BAD: "red"}


def render_findings(findings: Iterable[Finding]) -> Table:
    """Draw a line per check, with the effect and the remedy of a problem below it."""
    table = Table("", "health", Column("", overflow="fold"), show_header=False)
    for each in findings:
        lines = cell(each.said, most=1000)
        for label, text in (("why: ", each.why), ("do: ", each.remedy)):
            if text:
                lines.append("\n" + label, style="bold").append_text(cell(text, most=1000))
        table.add_row(tier_words(each.subject), cell(each.health.value, _STYLES[each.health]), lines)
    return table
