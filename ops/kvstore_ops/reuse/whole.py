"""A whole run: the answers, then the times, then the table."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

from kvstore_ops.bench import copying as shared
from kvstore_ops.bench.result import Result, note
from kvstore_ops.reuse.answers import Answers, answered, run_file, take
from kvstore_ops.reuse.settings import Asked, rounds_of
from kvstore_ops.reuse.subject import Caches, Subject
from kvstore_ops.reuse.table import lines_of, result_of, shown
from kvstore_ops.reuse.times import timed

TURNS = {"full": 8, "quick": 1, "tiny": 1}


def file_of(name: str) -> Path:
    """Return the file of a full run's answers, in the user's cache directory."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "kvstore" / "reuse" / f"{name}.jsonl"


def measured(
    name: str, scale: str, *, is_sibling: bool = False, path: Path | None = None, asks: bool = True,
    fresh: bool = False,
) -> Result:  # fmt: skip
    """Ask all prompts, time the rows, and show the table. ``path``: the file of a full run's answers. Without ``asks``
    the table is of the answers that the file has."""
    from kvstore_ops.testbed.trial import one_thread

    subject = Subject(scale, is_sibling=is_sibling)
    note(f"{name}: {subject.runner.spec.model_id} answers{f' ({subject.why})' if subject.why else ''}")
    rounds = rounds_of(subject.scale, subject.runner.spec.layer_count, is_sibling=is_sibling)
    caches = Caches(subject, [row for rows in rounds for row in rows])
    with one_thread():
        found = _answers(subject, rounds, caches, path or file_of(name), asks=asks, fresh=fresh)
        rows = [row for row, kept in found.kept.items() if kept]
        with shared.ready("tiny" if subject.why else "full") as (_, client):
            times = timed(subject, caches, client, subject.prompts[0], rows, TURNS[subject.scale])
    lines = lines_of(subject, found, times)
    shown(lines)
    return result_of(name, scale, subject, found, lines)


def ask_all(name: str, *, is_sibling: bool, path: Path, fresh: bool) -> None:
    """Ask a full run's prompts, or those that its file does not have."""
    from kvstore_ops.testbed.trial import one_thread

    subject = Subject("full", is_sibling=is_sibling)
    note(f"{name}: {subject.runner.spec.model_id} answers{f' ({subject.why})' if subject.why else ''}")
    rounds = rounds_of(subject.scale, subject.runner.spec.layer_count, is_sibling=is_sibling)
    with one_thread():
        _answers(subject, rounds, Caches(subject, [row for rows in rounds for row in rows]), path, fresh=fresh)


def _answers(
    subject: Subject, rounds: list[list[Asked]], caches: Caches, path: Path, *, asks: bool = True, fresh: bool = False
) -> Answers:
    with run_file(path, subject, rounds, fresh=fresh) if subject.scale == "full" else nullcontext() as file:
        if file is None or asks:
            return answered(subject, rounds, caches, file)
        found = Answers.of(rounds)
        take(file, rounds, found)
        return found
