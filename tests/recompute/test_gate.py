"""The gate: nothing lossy without a valid profile, and not for long when answers are no longer what they were."""

from __future__ import annotations

import json
import pwd
import resource
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kvstore_client.gate import Gate
from kvstore_client.gate.drift import DriftWatch, misled
from kvstore_client.gate.profiles import Profiles

from kvstore.errors import InvalidRequest
from tests.recompute.test_profile import PAIR, POINTS, PROFILE, RECEIVER, SENDER

RIGHT = torch.tensor([0.0, 4.0, 0.0])
WRONG = torch.tensor([4.0, 0.0, 0.0])


def keep(directory: Path, **fields: object) -> None:
    profiles = Profiles(directory)
    profiles.write(replace(PROFILE, **fields), profiles.path(PAIR))  # type: ignore[arg-type]


def test_a_forked_child_goes_on_by_itself(tmp_path: Path) -> None:
    """A thread of its parent may have had the lock just then, and would never let go of it."""
    keep(tmp_path)
    gate = Gate(tmp_path)
    gate._lock.acquire()
    gate._pid = -1  # as the child of another process sees it
    found: list[str] = []
    asking = threading.Thread(target=lambda: found.append(gate.permit(RECEIVER, SENDER, "sibling").reason), daemon=True)
    asking.start()
    asking.join(10.0)
    assert found == [""]


