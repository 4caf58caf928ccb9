"""One profiling run: measure, keep every point, and make the profile of its frontier."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from kvstore_client.recompute.gate import PROVENANCE
from kvstore_client.recompute.profile import Point, Profile, Side
from kvstore_client.recompute.profiles import Pair, Profiles
from kvstore_client.setting import Recompute
from rich.progress import Progress, TaskID

from kvstore.errors import InvalidRequest
from kvstore_ops.profiling.journal import Journal
from kvstore_ops.profiling.search import Search, frontier
from kvstore_ops.profiling.subject import Measured, Subject


@dataclass(frozen=True)
class Profiled:
    """What a run hands back: the profile, where it lies, and every measured point by rising f."""

    profile: Profile
    path: Path
    points: tuple[Point, ...]


def journal_of(path: Path) -> Path:
    """Where a profile's points lie."""
    return path.with_suffix(".points.jsonl")


def default_path(subject: Subject) -> Path:
    """Where clients look for it."""
    pair = Pair.of(subject.receiver, subject.sender, subject.reuse, PROVENANCE[subject.reuse])
    return Profiles().path(pair)


def profile(
    subject: Subject, path: Path, progress: Progress, *, started_s: int, rounds: int, fresh: bool = False
) -> Profiled:
    """Measure what is not yet measured and write the profile. ``started_s``: wall time, in seconds. ``rounds`` of
    refinement around the frontier. Raises: InvalidRequest, Exhausted, as the journal does."""
    if subject.calibration.contexts < 2:
        raise InvalidRequest("contexts is 1: a standard error needs two at least, a useful one dozens")
    with Journal(journal_of(path), subject, started_s, fresh=fresh) as journal:
        if journal.full is None:
            task = progress.add_task("full prefill", total=None)
            journal.add(None, subject.full())
            progress.remove_task(task)
        assert journal.full is not None
        full, answers = journal.full, subject.calibration.answers
        known = {setting: point_of(setting, each, full, answers) for setting, each in journal.points.items()}
        search = Search(subject.receiver.layer_count, subject.reuse, _mean(full), rounds)
        while batch := search.next(known):
            _measure(subject, batch, search, known, journal, progress)
        made = _profile(subject, full, known, journal.started_s)
        Profiles().write(made, path)
        journal.finish()
    return Profiled(made, path, tuple(sorted(known.values(), key=lambda each: each.share)))


def point_of(setting: Recompute, measured: Measured, full: Measured, answers: int) -> Point:
    """With its standard errors; that of the loss is at least one answer's worth, for contexts on which nothing is lost
    say little about others."""
    ours, theirs = np.array(measured.by_context), np.array(full.by_context)
    if ours.shape != theirs.shape:
        raise InvalidRequest(f"{setting}: measured on {len(ours)} contexts, the full prefill on {len(theirs)}")
    return Point(
        setting=setting,
        share=measured.share,
        quality=_mean(measured),
        standard_error=_error(ours),
        loss_error=max(_error(theirs - ours), 1 / answers),
        misled=measured.misled,
    )


def _measure(
    subject: Subject, batch: list[Recompute], search: Search, known: dict[Recompute, Point], journal: Journal,
    progress: Progress,
) -> None:  # fmt: skip
    """A batch; after each point those are left out that are no longer worth it."""
    assert journal.full is not None
    count = subject.calibration.contexts
    done = len(known)
    task = progress.add_task("", total=(done + len(batch)) * count, completed=done * count)
    while batch := search.left(batch, known):
        setting, done = batch[0], len(known)
        words = f"{done} settings measured, up to {len(batch)} left in this round: {told(setting)}"
        progress.update(task, description=words, total=(done + len(batch)) * count)
        measured = subject.measure(setting, partial(_advance, progress, task, done * count))
        journal.add(setting, measured)
        known[setting] = point_of(setting, measured, journal.full, subject.calibration.answers)
    progress.remove_task(task)


def _advance(progress: Progress, task: TaskID, before: int, contexts: int) -> None:
    progress.update(task, completed=before + contexts)


def _profile(subject: Subject, full: Measured, known: dict[Recompute, Point], started_s: int) -> Profile:
    return Profile(
        receiver=Side.of(subject.receiver),
        sender=None if subject.sender is None else Side.of(subject.sender),
        reuse=subject.reuse,
        provenance=PROVENANCE[subject.reuse],
        layer_count=subject.receiver.layer_count,
        calibration=subject.calibration,
        full_quality=_mean(full),
        full_standard_error=_error(np.array(full.by_context)),
        points=frontier(known.values()),
        measured_at_s=started_s,
    )


def told(setting: Recompute) -> str:
    """A setting, short."""
    whole = setting.check_layer > setting.first_layer
    group = f"layers {setting.first_layer}..{setting.last_layer}" if whole else f"from layer {setting.first_layer}"
    if not setting.ratio:
        return group if whole else "reuse as it is"
    metric = f" of {setting.metric}" if setting.selector in ("deviation", "product") else ""
    narrowed = f", gradually by {setting.gradual:.0%}" if setting.gradual else ""
    return f"{group}, {setting.ratio:.0%} by {setting.selector}{metric}{narrowed}"


def _mean(measured: Measured) -> float:
    return float(np.mean(measured.by_context))


def _error(of_contexts: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
    return float(of_contexts.std(ddof=1) / len(of_contexts) ** 0.5)
