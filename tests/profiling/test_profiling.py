"""The profiler: what it measures, what it keeps when it is killed, and that it never chooses by evaluation seeds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from kvstore_client import ModelSpec, Recompute
from kvstore_client.gate import Gate
from kvstore_ops.profiling.command import run
from kvstore_ops.profiling.profiler import default_path, journal_of, profile
from kvstore_ops.profiling.search import coarse, nominal_share
from kvstore_ops.profiling.subject import Measured, TestbedSubject
from kvstore_ops.testbed import calibration, evaluation
from rich.console import Console
from rich.progress import Progress

from kvstore.errors import Exhausted, InvalidRequest
from kvstore.planning import Calibration, Profile
from kvstore.planning.profile import Origin
from tests.recompute.test_profile import RECEIVER, SENDER

CONTEXTS = 16
SEARCH_CONTEXTS = 8


class StoppedError(Exception):
    """What ends a run in the middle."""


@dataclass
class Pretended:
    """A subject of 6 layers whose quality is a formula: the middle layers matter most, and "product" chooses best."""

    receiver: ModelSpec = RECEIVER
    sender: ModelSpec | None = SENDER
    reuse: str = "sibling"
    origin: Origin = Origin.IN_CONTEXT
    calibration: Calibration = field(
        default_factory=lambda: Calibration("aa" * 32, (1, 2), CONTEXTS, 8 * CONTEXTS, SEARCH_CONTEXTS)
    )
    full_quality: float = 0.9
    limit: int = 10_000
    asked: list[tuple[Recompute, range]] = field(default_factory=list)

    def full(self) -> Measured:
        return Measured((self.full_quality,) * (self.calibration.search_contexts + self.calibration.contexts), 1.0, 0.0)

    def measure(self, setting: Recompute, those: range, report: Callable[[int], None]) -> Measured:
        if len(self.asked) >= self.limit:
            raise StoppedError
        self.asked.append((setting, those))
        report(len(those))
        quality = self.quality(setting, those)
        spread = tuple(min(1.0, quality + 0.01 * (index % 2)) for index in those)
        return Measured(spread, nominal_share(setting, 6), max(0.0, 0.9 - quality))

    def quality(self, setting: Recompute, those: range) -> float:
        whole = sum((0.0, 0.05, 0.25, 0.25, 0.1, 0.0)[setting.first_layer : setting.check_layer])
        rest = 0.65 - whole
        good = {
            "product": 1.2,
            "deviation": 0.8,
            "suffix_attention": 0.7,
            "suffix_peak": 0.5,
            "first": 0.1,
            "random": 0.1,
        }
        mended = rest * min(1.0, setting.ratio * 3) * min(1.0, good[setting.selector] * (0.3 + 2 * whole))
        return 0.2 + whole + mended

    def settings(self, those: range) -> list[Recompute]:
        """What was asked on exactly these contexts."""
        return [setting for setting, asked in self.asked if asked == those]


SEARCHED, JUDGED = range(SEARCH_CONTEXTS), range(SEARCH_CONTEXTS, SEARCH_CONTEXTS + CONTEXTS)


def measured(subject: Any, path: Path, *, rounds: int = 3, fresh: bool = False) -> Profile:
    with Progress(console=Console(quiet=True)) as progress:
        return profile(subject, path, progress, started_s=7, rounds=rounds, fresh=fresh).profile


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Operations this small wait longer for a second thread than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_grid_has_the_papers_settings_and_each_layer_count_has_one() -> None:
    sibling = coarse(12, "sibling")
    assert any(each.first_layer > 0 and not each.ratio and each.last_layer < 11 for each in sibling)
    assert any(each.first_layer == 0 and each.ratio and 0 < each.check_layer < 11 for each in sibling)
    assert {each.first_layer for each in coarse(12, "position")} == {0}
    for count in (1, 2, 6, 12, 33):
        for each in coarse(count, "both"):
            each.check(count)
            assert not each.computes_all(count)


def test_refinement_finds_what_the_grid_does_not_have(tmp_path: Path) -> None:
    once, more = Pretended(), Pretended()
    rough = measured(once, tmp_path / "rough.json", rounds=0).cheapest(0.9)
    fine = measured(more, tmp_path / "fine.json").cheapest(0.9)
    assert rough is not None
    assert fine is not None
    assert fine.share < rough.share
    assert fine.setting not in once.settings(JUDGED)
    assert len(more.asked) == len(set(more.asked))


def test_what_was_lucky_in_the_search_is_not_chosen(tmp_path: Path) -> None:
    """Figures are of contexts that found nothing."""
    lucky = Recompute(0, -1, 0.1, "suffix_attention")

    class Flattering(Pretended):
        def quality(self, setting: Recompute, those: range) -> float:
            return 0.9 if setting == lucky and those == SEARCHED else super().quality(setting, those)

    subject = Flattering()
    found = measured(subject, tmp_path / "p.json", rounds=1)
    assert lucky in subject.settings(JUDGED)
    chosen = found.cheapest(0.9)
    assert chosen is not None
    assert chosen.setting != lucky
    assert {point.setting for point in found.points} <= set(subject.settings(JUDGED))
    for point in found.points:
        assert point.quality == pytest.approx(Pretended().quality(point.setting, JUDGED) + 0.005)
    assert (found.calibration.contexts, found.calibration.search_contexts) == (CONTEXTS, SEARCH_CONTEXTS)


def test_what_is_plainly_worse_than_something_cheaper_is_given_up(tmp_path: Path) -> None:
    """After a glance; and it is on no frontier."""
    subject = Pretended(calibration=Calibration("aa" * 32, (1, 2), CONTEXTS, 8 * CONTEXTS, 64))
    found = measured(subject, tmp_path / "p.json", rounds=1)
    whole = set(subject.settings(range(32, 64)))
    given_up = set(subject.settings(range(32))) - whole
    assert len(given_up) > len(whole) > 5
    assert not given_up & set(subject.settings(range(64, 64 + CONTEXTS)))
    assert {point.setting for point in found.points} <= whole
    for setting in given_up:
        share, quality = nominal_share(setting, 6), subject.quality(setting, range(32))
        cheaper = [each for each in subject.settings(range(32)) if nominal_share(each, 6) <= share]
        assert max(subject.quality(each, range(32)) for each in cheaper) > quality


def test_judging_goes_on_behind_the_first_frontiers_until_something_keeps_enough(tmp_path: Path) -> None:
    """All that the search liked best turns out worthless; what it liked less is then measured as well."""
    usual = Pretended(full_quality=0.72)
    first = measured(usual, tmp_path / "first.json", rounds=0)
    liked = set(usual.settings(JUDGED))
    assert first.cheapest(0.99) is not None

    class Disappointing(Pretended):
        def quality(self, setting: Recompute, those: range) -> float:
            return 0.1 if setting in liked and those == JUDGED else super().quality(setting, those)

    subject = Disappointing(full_quality=0.72)
    found = measured(subject, tmp_path / "p.json", rounds=0).cheapest(0.99)
    assert liked < set(subject.settings(JUDGED))
    assert found is not None
    assert found.setting not in liked


def test_wherever_a_run_is_stopped_it_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    whole = measured(Pretended(), tmp_path / "whole.json")
    path, asked = tmp_path / "pieces.json", []
    for limit in (1, 0, 5, 17, 30, 10_000):
        piece = Pretended(limit=limit)
        try:
            found = measured(piece, path)
        except StoppedError:
            with journal_of(path).open("ab") as file:
                file.write(b'{"setting": {"first_la')  # a line that was cut off
        asked += piece.asked
    assert found == whole
    assert len(asked) == len(set(asked))


def test_points_of_another_run_are_not_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    with pytest.raises(StoppedError):
        measured(Pretended(limit=3), path)
    other = Pretended(receiver=replace(RECEIVER, weights_digest="99" * 32))
    with pytest.raises(InvalidRequest, match="receiver"):
        measured(other, path)
    measured(other, path, fresh=True)
    assert len(other.asked) > 3
    again = Pretended()
    measured(again, path)  # a finished run begins anew, whosever it was
    assert again.asked


def test_one_run_at_a_time(tmp_path: Path) -> None:
    class Nosy(Pretended):
        def full(self) -> Measured:
            with pytest.raises(Exhausted, match="out"):
                measured(Pretended(), tmp_path / "one.json")
            return super().full()

    measured(Nosy(), tmp_path / "one.json", rounds=0)


def test_evaluation_seeds_choose_nothing(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="evaluation seeds"):
        TestbedSubject("l6-s2", "position", None, evaluation(), 8)
    with pytest.raises(InvalidRequest, match="evaluation seeds"):
        run("l6-s2", None, None, 8, 0, 0.99, "evaluation", tmp_path / "p.json", fresh=False, as_json=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(400)
def test_a_killed_run_of_a_real_model_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And its profile lies where a gate finds it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    subject = TestbedSubject("l6-s2", "position", None, calibration(), 8)
    path = default_path(subject)
    command = [sys.executable, "-m", "kvstore_ops.cli", "profile", "l6-s2", "--contexts", "8", "--rounds", "0"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        for _ in range(2400):
            if process.poll() is not None or (journal_of(path).exists() and len(lines(path)) > 4):
                break
            sleep(0.1)
        process.send_signal(signal.SIGKILL)
    before = lines(path)
    assert len(before) > 4, process.returncode
    run("l6-s2", None, None, 8, 0, 0.9, "calibration", None, fresh=False, as_json=False)
    after = lines(path)
    assert after[: len(before) - 1] == before[:-1]
    settings = [(str(each["setting"]), each["judged"]) for each in map(json.loads, after[1:-1])]
    assert len(settings) == len(set(settings)) > 6
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "at floor 0.9 clients take" in printed
    permit = Gate(floor=0.9).permit(subject.receiver, None, "position")
    assert permit.setting is not None
    assert permit.setting.ratio > 0


def lines(path: Path) -> list[bytes]:
    return journal_of(path).read_bytes().splitlines()
