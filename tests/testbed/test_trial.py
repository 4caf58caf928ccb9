"""Reuse on trial: what the settings are worth on the shipped models, as far as a few contexts tell."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kvstore_ops.testbed import calibration, contexts
from kvstore_ops.testbed.trial import Trial, one_thread

from kvstore.errors import InvalidRequest
from kvstore.planning import Recompute

COUNT = 8


@pytest.fixture(autouse=True)
def quickly() -> Iterator[None]:
    with one_thread():
        yield


def test_moved_chunks_are_worth_what_is_computed_again() -> None:
    trial = Trial("l6-s2", contexts(calibration(), COUNT), "position")
    full = trial.full().accuracy
    everything = trial.run(Recompute.full(6))
    nothing = trial.run(Recompute.reuse())
    fused = trial.run(Recompute(0, 2, 0.15))
    assert (everything.score.accuracy, everything.share) == (full, 1.0)
    assert nothing.score.accuracy < full - 0.2
    assert nothing.share == 0.0
    assert fused.score.accuracy > full - 0.1
    assert 0.5 < fused.share < 0.6


def test_a_siblings_cache_misleads_until_it_is_mended() -> None:
    trial = Trial("l6-s2", contexts(calibration(), COUNT), "sibling", "l6-s2-plus3")
    full = trial.full().accuracy
    assert trial.run(Recompute.reuse()).score.accuracy < full - 0.5
    assert trial.run(Recompute(0, 2, 0.15)).score.accuracy > full - 0.1


def test_a_siblings_reuse_names_the_sibling() -> None:
    found = contexts(calibration(), COUNT)
    with pytest.raises(InvalidRequest, match="sender"):
        Trial("l6-s2", found, "sibling")
    with pytest.raises(InvalidRequest, match="sender"):
        Trial("l6-s2", found, "position", "l6-s2-plus3")
