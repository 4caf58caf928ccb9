"""The journal: the measured points of one run, a line each, written at once, so that a killed run can continue."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from kvstore.errors import Exhausted, InvalidRequest
from kvstore.planning import Recompute, Side
from kvstore.planning.profile import parsed, setting_of
from kvstore_ops.profiling.subject import Measured, Subject

FORMAT = "kvstore profile points"
VERSION = 4


class Journal:
    """An append-only file of JSON lines. The first line describes the run; a finished run ends with a mark.

    A line that was cut off by a kill is dropped. The file is locked, so that one run uses it at a time. The file of a
    finished run is emptied, so that a new run measures everything again. Raises: InvalidRequest for another run's file,
    Exhausted while another process measures.
    """

    def __init__(self, path: Path, subject: Subject, started_s: int, *, fresh: bool = False) -> None:
        self.path = path
        self.full: Measured | None = None
        self.searched: dict[Recompute, Measured] = {}
        self.judged: dict[Recompute, Measured] = {}
        self.started_s = started_s
        self._layer_count = subject.receiver.layer_count
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            self._lock()
            header = _header(subject)
            if fresh or not self._read(header):
                self._file.truncate(0)
                self.full, self.searched, self.judged, self.started_s = None, {}, {}, started_s
                self._append({**header, "started_s": started_s})
        except BaseException:
            self._file.close()
            raise

    def add_full(self, measured: Measured) -> None:
        """Keep the full prefill. It is on disk when this returns."""
        self.full = measured
        self._append({"setting": None, "judged": False, **asdict(measured)})

    def add(self, setting: Recompute, measured: Measured, *, judged: bool) -> None:
        """Keep a measured setting, which is on disk when this returns. ``judged``: it was measured on the contexts for
        the figures, else on those of the search."""
        (self.judged if judged else self.searched)[setting] = measured
        self._append({"setting": asdict(setting), "judged": judged, **asdict(measured)})

    def finish(self) -> None:
        self._append({"finished": True})

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

    def _append(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _read(self, header: dict[str, Any]) -> bool:
        """Read the file. True when it has an unfinished run of the same kind to continue."""
        self._file.seek(0)
        text = self._file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._file.truncate(len(whole))
        lines = [self._parsed(line, number) for number, line in enumerate(whole.splitlines(), start=1)]
        if not lines or lines[-1].get("finished"):
            return False
        self.started_s = int(lines[0].pop("started_s", 0))
        if lines[0] != header:
            differing = [name for name in header if lines[0].get(name) != header[name]]
            raise InvalidRequest(
                f"{self.path} is an unfinished run of another kind (its {', '.join(differing)} differ): finish it with "
                "the arguments it had, begin anew with --fresh, or give another --out"
            )
        for number, line in enumerate(lines[1:], start=2):
            self._take(line, number)
        return True

    def _parsed(self, line: bytes, number: int) -> dict[str, Any]:
        found = parsed(line.decode(errors="replace"), f"{self.path}, line {number},")
        if not isinstance(found, dict):
            raise InvalidRequest(f"{self.path}, line {number}: not an object; begin anew with --fresh")
        return found

    def _take(self, line: dict[str, Any], number: int) -> None:
        what = f"{self.path}, line {number}"
        try:
            beside = (None if line[name] is None else float(line[name]) for name in ("tokens", "kl"))
            kept = (tuple(map(float, line["by_context"])), float(line["share"]), float(line["misled"]))
            measured = Measured(*kept, *beside)
            setting, judged = line["setting"], line["judged"]
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidRequest(f"{what}: not a measured point; begin anew with --fresh") from error
        if setting is None:
            self.full = measured
        else:
            (self.judged if judged else self.searched)[setting_of(setting, self._layer_count, what)] = measured


def _header(subject: Subject) -> dict[str, Any]:
    calibration = asdict(subject.calibration)
    return {
        "format": FORMAT,
        "version": VERSION,
        "receiver": asdict(Side.of(subject.receiver)),
        "sender": subject.sender and asdict(Side.of(subject.sender)),
        "reuse": subject.reuse,
        "origin": subject.origin.value,
        "calibration": {**calibration, "seeds": list(calibration["seeds"])},
    }
