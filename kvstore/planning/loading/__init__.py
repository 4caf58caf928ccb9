"""Loading plans: decide whether a prompt's exact prefix is loaded, computed, or a part of each, and predict the time.

    plan = plan_loading(facts)
    plan.chosen.way, plan.chosen.ttft_s, plan.why

Frozen values and pure functions, as all of planning: client, service, command, simulator and tests run the same code.
``rates`` learns from moves how long a tier takes for bytes, ``compute`` learns from prefills how long a model takes for
tokens and what fetched tokens saved, and both give a confidence. ``operations`` counts the arithmetic of a spec's
layers. ``facts`` holds the inputs of a plan, ``timeline`` the times of one candidate,
``candidates`` lists the candidates, ``planner`` chooses, ``outcome`` compares a plan with what it took.

Never slower: a way other than plain prefill is chosen only when its own 90th percentile is below prefill's mean.
Runs are planned, not chunks: a plan of 512 chunks takes less than a millisecond.
"""

from kvstore.planning.loading.compute import ComputeRate, Prefill, Prefills, saved_seconds
from kvstore.planning.loading.facts import Blend, HeldRun, LoadFacts, Prices, Stock, TierFacts, merged_runs
from kvstore.planning.loading.operations import Operations
from kvstore.planning.loading.planner import LoadPlan, plan_loading
from kvstore.planning.loading.rates import ASSUMED, BusyTime, BusyTimes, TierRate
from kvstore.planning.loading.timeline import Candidate, Way

__all__ = [
    "ASSUMED",
    "Blend",
    "BusyTime",
    "BusyTimes",
    "Candidate",
    "ComputeRate",
    "HeldRun",
    "LoadFacts",
    "LoadPlan",
    "Operations",
    "Prefill",
    "Prefills",
    "Prices",
    "Stock",
    "TierFacts",
    "TierRate",
    "Way",
    "merged_runs",
    "plan_loading",
    "saved_seconds",
]
