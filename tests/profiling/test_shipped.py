"""The profiles that are shipped: of these weights, from calibration seeds, and still true."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvstore_client import Recompute
from kvstore_client.gate import Gate
from kvstore_client.gate.profiles import Profiles
from kvstore_ops.bench import quality
from kvstore_ops.profiling import shipped
from kvstore_ops.profiling.picture import verdict
from kvstore_ops.profiling.profiler import told
from kvstore_ops.profiling.shipped import PROFILES, shipped_path, shipped_profile
from kvstore_ops.profiling.subject import spec_of
from kvstore_ops.testbed import calibration, contexts, evaluation
from kvstore_ops.testbed.trial import Trial, one_thread

from kvstore.errors import InvalidRequest
from kvstore.planning import FLOOR, Pair, Profile

SHIPPED = sorted(PROFILES.glob("*.json"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_profile_is_found_by_what_it_is_of_and_of_the_shipped_weights(path: Path) -> None:
    found = Profile.from_json(path.read_text())
    of = found.receiver.model_id, found.reuse, found.sender.model_id if found.sender else None
    assert shipped_path(*of) == path
    assert shipped_profile(*of) == found
    assert found.cheapest(0.99) is not None
    assert path.with_suffix(".png").exists()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_gate_profiler_and_bench_choose_alike(path: Path, tmp_path: Path) -> None:
    found = Profile.from_json(path.read_text())
    model, sender = found.receiver.model_id, found.sender.model_id if found.sender else None
    specs = spec_of(model), spec_of(sender) if sender else None
    Profiles(tmp_path).write(found, Profiles(tmp_path).path(Pair.of(*specs, found.reuse, found.provenance)))
    setting = Gate(tmp_path).permit(*specs, found.reuse).setting
    assert setting is not None
    assert quality.TARGET == FLOOR
    assert quality.chosen(found.layer_count, model, found.reuse, sender) == setting
    assert told(setting) in verdict(found, FLOOR)


def test_every_base_model_has_a_profile_of_each_reuse_made_alike() -> None:
    every = {
        f"{base}-{kind}"
        for base in ("l6-s2", "l6-s5", "l12-s2")
        for kind in ("position", "sibling-plus3", "both-plus3")
    }
    assert {path.stem for path in SHIPPED} == every
    made = [Profile.from_json(path.read_text()).calibration for path in SHIPPED]
    assert {(each.contexts, each.search_contexts, each.digest) for each in made} == {(256, 128, made[0].digest)}


def test_no_evaluation_seed_is_behind_a_profile() -> None:
    for path in SHIPPED:
        seeds = set(Profile.from_json(path.read_text()).calibration.seeds)
        assert seeds <= set(calibration().numbers)
        assert not seeds & set(evaluation().numbers)


def test_a_profile_still_says_what_its_setting_is_worth() -> None:
    """It is measured again when settings come to mean something else."""
    point = shipped_profile("l6-s2", "position").cheapest(0.99)
    assert point is not None
    with one_thread():
        trial = Trial("l6-s2", contexts(calibration(), 64), "position")
        ours, other = trial.run(point.setting), trial.run(Recompute.reuse())
    assert ours.share == pytest.approx(point.share, abs=0.01)
    assert ours.score.accuracy == pytest.approx(point.quality, abs=0.03)
    assert other.score.accuracy < 0.6


def test_a_profile_that_is_not_there_or_of_other_weights_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = shipped_path("l6-s2", "position").read_text()
    monkeypatch.setattr(shipped, "PROFILES", tmp_path)
    with pytest.raises(InvalidRequest, match="kvstore profile l6-s2 --reuse both --sender l6-s2-plus3"):
        shipped_profile("l6-s2", "both", "l6-s2-plus3")
    shipped_path("l6-s2-plus3", "position").write_text(text)
    with pytest.raises(InvalidRequest, match="other weights"):
        shipped_profile("l6-s2-plus3", "position")
