"""A short campaign in every test run; ``python -m tests.outage`` is the long one."""

from __future__ import annotations

import os

import pytest

from tests.outage.campaign import OUTAGES, run

SECONDS, CALM_S = (20.0, 20.0) if os.environ.get("KVSTORE_TEST_SCALE") == "full" else (2.5, 0.5)
BACK_S_MAX = 20.0
"""More than a tier is left alone for, on a busy machine."""


@pytest.mark.redis
@pytest.mark.s3
@pytest.mark.slow
@pytest.mark.timeout(360)  # a busy machine needs several times what a quiet one does
def test_while_shared_tiers_stand_still_clients_have_misses_and_nothing_worse() -> None:
    outcome = run(SECONDS, CALM_S, BACK_S_MAX)
    assert not outcome.faults, outcome.report()
    assert len(outcome.phases) == 1 + 2 * len(OUTAGES)
