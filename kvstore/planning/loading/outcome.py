"""Outcomes: what became of a plan, and how good the plan was, by the time that its first token took."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

from kvstore.planning.loading.planner import LoadPlan
from kvstore.planning.loading.timeline import Candidate, Way

MODES = ("off", "observe", "on")
"""A client's use of plans: none, only to look at them, or to follow them."""
PLANS_KEPT = 256
"""The last plans that the service keeps for operators."""
SECONDS_MAX = 3600.0
"""No prefill lasts longer: an outcome or a plan with more is ignored."""


@dataclass(frozen=True)
class PlanOutcome:
    """The report of an engine that plans by itself, of one prompt. ``stored_tokens``: stored when the plan was made, in
    documents and siblings' caches, too. ``ttft_s`` and ``wait_s``: as of ``PrefillEnd``; None: the first token's time
    is not the plan's. ``age_s``: seconds since the plan was made."""

    plan: LoadPlan
    mode: str
    stored_tokens: int
    ttft_s: float | None = None
    wait_s: float = 0.0
    is_given_up: bool = False
    age_s: float = 0.0


@dataclass(frozen=True)
class Foretold:
    """``planned_s``: the planned time of what was carried out, ``took_s``: the measured time. ``regret_s``: seconds by
    which it came later than the fastest way that the engine could have gone was planned to. ``missed_s``: seconds by
    which it came later than the plan would have had it that was not carried out."""

    planned_s: float
    took_s: float
    regret_s: float
    missed_s: float

    @property
    def error_s(self) -> float:
        return abs(self.took_s - self.planned_s)

    def is_within(self, share: float) -> bool:
        """True when the plan was off by no more than a share of the measured time."""
        return self.error_s <= share * self.took_s


def judged(plan: LoadPlan, mode: str, took_s: float) -> Foretold | None:
    """Compare a plan with the measured time to the first token. None: the plan foretold nothing, for the engine's speed
    was not known; or one of the two is no time."""
    if not (plan.is_measured and is_sound_plan(plan) and 0.0 < took_s <= SECONDS_MAX):
        return None
    done = carried_out(plan, mode)
    best_s = min((each.ttft_s for each in plan.candidates if not each.refused), default=done.ttft_s)
    missed_s = 0.0 if done == plan.chosen or mode == "on" else max(0.0, took_s - plan.chosen.ttft_s)
    return Foretold(done.ttft_s, took_s, max(0.0, took_s - best_s), missed_s)


def carried_out(plan: LoadPlan, mode: str) -> Candidate:
    """Return what an engine did in a mode: who only observes loads all that is stored, documents and siblings' caches
    included."""
    if mode == "on":
        return plan.chosen
    loads = [each for each in plan.candidates if each.way in (Way.LOAD, Way.BLEND)]
    return max(loads, key=lambda each: each.load_stop, default=plan.prefill)


def is_sound_plan(plan: LoadPlan) -> bool:
    """False for numbers that no plan has. They are checked because engines tell them."""
    numbers = [each for candidate in plan.candidates for each in astuple(candidate) if isinstance(each, float)]
    return plan.chosen in plan.candidates and all(
        math.isfinite(each) and 0.0 <= each <= SECONDS_MAX * 1e3 for each in numbers
    )
