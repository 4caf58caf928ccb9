"""A short campaign in every test run; ``make crash`` is the long one."""

from __future__ import annotations

import os
import time

import pytest

from tests.crash.__main__ import report
from tests.crash.campaign import run
from tests.crash.plan import POINTS, series

COUNT = 50 if os.environ.get("KVSTORE_TEST_SCALE") == "full" else len(POINTS)


def test_a_campaign_covers_every_point_and_comes_from_its_seed() -> None:
    planned = series(0, COUNT)
    assert {crash.point for each in planned for crash in each.crashes} == set(POINTS)
    assert planned == series(0, COUNT)
    assert planned != series(1, COUNT)


@pytest.mark.slow
@pytest.mark.timeout(360)  # a busy machine needs several times what a quiet one does
def test_what_was_acknowledged_survives_every_crash() -> None:
    started = time.monotonic()
    outcome = run(COUNT, seed=0)
    assert outcome.is_good(), report(outcome, time.monotonic() - started)
    assert outcome.crash_count >= COUNT
    assert outcome.findings.checked > 5 * COUNT
