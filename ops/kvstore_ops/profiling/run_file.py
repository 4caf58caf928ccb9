"""The file of a long run: its findings, a line each, written at once, so that a killed run goes on where it was."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any, Self

from kvstore.errors import Exhausted, InvalidRequest
from kvstore.planning.profile import parsed


class RunFile:
    """An append-only file of JSON lines. The first line describes the run; a finished run ends with a mark.

    ``found``: the lines of the unfinished run that goes on; empty for a new run. ``started_s``: when that run began,
    wall time in seconds. A line that was cut off by a kill is dropped. The file is locked, so that one run uses it at a
    time. The file of a finished run is emptied, so that a new run measures everything again. Raises: InvalidRequest for
    another run's file and for a file of something else, Exhausted while another process measures.
    """

    def __init__(self, path: Path, header: dict[str, Any], started_s: int, *, fresh: bool = False) -> None:
        self.path, self.started_s = path, started_s
        self.found: list[dict[str, Any]] = []
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            self._lock()
            self._check_whose(header)
            if fresh or not self._goes_on(header):
                self._file.truncate(0)
                self.add({**header, "started_s": started_s})
        except BaseException:
            self._file.close()
            raise

    def add(self, line: dict[str, Any]) -> None:
        """Keep a finding, which is on disk when this returns."""
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self) -> None:
        self.add({"finished": True})

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Exhausted(
                f"{self.path}: another process is measuring into it; wait, or give another --out"
            ) from error

    def _check_whose(self, header: dict[str, Any]) -> None:
        """Leave a file alone that is no run's of this format. A first line that a kill cut off begins as ours does."""
        self._file.seek(0)
        first, end, _ = self._file.read().partition(b"\n")
        begin = json.dumps(header).encode()[:-1]
        if not end and (begin.startswith(first) or first.startswith(begin)):
            return
        try:
            found = json.loads(first) if end else None
        except ValueError:
            found = None
        if not isinstance(found, dict) or found.get("format") != header["format"]:
            raise InvalidRequest(f"{self.path} is no file of {header['format']}: it stays as it is; give another --out")

    def _goes_on(self, header: dict[str, Any]) -> bool:
        """Read the file. True when it has an unfinished run of the same kind."""
        self._file.seek(0)
        text = self._file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._file.truncate(len(whole))
        lines = [self._parsed(line, number) for number, line in enumerate(whole.splitlines(), start=1)]
        if not lines or lines[-1].get("finished"):
            return False
        started_s = int(lines[0].pop("started_s", 0))
        if lines[0] != header:
            differing = [name for name in header if lines[0].get(name) != header[name]]
            raise InvalidRequest(
                f"{self.path} is an unfinished run of another kind (its {', '.join(differing)} differ): finish it with "
                "the arguments it had, begin anew with --fresh, or give another --out"
            )
        self.started_s, self.found = started_s, lines[1:]
        return True

    def _parsed(self, line: bytes, number: int) -> dict[str, Any]:
        found = parsed(line.decode(errors="replace"), f"{self.path}, line {number},")
        if not isinstance(found, dict):
            raise InvalidRequest(f"{self.path}, line {number}: not an object; begin anew with --fresh")
        return found
