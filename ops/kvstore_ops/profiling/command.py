"""``kvstore profile``: check the arguments, measure, write the profile, and show it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.seams import SystemClock
from kvstore_ops.profiling.own import OwnSubject, local_model
from kvstore_ops.profiling.picture import plot, table, verdict
from kvstore_ops.profiling.profiler import default_path, journal_of, profile
from kvstore_ops.profiling.prompts import read_prompts
from kvstore_ops.profiling.subject import Subject, TestbedSubject
from kvstore_ops.testbed import Seeds, calibration, evaluation

CONTEXTS = 256


@dataclass(frozen=True)
class Own:
    """A model of the user: its directory, a file of prompts, and the directory of a sibling; None: no sibling."""

    model: Path
    prompts: Path
    sender: Path | None
    answer_tokens: int


def run(
    receiver: str | Own, sender: str | None, reuse: str | None, contexts: int | None, rounds: int, floor: float,
    seeds: str, out: Path | None, *, fresh: bool, as_json: bool,
) -> None:  # fmt: skip
    """Measure a profile. ``receiver``: a model of the testbed, with its ``sender`` and ``seeds``, or a model of the
    user. Raises: InvalidRequest naming the argument; Exhausted while another process measures the same; Unavailable
    when the output cannot be written."""
    if not 0.0 <= floor <= 1.0:
        raise InvalidRequest(f"--floor {floor} must be in 0..1")
    has_sender = receiver.sender is not None if isinstance(receiver, Own) else sender is not None
    kind = reuse or ("sibling" if has_sender else "position")
    if kind not in ("position", "sibling", "both"):
        raise InvalidRequest(f"--reuse {kind!r:.40} must be position, sibling or both")
    before = torch.get_num_threads()
    try:
        with _progress() as progress:
            subject: Subject
            if isinstance(receiver, Own):
                subject = _own(receiver, kind, contexts, progress)
            else:
                torch.set_num_threads(1)  # so small operations wait longer for a second thread than they compute
                subject = TestbedSubject(receiver, kind, sender, _seeds(seeds), contexts or CONTEXTS)  # type: ignore[arg-type]
            path = out or default_path(subject)
            found = profile(subject, path, progress, started_s=int(SystemClock().wall()), rounds=rounds, fresh=fresh)
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
    console.print(f"{verdict(found.profile, floor)} ({len(found.points)} settings searched to the end)")
    console.print(f"profile {path}\nplot    {picture}\npoints  {journal_of(path)}", soft_wrap=True)


def _own(own: Own, reuse: str, contexts: int | None, progress: Progress) -> OwnSubject:
    receiver, tokenizer = local_model(own.model)
    sender = None if own.sender is None else local_model(own.sender)[0]
    prompts = read_prompts(own.prompts, contexts, receiver.spec.vocab_size, tokenizer)
    task = progress.add_task("the model's own answers, after full prefills", total=len(prompts))
    subject = OwnSubject(
        receiver, sender, reuse, prompts, own.answer_tokens, lambda done: progress.update(task, completed=done)
    )  # fmt: skip
    progress.remove_task(task)
    return subject


def _seeds(name: str) -> Seeds:
    """Return the seeds of a purpose. The subject refuses evaluation seeds, which must not choose."""
    known = {"calibration": calibration, "evaluation": evaluation}
    if name not in known:
        raise InvalidRequest(f"--seeds {name!r:.40} must be calibration")
    return known[name]()


def _progress() -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("contexts"),
        TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn(), console=console,
        disable=not console.is_terminal,
    )  # fmt: skip
