"""Runs of the simulation: every promise kept, whatever the seed brings; and the same again for the same seed."""

from __future__ import annotations

import os

import pytest

from tests.sim.run import run_seed
from tests.sim.steps import Cut, every_cut, passage

IS_FULL = os.environ.get("KVSTORE_TEST_SCALE") == "full"
SEEDS = range(0, 30, 1 if IS_FULL else 6)
STEP, STRIDE = (1, 30) if IS_FULL else (20, 220)


@pytest.mark.parametrize("seed", SEEDS)
def test_promises_are_kept(seed: int) -> None:
    outcome = run_seed(seed)
    assert outcome.failure is None, outcome.told()


@pytest.mark.parametrize("seed", range(3))
def test_promises_are_kept_whatever_clients_give_up(seed: int) -> None:
    outcome = run_seed(seed, is_cloudy=seed == 0, is_hasty=True)
    assert outcome.failure is None, outcome.told()
    assert outcome.totals["given_up"]


@pytest.mark.timeout(360)  # hundreds of lives: a busy machine needs several times what a quiet one does
def test_a_crash_at_every_step_and_in_recovery_from_it() -> None:
    crashes = 0
    for cut in every_cut(stride=STRIDE, step=STEP):
        outcome = passage(cut)
        assert outcome.failure is None, outcome.told()
        crashes += outcome.totals["crashes"]
    assert crashes > 500 // STEP


@pytest.mark.timeout(360)
def test_a_crash_while_envelopes_are_turned_on() -> None:
    """What was promised before is kept, and what is promised afterwards."""
    crashes = 0
    for cut in every_cut(stride=STRIDE * 4, step=STEP * 4, is_sealed=True):
        outcome = passage(cut)
        assert outcome.failure is None, outcome.told()
        crashes += outcome.totals["crashes"]
    assert crashes > 100 // STEP


@pytest.mark.parametrize("seed", [1, 3])
def test_equal_seeds_give_equal_runs(seed: int) -> None:
    assert run_seed(seed).digest == run_seed(seed).digest


@pytest.mark.parametrize("cut", [Cut(60, power_cut=True), Cut(31, second=4)], ids=str)
def test_equal_cuts_give_equal_passages(cut: Cut) -> None:
    assert passage(cut).digest == passage(cut).digest
