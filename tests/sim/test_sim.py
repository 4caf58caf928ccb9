"""Runs of the simulation: every promise kept, whatever the seed brings; and the same again for the same seed."""

from __future__ import annotations

import pytest

from tests.sim.run import run_seed

SAMPLE = range(10)


@pytest.mark.parametrize("seed", SAMPLE)
def test_promises_are_kept(seed: int) -> None:
    outcome = run_seed(seed)
    assert outcome.failure is None, outcome.told()


@pytest.mark.parametrize("seed", [1, 3])
def test_equal_seeds_give_equal_runs(seed: int) -> None:
    assert run_seed(seed).digest == run_seed(seed).digest
