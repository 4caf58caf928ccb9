"""Loads: never slower than a prefill, and planned by rates that were measured."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

KEPT = "kvstore/planning/loading/kept.py"
METERS = "kvstore/movement/meters.py"
PLANNER = "kvstore/planning/loading/planner.py"
RATES = "kvstore/planning/loading/rates.py"
T_LOADING = "tests/planning/test_loading.py"
T_METERS = "tests/tiers/test_meters.py"
T_RATES = "tests/planning/test_rates.py"

MUTANTS = [
    Mutant(
        "a-load-that-is-faster-on-average",
        PLANNER,
        "    if candidate.ttft_high_s > prefill.ttft_s:\n",
        "    if candidate.ttft_s > prefill.ttft_s:\n",
        "one load of ten is slower than a prefill",
        (f"{T_LOADING}::test_a_plan_beats_a_prefill_in_nine_of_ten_cases_or_it_is_not_chosen",),
    ),
    Mutant(
        "what-the-engine-cannot-do",
        PLANNER,
        "    if candidate.way not in facts.ways:\n",
        "    if False:\n",
        "an engine is told to do what it cannot",
        (f"{T_LOADING}::test_what_the_engine_cannot_do_is_listed_and_not_chosen",),
    ),
    Mutant(
        "no-surprise",
        RATES,
        "        if abs(surprises) > 1:\n",
        "        if abs(surprises) > 9:\n",
        "a tier that changed keeps its old rate for many requests",
        (f"{T_RATES}::test_two_surprises_of_one_kind_make_a_rate_of_their_own",),
    ),
    Mutant(
        "rates-of-any-digest",
        KEPT,
        ' or found.get("digest") != _digest(tiers):\n',
        ":\n",
        "a damaged file decides what is loaded",
        (f"{T_METERS}::test_every_changed_byte_is_seen",),
    ),
    Mutant(
        "every-read-by-itself",
        METERS,
        "        if not meter.reads:\n            meter.since_s",
        "        if True:\n            meter.since_s",
        "reads side by side make a tier look faster than it is",
        (f"{T_METERS}::test_a_tier_that_is_never_idle_is_measured_every_second",),
    ),
]
