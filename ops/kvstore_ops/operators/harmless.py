"""Names that others chose (model ids, digests, reasons), fit for a terminal: no control character moves the cursor or
changes a colour, and no bracket is taken for markup."""

from __future__ import annotations

import unicodedata

from rich.text import Text

CHARACTERS_MAX = 200
REASON_CHARACTERS_MAX = 1000
_UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
"""Categories that show nothing of themselves, or change how others are shown: controls, direction marks."""


def plain(text: str, most: int = CHARACTERS_MAX) -> str:
    """One line: what does not show is written as its number, what is too long is cut."""
    shown = "".join(_escaped(each) if unicodedata.category(each) in _UNSEEN else each for each in text[: most + 1])
    return shown if len(text) <= most else f"{shown[:most]}..."


def cell(text: str, style: str = "", most: int = CHARACTERS_MAX) -> Text:
    """The same for a table. A ``str`` there would be read as markup."""
    return Text(plain(text, most), style=style)


def _escaped(character: str) -> str:
    return f"\\u{ord(character):04x}"
