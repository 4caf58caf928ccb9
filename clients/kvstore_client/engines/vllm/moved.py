"""Counts what one worker moves between the sidecar and its pages, until it is asked. Any thread may add to it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

LOADS_MAX = 1024
"""The most loads whose seconds are kept until the next question; those of any more only count."""
SECONDS = "load_seconds"
"""The one entry that is a list: of each load that brought its tokens, the seconds from its begin to its end."""


class Count(NamedTuple):
    """A number that only grows. ``words`` say what of."""

    name: str
    words: str


COUNTS = (
    Count("loads", "Prompts loaded by kvstore, each once per rank."),
    Count("load_tokens", "Tokens loaded by kvstore, each once per rank."),
    Count("load_bytes", "Bytes loaded by kvstore into the pages of all ranks."),
    Count("failed_loads", "Loads by kvstore that failed or came too late, each once per rank; vLLM computed them."),
    Count("mends", "Prompts that kvstore computed over the caches of documents."),
    Count("mend_reused_tokens", "Tokens of these whose caches were reused, as they were or mended."),
    Count("failed_mends", "Prompts that kvstore could not compute over documents; vLLM computed them."),
    Count("saves", "Prompts, or parts of them, copied to kvstore, each once per rank."),
    Count("save_tokens", "Tokens copied to kvstore, each once per rank."),
    Count("dropped_saves", "Prompts, or parts of them, that kvstore did not keep, each once per rank."),
)


class Moved:
    """The counts of one worker."""

    def __init__(self) -> None:
        self._adding = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._seconds: list[float] = []

    def loaded(self, token_count: int, byte_count: int, seconds: float) -> None:
        """Count a load that brought its tokens."""
        with self._adding:
            self._counts.update(loads=1, load_tokens=token_count, load_bytes=byte_count)
            if len(self._seconds) < LOADS_MAX:
                self._seconds.append(seconds)

    def mended(self, reused: int) -> None:
        """Count a prompt that was computed over ``reused`` tokens of documents and of its prefix."""
        with self._adding:
            self._counts.update(mends=1, mend_reused_tokens=reused)

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
            told: dict[str, Any] = dict(self._counts)
            if self._seconds:
                told[SECONDS] = self._seconds
            self._counts, self._seconds = Counter(), []
        return told


def summed(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sum of what two workers counted, or one worker twice."""
    sums = {name: one.get(name, 0) + other.get(name, 0) for name in {*one, *other} - {SECONDS}}
    seconds = [*one.get(SECONDS, ()), *other.get(SECONDS, ())]
    return {**sums, SECONDS: seconds} if seconds else sums


def in_few_numbers(told: Mapping[str, Any]) -> dict[str, int | float]:
    """Return what was counted, and how long loads took, for a line of a log."""
    found: dict[str, int | float] = {count.name: told[count.name] for count in COUNTS if count.name in told}
    if seconds := told.get(SECONDS):
        found["mean_load_ms"] = round(sum(seconds) / len(seconds) * 1e3, 1)
        found["longest_load_ms"] = round(max(seconds) * 1e3, 1)
    return found
