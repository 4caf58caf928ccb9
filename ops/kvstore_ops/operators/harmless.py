"""Makes text from others (model ids, digests, reasons) safe for a terminal: no control character moves the cursor or
changes a colour, and no bracket is taken for markup."""

from __future__ import annotations

import unicodedata

from rich.text import Text

CHARACTERS_MAX = 200
REASON_CHARACTERS_MAX = 1000
_UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
"""Unicode categories of characters that are invisible, or change the display of others: controls, direction marks."""


def plain(text: str, most: int = CHARACTERS_MAX) -> str:
    """Return the text as one line of at most ``most`` characters, with invisible characters escaped."""
    shown = "".join(_escaped(each) if unicodedata.category(each) in _UNSEEN else each for each in text[: most + 1])
    return shown if len(text) <= most else f"{shown[:most]}..."


def cell(text: str, style: str = "", most: int = CHARACTERS_MAX) -> Text:
    """Return the text for a table cell. A table would read a ``str`` as markup."""
    return Text(plain(text, most), style=style)


def reason_of(error: Exception) -> str:
    """Return why a file cannot be read, without the kernel's number and the path, which the caller's message has."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _escaped(character: str) -> str:
    return f"\\u{ord(character):04x}"
