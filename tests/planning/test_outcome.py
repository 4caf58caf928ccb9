"""Outcomes: plans beside what was measured, and numbers that no plan has."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kvstore.planning.loading import Candidate, LoadPlan, Way
from kvstore.planning.loading.outcome import carried_out, is_sound_plan, judged
from kvstore.wire.plans import plan_from_message, plan_to_message


def way(name: Way, ttft_s: float, stop: int = 0, refused: str = "") -> Candidate:
    return Candidate(name, "KV", 0, stop, ttft_s, 2 * ttft_s, 0.0, 0.0, 0.0, 0.0, ttft_s, refused=refused)


PREFILL, LOAD, FIRST = way(Way.PREFILL, 1.0), way(Way.LOAD, 4.0, 100), way(Way.FIRST, 0.5, 40)
PLAN = LoadPlan(128, FIRST, (PREFILL, LOAD, FIRST), "")


def test_what_was_carried_out_is_compared() -> None:
    on = judged(PLAN, "on", 0.8)
    assert on is not None
    assert (on.planned_s, on.missed_s) == (0.5, 0.0)
    assert on.error_s == on.regret_s == pytest.approx(0.3)
    assert (on.is_within(0.15), on.is_within(0.5)) == (False, True)
    for mode in ("observe", "off"):
        seen = judged(PLAN, mode, 4.4)
        assert seen is not None
        assert (seen.planned_s, seen.missed_s) == (4.0, pytest.approx(3.9)), "all was loaded"
        assert seen.regret_s == pytest.approx(3.9)
        assert seen.is_within(0.15)
    assert carried_out(replace(PLAN, candidates=(PREFILL,)), "observe") is PREFILL


def test_who_observes_and_did_as_planned_has_missed_nothing() -> None:
    """Also where the plan came over the wire, which makes the chosen way anew."""
    plan = LoadPlan(128, LOAD, (PREFILL, LOAD), "")
    for each in (plan, plan_from_message(plan_to_message(plan))):
        seen = judged(each, "observe", 4.4)
        assert seen is not None
        assert (seen.planned_s, seen.missed_s) == (4.0, 0.0)


def test_a_way_that_may_not_be_taken_is_not_regretted() -> None:
    refused = replace(FIRST, refused="it is hard to predict")
    found = judged(replace(PLAN, chosen=PREFILL, candidates=(PREFILL, refused)), "on", 1.0)
    assert found is not None
    assert (found.regret_s, found.error_s) == (0.0, 0.0)


@pytest.mark.parametrize("took_s", [0.0, -1.0, math.nan, math.inf, 3601.0])
def test_what_is_no_time_is_not_compared(took_s: float) -> None:
    assert judged(PLAN, "on", took_s) is None


def test_a_plan_that_foretells_nothing_is_not_compared() -> None:
    assert judged(replace(PLAN, is_measured=False), "on", 1.0) is None
    for bad in (math.nan, math.inf, -1.0):
        wrong = replace(LOAD, ttft_s=bad)
        plan = replace(PLAN, candidates=(PREFILL, wrong, FIRST))
        assert not is_sound_plan(plan)
        assert judged(plan, "on", 1.0) is None
    assert not is_sound_plan(replace(PLAN, chosen=replace(FIRST, cost=math.nan)))
    assert is_sound_plan(PLAN)
