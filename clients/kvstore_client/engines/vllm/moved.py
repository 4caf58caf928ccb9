"""Counts what one worker moves between the sidecar and its pages, until it is asked. Any thread may add to it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

TIMES_MAX = 1024
"""The most loads, and mends, whose seconds are kept until the next question; those of any more only count."""


class Count(NamedTuple):
    """A number that only grows, or seconds that are listed one by one. ``words`` say what of."""

    name: str
    words: str


COUNTS = (
    Count("loads", "Prompts loaded by kvstore, each once per rank."),
    Count("load_tokens", "Tokens loaded by kvstore, each once per rank."),
    Count("load_bytes", "Bytes loaded by kvstore into the pages of all ranks."),
    Count("failed_loads", "Loads by kvstore that failed or came too late, each once per rank; vLLM computed them."),
    Count("mends", "Prompts that kvstore computed over the caches of documents."),
    Count("mend_reused_tokens", "Tokens of these whose caches were reused, as they were or mended."),
    Count("mend_computed_tokens", "Tokens of these that were computed; reused ones that were mended by their share."),
    Count("failed_mends", "Prompts whose documents were gone, or could not be computed over; vLLM computed them."),
    Count("saves", "Prompts, or parts of them, copied to kvstore, each once per rank."),
    Count("save_tokens", "Tokens copied to kvstore, each once per rank."),
    Count("dropped_saves", "Prompts, or parts of them, that kvstore did not keep, each once per rank."),
)
SECONDS, MEND_SECONDS = "load_seconds", "mend_seconds"
TIMES = (
    Count(SECONDS, "Seconds that a load by kvstore took, from its begin to its end."),
    Count(MEND_SECONDS, "Seconds that kvstore computed a prompt over documents; all requests of the step waited."),
)


class Moved:
    """The counts of one worker."""

    def __init__(self) -> None:
        self._adding = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._seconds: dict[str, list[float]] = {}

    def loaded(self, token_count: int, byte_count: int, seconds: float) -> None:
        """Count a load that brought its tokens."""
        with self._adding:
            self._counts.update(loads=1, load_tokens=token_count, load_bytes=byte_count)
            self._took(SECONDS, seconds)

    def mended(self, reused: int, computed: int, seconds: float) -> None:
        """Count a prompt that was computed over ``reused`` tokens of documents and of its prefix."""
        with self._adding:
            self._counts.update(mends=1, mend_reused_tokens=reused, mend_computed_tokens=computed)
            self._took(MEND_SECONDS, seconds)

    def _took(self, name: str, seconds: float) -> None:
        times = self._seconds.setdefault(name, [])
        if len(times) < TIMES_MAX:
            times.append(seconds)

    def saved(self, token_count: int) -> None:
        """Count a save whose pages were copied."""
        with self._adding:
            self._counts.update(saves=1, save_tokens=token_count)

    def add(self, name: str) -> None:
        """Count one more of ``name``: a failed load or mend, or a dropped save."""
        with self._adding:
            self._counts[name] += 1

    def take(self) -> dict[str, Any]:
        """Return what was counted since the last call, as plain data: what did not move is left out."""
        with self._adding:
            told: dict[str, Any] = {**self._counts, **self._seconds}
            self._counts, self._seconds = Counter(), {}
        return told


def summed(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sum of what two workers counted, or one worker twice."""
    sums = dict(one)
    for name, value in other.items():
        sums[name] = sums[name] + value if name in sums else value
    return sums


def in_few_numbers(told: Mapping[str, Any]) -> dict[str, int | float]:
    """Return what was counted, and how long loads and mends took, for a line of a log."""
    found: dict[str, int | float] = {count.name: told[count.name] for count in COUNTS if count.name in told}
    for each in TIMES:
        if seconds := told.get(each.name):
            what = each.name.removesuffix("_seconds")
            found[f"mean_{what}_ms"] = round(sum(seconds) / len(seconds) * 1e3, 1)
            found[f"longest_{what}_ms"] = round(max(seconds) * 1e3, 1)
    return found
