"""The journal: the measured points of one profile's run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from kvstore.errors import InvalidRequest
from kvstore.planning import Recompute, Side
from kvstore.planning.profile import setting_of
from kvstore_ops.profiling.run_file import RunFile
from kvstore_ops.profiling.subject import Measured, Subject

FORMAT = "kvstore profile points"
VERSION = 4


class Journal:
    """The points of one run, in its ``RunFile``. Raises: as that does."""

    def __init__(self, path: Path, subject: Subject, started_s: int, *, fresh: bool = False) -> None:
        self.path = path
        self.full: Measured | None = None
        self.searched: dict[Recompute, Measured] = {}
        self.judged: dict[Recompute, Measured] = {}
        self._layer_count = subject.receiver.layer_count
        self._file = RunFile(path, _header(subject), started_s, fresh=fresh)
        self.started_s = self._file.started_s
        try:
            for number, line in enumerate(self._file.found, start=2):
                self._take(line, number)
        except BaseException:
            self._file.close()
            raise

    def add_full(self, measured: Measured) -> None:
        """Keep the full prefill. It is on disk when this returns."""
        self.full = measured
        self._file.add({"setting": None, "judged": False, **asdict(measured)})

    def add(self, setting: Recompute, measured: Measured, *, judged: bool) -> None:
        """Keep a measured setting, which is on disk when this returns. ``judged``: it was measured on the contexts for
        the figures, else on those of the search."""
        (self.judged if judged else self.searched)[setting] = measured
        self._file.add({"setting": asdict(setting), "judged": judged, **asdict(measured)})

    def finish(self) -> None:
        self._file.finish()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
