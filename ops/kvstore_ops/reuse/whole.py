"""A whole run: the answers, then the times, then the table."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

from kvstore.errors import InvalidRequest
from kvstore_ops.bench import copying as shared
from kvstore_ops.bench.result import Result, note
from kvstore_ops.profiling.run_file import RunFile
from kvstore_ops.reuse import answers, times
from kvstore_ops.reuse.settings import Asked, Asking, rounds_of
from kvstore_ops.reuse.subject import Caches, Subject
from kvstore_ops.reuse.table import lines_of, result_of, shown

TURNS = {"full": 12, "quick": 1, "tiny": 1}


def file_of(asking: Asking) -> Path:
    """Return the file of a full run's answers, in the user's cache directory."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "kvstore" / "reuse" / f"{asking}.jsonl"


class Whole:
    """One run of a benchmark. ``path``: the file of a full run's answers; that of its times lies beside it."""

    def __init__(self, asking: Asking, scale: str, *, path: Path | None = None) -> None:
        self.asking, self.scale, self._path = asking, scale, path or file_of(asking)
        self._subject = Subject(scale, asking)
        why = f" ({self._subject.why})" if self._subject.why else ""
        note(f"{asking}: {self._subject.runner.spec.model_id} answers{why}")
        layer_count = self._subject.runner.spec.layer_count
        self._rounds = rounds_of(asking, self._subject.scale, layer_count)
        self._caches = Caches(self._subject, [row for rows in self._rounds for row in rows])

    def ask(self, *, fresh: bool = False) -> None:
        """Ask a full run's prompts, or those that its file does not have."""
        with ExitStack() as stack:
            answers.answered(self._subject, self._rounds, self._caches, self._answers_file(stack, fresh=fresh))

    def table(self, *, asks: bool = True) -> Result:
        """Ask all prompts, time the rows, and show the table. What a full run's files have is not measured again, until
        the table is shown. Without ``asks`` the table is of the answers that the file has, and they are kept."""
        with ExitStack() as stack:
            files = [self._answers_file(stack)]
            if asks or files[0] is None:
                found = answers.answered(self._subject, self._rounds, self._caches, files[0])
            else:
                found = answers.Answers.of(self._rounds)
                answers.take(files[0], self._rounds, found)
            rows = found.whole_rows()
            if not rows:
                raise InvalidRequest(f"no whole answers are in {self._path} yet: run this without --times first")
            files.append(self._times_file(stack, rows))
            lines = lines_of(self.asking, self._subject, found, self._timed(rows, files[1]))
            for file in files if asks else []:
                if file is not None:
                    file.finish()
        shown(lines)
        return result_of(self.asking, self.scale, self._subject, found, lines)

    def _timed(self, rows: list[Asked], file: RunFile | None) -> dict[Asked, dict[int, list[float]]]:
        turns = times.Turns(rows, file)
        left = TURNS[self._subject.scale] - len(turns)
        if left > 0:
            with shared.ready("tiny" if self._subject.why else "full") as (_, client):
                turns.take(self._subject, self._caches, client, self._subject.lengths, left)
        return turns.ratios()

    def _answers_file(self, stack: ExitStack, *, fresh: bool = False) -> RunFile | None:
        if self._subject.scale != "full":
            return None
        return stack.enter_context(answers.run_file(self._path, self._subject, self._rounds, fresh=fresh))

    def _times_file(self, stack: ExitStack, rows: list[Asked]) -> RunFile | None:
        if self._subject.scale != "full":
            return None
        return stack.enter_context(times.run_file(self._path, self._subject, rows))


def measured(asking: Asking, scale: str) -> Result:
    """Run a benchmark in one thread, so that load beside it weighs alike on what is compared."""
    from kvstore_ops.testbed.trial import one_thread

    with one_thread():
        return Whole(asking, scale).table()
