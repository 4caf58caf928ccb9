"""A short campaign in every test run; ``python -m tests.outage`` is the long one."""

from __future__ import annotations

import os

import pytest

from tests.outage.campaign import OUTAGES, Outcome, Phase, run
from tests.outage.load import Call, Findings

SECONDS, CALM_S = (20.0, 20.0) if os.environ.get("KVSTORE_TEST_SCALE") == "full" else (1.5, 0.5)
LOOKUP_S_MAX = {"redis": 0.05, "s3": 0.2}
"""More than the settings have it: on a busy machine an answer takes longer, and a tier is then not hit."""
BACK_S_MAX = 20.0
"""More than a tier is left alone for, on a busy machine."""


@pytest.mark.redis
@pytest.mark.s3
@pytest.mark.slow
@pytest.mark.timeout(360)  # a busy machine needs several times what a quiet one does
def test_while_shared_tiers_stand_still_clients_have_misses_and_nothing_worse() -> None:
    outcome = run(SECONDS, CALM_S, BACK_S_MAX, lookup_s_max=LOOKUP_S_MAX)
    assert not outcome.faults, outcome.report()
    assert len(outcome.phases) == 1 + 2 * len(OUTAGES)


def test_lookups_that_take_too_long_are_a_fault() -> None:
    """Where the machine is quiet enough to say so."""
    phase = Phase("redis standing still", ("redis",), 0.0, 10.0)
    for took_s, is_fault in ((0.05, False), (0.07, True)):
        calls = [Call("lookup", number / 100, took_s if number % 50 == 0 else 0.001) for number in range(1000)]
        calls.append(Call("fetch", 1.0, 1.0))
        for is_timed in (False, True):
            outcome = Outcome(Findings(calls=calls), [phase], [], 10.0, 0.055, is_timed)
            assert any("SLOW LOOKUPS" in each for each in outcome.faults) == (is_fault and is_timed)
