"""One profiling run: measure, keep every point, and make the profile of its frontier."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from kvstore_client.gate.profiles import Profiles
from rich.progress import Progress, TaskID

from kvstore.errors import InvalidRequest
from kvstore.planning import Pair, Point, Profile, Recompute, Side
from kvstore.planning.profile import ERRORS
from kvstore_ops.profiling.journal import Journal
from kvstore_ops.profiling.search import ENOUGH, FRONTIERS, Search, frontier, frontiers
from kvstore_ops.profiling.subject import Measured, Subject

GLANCE_CONTEXTS = 32
"""After that many contexts a setting is given up that is plainly worse than one that costs no more."""


@dataclass(frozen=True)
class Profiled:
    """What a run hands back: the profile, where it lies, and every setting that was not given up, by rising f, as the
    search had it."""

    profile: Profile
    path: Path
    points: tuple[Point, ...]


def journal_of(path: Path) -> Path:
    """Where a profile's points lie."""
    return path.with_suffix(".points.jsonl")


def default_path(subject: Subject) -> Path:
    """Where clients look for it."""
    pair = Pair.of(subject.receiver, subject.sender, subject.reuse, subject.origin)
    return Profiles().path(pair)


def profile(
    subject: Subject, path: Path, progress: Progress, *, started_s: int, rounds: int, fresh: bool = False
) -> Profiled:
    """Search what is not yet searched, measure what was found again, and write the profile. ``started_s``: wall time,
    in seconds. ``rounds`` of refinement around the frontier. Raises: InvalidRequest, Exhausted, as the journal does."""
    with Journal(journal_of(path), subject, started_s, fresh=fresh) as journal:
        if journal.full is None:
            task = progress.add_task("full prefill", total=None)
            journal.add_full(subject.full())
            progress.remove_task(task)
        run = _Run(subject, journal, progress)
        searched = run.search(rounds)
        points = run.judge(searched)
        made = _profile(subject, run.full_judged, points, journal.started_s)
        Profiles().write(made, path)
        journal.finish()
    return Profiled(made, path, searched)


def point_of(setting: Recompute, measured: Measured, full: Measured, answers: int) -> Point:
    """With its standard errors; that of the loss is at least one answer's worth, for contexts on which nothing is lost
    say little about others. ``answers``: how many were scored."""
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
        tokens=measured.tokens,
        kl=measured.kl,
    )


class _Run:
    """A run's two parts: a search, and the judging of what it found on contexts that found nothing."""

    def __init__(self, subject: Subject, journal: Journal, progress: Progress) -> None:
        assert journal.full is not None
        self._subject, self._journal, self._progress = subject, journal, progress
        made, full = subject.calibration, journal.full.by_context
        if min(made.search_contexts, made.contexts) < 2:
            raise InvalidRequest(
                f"contexts: {made.search_contexts} to search on and {made.contexts} to measure on: a standard error "
                "needs two of each at least, a useful one dozens"
            )
        self._searching, self._judging = range(made.search_contexts), range(made.search_contexts, len(full))
        self._full_searched = replace(journal.full, by_context=full[: made.search_contexts])
        self.full_judged = replace(journal.full, by_context=full[made.search_contexts :])

    def search(self, rounds: int) -> tuple[Point, ...]:
        """Every setting that was not given up, by rising f."""
        layers, full = self._subject.receiver.layer_count, _mean(self._full_searched)
        search = Search(layers, self._subject.reuse, full, rounds)
        known = {setting: self._point(setting) for setting in self._journal.searched}
        while batch := search.next(known):
            count = len(self._searching)
            task = self._progress.add_task("", total=len(batch) * count)
            while batch := search.left(batch, known):
                words = f"{len(known)} settings searched, up to {len(batch)} left in this round: {told(batch[0])}"
                self._progress.update(task, description=words, completed=0, total=len(batch) * count)
                self._journal.add(batch[0], self._glanced(batch[0], task), judged=False)
                known[batch[0]] = self._point(batch[0])
            self._progress.remove_task(task)
        return tuple(sorted(filter(None, known.values()), key=lambda each: (each.share, str(each.setting))))

    def judge(self, searched: tuple[Point, ...]) -> tuple[Point, ...]:
        """The frontier of what the search found, measured again: of two frontiers' settings, and of more as long as
        none of them keeps enough."""
        found: list[Point] = []
        full = _mean(self.full_judged)
        for depth, edge in enumerate(frontiers(searched, _mean(self._full_searched))):
            if depth >= FRONTIERS and any(point.assured >= ENOUGH * full for point in found):
                break
            found += self._judged([point.setting for point in edge])
        return frontier(found, lambda each: each.assured)

    def _judged(self, settings: list[Recompute]) -> list[Point]:
        """Settings on the contexts for the figures."""
        count, answers = len(self._judging), self._subject.calibration.answers
        task = self._progress.add_task("", total=len(settings) * count)
        for index, setting in enumerate(settings):
            words = f"{len(settings) - index} settings left to measure again: {told(setting)}"
            self._progress.update(task, description=words, completed=index * count)
            if setting not in self._journal.judged:
                report = partial(_advance, self._progress, task, index * count)
                self._journal.add(setting, self._subject.measure(setting, self._judging, report), judged=True)
        self._progress.remove_task(task)
        return [point_of(each, self._journal.judged[each], self.full_judged, answers) for each in settings]

    def _glanced(self, setting: Recompute, task: TaskID) -> Measured:
        """A setting on the contexts that are searched on, or on the first of them when it is given up after these."""
        glance, measure = self._searching[:GLANCE_CONTEXTS], self._subject.measure
        found = measure(setting, glance, partial(_advance, self._progress, task, 0))
        rest = self._searching[GLANCE_CONTEXTS:]
        if not rest or self._is_plainly_worse(found):
            return found
        return found + measure(setting, rest, partial(_advance, self._progress, task, len(glance)))

    def _is_plainly_worse(self, measured: Measured) -> bool:
        """Than a setting that costs no more, on the same contexts."""
        ours = np.array(measured.by_context)
        for other in self._journal.searched.values():
            lost = np.array(other.by_context[: len(ours)]) - ours
            if other.share <= measured.share and lost.mean() > ERRORS * max(_error(lost), self._least_error(len(ours))):
                return True
        return False

    def _point(self, setting: Recompute) -> Point | None:
        """None: it was given up."""
        measured = self._journal.searched[setting]
        if len(measured.by_context) < len(self._searching):
            return None
        return point_of(setting, measured, self._full_searched, round(1 / self._least_error(len(self._searching))))

    def _least_error(self, contexts: int) -> float:
        """One answer's worth on so many contexts."""
        made = self._subject.calibration
        return made.contexts / made.answers / contexts


def _advance(progress: Progress, task: TaskID, before: int, contexts: int) -> None:
    progress.update(task, completed=before + contexts)


def _profile(subject: Subject, full: Measured, points: tuple[Point, ...], started_s: int) -> Profile:
    return Profile(
        receiver=Side.of(subject.receiver),
        sender=None if subject.sender is None else Side.of(subject.sender),
        reuse=subject.reuse,
        provenance=subject.origin,
        layer_count=subject.receiver.layer_count,
        calibration=subject.calibration,
        full_quality=_mean(full),
        full_standard_error=_error(np.array(full.by_context)),
        points=points,
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
