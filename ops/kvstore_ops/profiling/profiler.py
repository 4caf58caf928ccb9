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
"""After this many contexts a setting is given up when it is plainly worse than one that costs no more."""


@dataclass(frozen=True)
class Profiled:
    """The result of a run: the profile, its path, and the search's points of all settings that were not given up, by
    rising f."""

    profile: Profile
    path: Path
    points: tuple[Point, ...]


def journal_of(path: Path) -> Path:
    """Return the path of the journal of a profile."""
    return path.with_suffix(".points.jsonl")


def default_path(subject: Subject) -> Path:
    """Return the path at which clients look for the profile."""
    pair = Pair.of(subject.receiver, subject.sender, subject.reuse, subject.origin)
    return Profiles().path(pair)


def profile(
    subject: Subject, path: Path, progress: Progress, *, started_s: int, rounds: int, fresh: bool = False
) -> Profiled:
    """Search the settings, measure those found again on other contexts, and write the profile. ``started_s``: wall
    time, in seconds. ``rounds``: refinements around the frontier. Raises: InvalidRequest, Exhausted, as the journal
    does."""
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
    """Return a point with its standard errors. The error of the loss is at least one answer's worth, because contexts
    without a loss prove little about others. ``answers``: the number of scored answers."""
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
    """The two parts of a run: a search, and the judging of the settings found, on contexts that the search did not
    see."""

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
        """Search, and return the points of all settings that were not given up, by rising f."""
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
        """Measure the settings of the search's first two frontiers again, and of further frontiers as long as no
        setting keeps enough quality. Return the frontier of these measurements."""
        found: list[Point] = []
        full = _mean(self.full_judged)
        for depth, edge in enumerate(frontiers(searched, _mean(self._full_searched))):
            if depth >= FRONTIERS and any(point.assured >= ENOUGH * full for point in found):
                break
            found += self._judged([point.setting for point in edge])
        return frontier(found, lambda each: each.assured)

    def _judged(self, settings: list[Recompute]) -> list[Point]:
        """Measure settings on the contexts for the figures."""
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
        """Measure a setting on the contexts of the search; on the first of them only when it is given up after
        these."""
        glance, measure = self._searching[:GLANCE_CONTEXTS], self._subject.measure
        found = measure(setting, glance, partial(_advance, self._progress, task, 0))
        rest = self._searching[GLANCE_CONTEXTS:]
        if not rest or self._is_plainly_worse(found):
            return found
        return found + measure(setting, rest, partial(_advance, self._progress, task, len(glance)))

    def _is_plainly_worse(self, measured: Measured) -> bool:
        """True when a setting that costs no more is plainly better on the same contexts."""
        ours = np.array(measured.by_context)
        for other in self._journal.searched.values():
            lost = np.array(other.by_context[: len(ours)]) - ours
            if other.share <= measured.share and lost.mean() > ERRORS * max(_error(lost), self._least_error(len(ours))):
                return True
        return False

    def _point(self, setting: Recompute) -> Point | None:
        """Return the search's point of a setting; None: it was given up."""
        measured = self._journal.searched[setting]
        if len(measured.by_context) < len(self._searching):
            return None
        return point_of(setting, measured, self._full_searched, round(1 / self._least_error(len(self._searching))))

    def _least_error(self, contexts: int) -> float:
        """Return the quality that one answer is worth on ``contexts`` contexts."""
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
    """Return a setting in a few words."""
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
