"""Fetches without a call, while the service evicts, refills and revokes: what counts is what was stored."""

from __future__ import annotations

from collections import Counter

from tests.sim.run import run_seed

ARENA_BYTES = 96 << 10
"""Little: chunks leave under their readers."""
SEEDS = (4, 8, 10)


def test_what_is_copied_without_a_call_is_what_was_stored() -> None:
    totals: Counter[str] = Counter()
    for seed in SEEDS:
        outcome = run_seed(seed, is_calm=True, arena_bytes=ARENA_BYTES, arena_region_bytes=ARENA_BYTES)
        assert outcome.failure is None, outcome.told()
        totals += outcome.totals
    assert totals["warm"] > 20, "hardly any chunk was fetched without a call"
    assert totals["warm_stale"], "no chunk left under its copy"
