"""The generated texts: whole pages, and the figures in the README."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvstore_ops.pages import benchmarks, configuration, metrics

ROOT = Path(__file__).resolve().parents[3]

MADE: dict[str, Callable[[str], str]] = {
    "docs/configuration.md": lambda _: configuration.render(),
    "docs/metrics.md": lambda _: metrics.render_metrics(),
    "docs/benchmarks.md": lambda _: benchmarks.render(benchmarks.read(ROOT)),
    "README.md": lambda text: benchmarks.with_headlines(text, benchmarks.read(ROOT)),
}
"""Functions that return the right text of a file, given its present text, by the file's path."""


def outdated() -> dict[str, str]:
    """Return the right text of each outdated page, by its path."""
    right = {}
    for path, make in MADE.items():
        file = ROOT / path
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        made = make(text)
        if made != text:
            right[path] = made
    return right


def write() -> list[str]:
    """Write all outdated pages, and return their paths."""
    right = outdated()
    for path, text in right.items():
        (ROOT / path).write_text(text, encoding="utf-8")
    return list(right)
