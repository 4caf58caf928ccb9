"""The cost of one plan: of a prompt of 512 chunks in as many runs, which alternate between three tiers."""

from __future__ import annotations

import time

from kvstore.planning.loading import ComputeRate, HeldRun, LoadFacts, Stock, TierFacts, TierRate, plan_loading
from kvstore.spec import Tier

RUNS, CHUNK_TOKENS, TOKEN_BYTES = 512, 64, 1e5
COST_S_MAX = 1e-3
"""The most that a plan may cost."""
REPEATS = 50


def plan_cost_s() -> float:
    """Return the CPU seconds of one plan: the least of some tries, since other processes only make it slower."""
    return min(_timed_s() for _ in range(REPEATS))


def _timed_s() -> float:
    facts = _facts()
    began_s = time.process_time()
    plan_loading(facts)
    return time.process_time() - began_s


def _facts() -> LoadFacts:
    """Return new facts: a plan keeps what it has counted in them."""
    tiers = (Tier.DRAM, Tier.NVME, Tier.S3)
    runs = tuple(HeldRun(CHUNK_TOKENS, tiers[index % len(tiers)], TOKEN_BYTES) for index in range(RUNS))
    known = TierFacts(TierRate(0.0, 1e-10, 1.0, 9))
    count = RUNS * CHUNK_TOKENS
    return LoadFacts(
        token_count=count + CHUNK_TOKENS, reusable_tokens=count, stocks=(Stock(runs),),
        compute=ComputeRate(0.0, 1e-4, 1e-9, 1.0, 1.1, 9), link=TierRate(0.0, 1e-11, 1.0, 9),
        tiers=dict.fromkeys(tiers[1:], known), layer_count=32, unit_tokens=CHUNK_TOKENS,
    )  # fmt: skip
