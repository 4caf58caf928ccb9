"""``kvstore profile``: parse, measure, write, show."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.seams import SystemClock
from kvstore_ops.profiling.picture import plot, table, verdict
from kvstore_ops.profiling.profiler import default_path, journal_of, profile
from kvstore_ops.profiling.subject import TestbedSubject
from kvstore_ops.testbed import Seeds, calibration, evaluation


def run(
    receiver: str, sender: str | None, reuse: str | None, contexts: int, rounds: int, floor: float, seeds: str,
    out: Path | None, *, fresh: bool, as_json: bool,
) -> None:  # fmt: skip
    """Raises: InvalidRequest naming the argument; Exhausted while another process measures the same; Unavailable when
    the output cannot be written."""
    if not 0.0 <= floor <= 1.0:
        raise InvalidRequest(f"--floor {floor} must be in 0..1")
    kind = reuse or ("position" if sender is None else "sibling")
    if kind not in ("position", "sibling", "both"):
        raise InvalidRequest(f"--reuse {kind!r:.40} must be position, sibling or both")
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # operations this small wait longer for a second thread than they compute
    try:
        subject = TestbedSubject(receiver, kind, sender, _seeds(seeds), contexts)  # type: ignore[arg-type]
        path = out or default_path(subject)
        with _progress() as progress:
            found = profile(
                subject, path, progress, started_s=int(SystemClock().wall()), rounds=rounds, fresh=fresh
            )  # fmt: skip
        picture = path.with_suffix(".png")
        plot(found, floor, picture)
    except OSError as error:
        raise Unavailable(f"{error.filename or out}: {error.strerror}; give another --out") from error
    finally:
        torch.set_num_threads(before)
    if as_json:
        print(found.profile.to_json(), end="")
        return
    console = Console()
    console.print(table(found.profile, floor))
    console.print(f"{verdict(found.profile, floor)} ({len(found.points)} settings measured)")
    console.print(f"profile {path}\nplot    {picture}\npoints  {journal_of(path)}", soft_wrap=True)


def _seeds(name: str) -> Seeds:
    """Seeds by purpose; it is the subject that refuses those that must not choose."""
    known = {"calibration": calibration, "evaluation": evaluation}
    if name not in known:
        raise InvalidRequest(f"--seeds {name!r:.40} must be calibration")
    return known[name]()


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("contexts"),
        TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn(), console=Console(stderr=True),
    )  # fmt: skip
