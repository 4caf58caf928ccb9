"""The names of tiers as people read them. Documents and options say memory; JSON, metrics and logs have the wire's name
of that tier, ``dram``."""

from __future__ import annotations

import re

_MEMORY = re.compile(r"\bdram\b")


def tier_words(text: str) -> str:
    """Return a tier's name, or words with one in them, as a table has it."""
    return _MEMORY.sub("memory", text)