def test_near_ties_do_not_mislead() -> None:
    full = torch.tensor([[1.0, 1.5, 0.0], [1.0, 1.8, 0.0], [0.0, 0.0, 9.0]])
    lossy = torch.tensor([[5.0, 0.0, 0.0], [5.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    assert misled(full, lossy).tolist() == [False, True, False]
    assert misled(full, torch.full((3, 3), float("nan"))).all()
    assert misled(torch.full((3, 3), float("nan")), lossy).all()


def test_drift_is_seen_soon_and_seldom_where_there_is_none() -> None:
    steady = DriftWatch(0.03, 512)
    draws = torch.rand(20_000, generator=torch.Generator().manual_seed(1)) < 0.03
    for each in draws.tolist():
        steady.add(each)
        assert not steady.has_drifted
    for _ in range(6):
        steady.add(True)
        if steady.has_drifted:
            break
    assert steady.has_drifted
    assert steady.misled - int(draws.sum()) >= 2


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.8])
def test_of_a_setting_that_often_misleads_only_more_of_it_is_drift(rate: float) -> None:
    """Who wants little quality gets such a setting. An alarm in 10,000 checks would be five or six here."""

    def drifts(true: float, checks: int, seed: int) -> bool:
        watch, draws = DriftWatch(rate, 300), torch.rand(checks, generator=torch.Generator().manual_seed(seed))
        for each in (draws < true).tolist():
            watch.add(each)
            if watch.has_drifted:
                return True
        return False

    assert sum(drifts(rate, 5_000, seed) for seed in range(12)) <= 2
    assert all(drifts(min(2.5 * rate, 1.0), 200, seed) for seed in range(12))


def test_without_a_valid_profile_nothing_lossy(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    for directory in (Gate(tmp_path), Gate(tmp_path / "missing")):
        refused = directory.permit(RECEIVER, SENDER, "sibling")
        assert refused.setting is None
        assert "no valid profile" in refused.reason
    keep(tmp_path)
    assert gate.permit(RECEIVER, SENDER, "sibling").setting == POINTS[2].setting
    assert gate.permit(RECEIVER, SENDER, "both").setting is None
    assert gate.permit(RECEIVER, None, "position").setting is None
    assert gate.permit(replace(RECEIVER, weights_digest="e5" * 32), SENDER, "sibling").setting is None
    assert "dtype" in gate.permit(replace(RECEIVER, cache_dtype="float16"), SENDER, "sibling").reason
    assert gate.permit(replace(RECEIVER, chunk_tokens=64), SENDER, "sibling").setting == POINTS[2].setting
    keep(tmp_path, points=POINTS[:1])
    assert "no setting" in gate.permit(RECEIVER, SENDER, "sibling").reason
    assert Gate(tmp_path, floor=0.1).permit(RECEIVER, SENDER, "sibling").setting == POINTS[0].setting
    Profiles(tmp_path).path(PAIR).write_text("{}", encoding="utf-8")
    assert "version" in gate.permit(RECEIVER, SENDER, "sibling").reason


def test_pairs_that_come_for_ever_are_not_all_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model in training has new weights each time. The evidence on a pair in use stays."""
    monkeypatch.setattr("kvstore_client.gate.gate.PAIRS_KEPT", 3)
    keep(tmp_path)
    gate = Gate(tmp_path, check_every=100)
    assert gate.is_due(gate.permit(RECEIVER, SENDER, "sibling"))
    for number in range(20):
        gate.permit(replace(RECEIVER, weights_digest=f"{number:064x}"), SENDER, "sibling")
        assert not gate.is_due(gate.permit(RECEIVER, SENDER, "sibling")), "it was checked before"
        assert len(gate._states) <= 3


def test_profiles_that_were_switched_off_are_remembered_the_newest_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore_client.gate.gate.OFF_KEPT", 3)
    gate = Gate(tmp_path)
    for number in range(8):
        keep(tmp_path, measured_at_s=number + 1)
        permit = gate.permit(RECEIVER, SENDER, "sibling")
        assert permit.setting is not None, "this profile is another one"
        while gate.permit(RECEIVER, SENDER, "sibling").setting is not None:
            gate.checked(permit, RIGHT, WRONG)
        assert len(gate._off) <= 3
        assert permit.profile in gate._off
    assert gate.permit(RECEIVER, SENDER, "sibling").setting is None


def test_a_profile_that_cannot_be_read_for_a_moment_is_read_again(tmp_path: Path) -> None:
    """A process may have no descriptor left just then: its profiles are good all the same."""
    keep(tmp_path)
    gate, limits = Gate(tmp_path), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        refused = gate.permit(RECEIVER, SENDER, "sibling")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "open files" in refused.reason
    assert gate.permit(RECEIVER, SENDER, "sibling").setting == POINTS[2].setting


def test_anothers_profile_under_this_name_is_refused(tmp_path: Path) -> None:
    keep(tmp_path, receiver=replace(PROFILE.receiver, weights_digest="f6" * 32))
    assert "other weights" in Gate(tmp_path).permit(RECEIVER, SENDER, "sibling").reason


def test_a_profile_of_another_reuse_under_this_name_is_refused(tmp_path: Path) -> None:
    keep(tmp_path, reuse="both")
    refused = Gate(tmp_path).permit(RECEIVER, SENDER, "sibling")
    assert (refused.setting, "'both' reuse" in refused.reason) == (None, True)


def test_wrong_answers_of_an_old_profile_say_nothing_of_a_new_one(tmp_path: Path) -> None:
    """They were given by another setting, and checked after the new profile came."""
    keep(tmp_path)
    gate = Gate(tmp_path)
    old = gate.permit(RECEIVER, SENDER, "sibling")
    keep(tmp_path, measured_at_s=PROFILE.measured_at_s + 1)
    assert gate.permit(RECEIVER, SENDER, "sibling").profile != old.profile
    for _ in range(10):
        gate.checked(old, RIGHT, WRONG)
    assert gate.permit(RECEIVER, SENDER, "sibling").setting is not None


def test_the_first_and_every_nth_request_is_checked_and_all_under_suspicion(tmp_path: Path) -> None:
    keep(tmp_path)
    counters = Counter[str]()
    gate = Gate(tmp_path, check_every=4, counters=counters)
    permit = gate.permit(RECEIVER, SENDER, "sibling")
    assert [gate.is_due(permit) for _ in range(9)] == [True, False, False, False, True, False, False, False, True]
    assert "agreed" in gate.checked(permit, RIGHT, RIGHT)
    assert not gate.is_due(permit)
    assert "misled" in gate.checked(permit, RIGHT, WRONG)
    assert [gate.is_due(permit) for _ in range(3)] == [True] * 3
    assert counters == {"drift_checks": 2, "drift_misled": 1}


def drift(gate: Gate) -> str:
    """Wrong answers until the gate closes."""
    permit = gate.permit(RECEIVER, SENDER, "sibling")
    for _ in range(10):
        assert gate.is_due(permit)
        reason = gate.checked(permit, RIGHT, WRONG)
        if gate.permit(RECEIVER, SENDER, "sibling").setting is None:
            return reason
    raise AssertionError("ten wrong answers, and nothing was switched off")


def test_drift_switches_off_everywhere_until_there_is_another_profile(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep(tmp_path)
    gate, beside = Gate(tmp_path), Gate(tmp_path)
    permit = beside.permit(RECEIVER, SENDER, "sibling")
    assert permit.setting is not None
    reason = drift(gate)
    assert "switched off" in reason
    assert reason in caplog.text
    assert gate.counters["lossy_switched_off"] == 1
    for each in (gate, beside, Gate(tmp_path)):
        refused = each.permit(RECEIVER, SENDER, "sibling")
        assert (refused.setting, refused.reason) == (None, reason)
    assert not gate.is_due(permit)
    Profiles(tmp_path).path(PAIR).touch()
    assert gate.permit(RECEIVER, SENDER, "sibling").setting is None
    keep(tmp_path, measured_at_s=PROFILE.measured_at_s + 1)
    for each in (gate, beside, Gate(tmp_path)):
        assert each.permit(RECEIVER, SENDER, "sibling").setting is not None


def test_a_note_that_cannot_be_kept_or_read_still_counts(tmp_path: Path) -> None:
    keep(tmp_path)
    note = Profiles(tmp_path).path(PAIR).with_suffix(".off.json")
    note.write_text("{", encoding="utf-8")
    assert "cannot be read" in Gate(tmp_path).permit(RECEIVER, SENDER, "sibling").reason
    note.unlink()
    note.mkdir()  # nothing can be put in its place, and it cannot be read
    assert str(note) in Gate(tmp_path).permit(RECEIVER, SENDER, "sibling").reason
    note.rmdir()
    gate = Gate(tmp_path)
    permit = gate.permit(RECEIVER, SENDER, "sibling")
    note.mkdir()
    for _ in range(10):
        gate.checked(permit, RIGHT, WRONG)
    note.rmdir()
    assert "switched off" in gate.permit(RECEIVER, SENDER, "sibling").reason


def test_many_threads_close_the_gate_once(tmp_path: Path) -> None:
    keep(tmp_path)
    gate = Gate(tmp_path)

    def ask() -> None:
        for _ in range(50):
            permit = gate.permit(RECEIVER, SENDER, "sibling")
            if permit.setting is not None and gate.is_due(permit):
                gate.checked(permit, RIGHT, WRONG)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert gate.counters["lossy_switched_off"] == 1
    assert gate.permit(RECEIVER, SENDER, "sibling").setting is None


def test_a_profile_that_comes_while_the_last_check_runs_counts(tmp_path: Path) -> None:
    """What is switched off is the profile that answers were checked by."""
    keep(tmp_path)
    gate = Gate(tmp_path)
    permit = gate.permit(RECEIVER, SENDER, "sibling")
    keep(tmp_path, measured_at_s=PROFILE.measured_at_s + 1)
    told = [gate.checked(permit, RIGHT, WRONG) for _ in range(10)]
    assert any("switched off" in each for each in told)
    assert gate.permit(RECEIVER, SENDER, "sibling").setting is not None
    keep(tmp_path)
    assert "switched off" in gate.permit(RECEIVER, SENDER, "sibling").reason


def test_a_note_without_a_reason_counts(tmp_path: Path) -> None:
    keep(tmp_path)
    note = Profiles(tmp_path).path(PAIR).with_suffix(".off.json")
    note.write_text(json.dumps({"profile": PROFILE.digest, "reason": ""}), encoding="utf-8")
    assert "switched off" in Gate(tmp_path).permit(RECEIVER, SENDER, "sibling").reason


def test_a_user_without_a_home_has_no_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a number nobody knows."""

    def unknown(_uid: int) -> None:
        raise KeyError("nobody of this number")

    for name in ("HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert "no valid profile" in Gate().permit(RECEIVER, SENDER, "sibling").reason


@pytest.mark.parametrize("wrong", [{"floor": 1.1}, {"floor": -1}, {"check_every": 0}, {"check_every": 0.5}])
def test_a_gates_arguments_are_checked(tmp_path: Path, wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(wrong))):
        Gate(tmp_path, **wrong)  # type: ignore[arg-type]
