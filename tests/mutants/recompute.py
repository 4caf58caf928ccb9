"""Lossy reuse: by a profile of these weights only, and only while it still holds."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

DRIFT = "clients/kvstore_client/recompute/drift.py"
GATE = "clients/kvstore_client/recompute/gate.py"
PROFILE = "clients/kvstore_client/recompute/profile.py"
RUNS = "clients/kvstore_client/recompute/runs.py"
T_GATE = "tests/recompute/test_gate.py"
T_PROFILE = "tests/recompute/test_profile.py"
T_WORK = "tests/recompute/test_work.py"

MUTANTS = [
    Mutant(
        "profile-found-by-its-name",
        GATE,
        "            reason = state.reason or self._refusal(state, receiver, sender)\n",
        "            reason = state.reason\n",
        "one model's profile lets another's caches through",
        (f"{T_GATE}::test_anothers_profile_under_this_name_is_refused",),
    ),
    Mutant(
        "profile-of-other-weights",
        PROFILE,
        "            elif ours.weights_digest != theirs.weights_digest:\n",
        "            elif False:\n",
        "what was measured on other weights decides",
        (f"{T_PROFILE}::test_a_profile_is_of_these_weights_and_no_others",),
    ),
    Mutant(
        "profile-of-another-regime",
        PROFILE,
        "            elif ours.regime != theirs.regime:\n",
        "            elif False:\n",
        "what was measured with another rope or dtype decides",
        (f"{T_PROFILE}::test_a_profile_is_of_these_weights_and_no_others",),
    ),
    Mutant(
        "profile-believed-to-the-last-digit",
        PROFILE,
        "        return self.quality - ERRORS * self.loss_error\n",
        "        return self.quality\n",
        "of many settings the luckiest is taken, not a good one",
        (f"{T_PROFILE}::test_the_cheapest_setting_that_keeps_enough_even_with_bad_luck",),
    ),
    Mutant(
        "drift-is-watched-and-kept",
        GATE,
        "            if state.watch.has_drifted:\n",
        "            if False:\n",
        "answers go on misleading though every check says so",
        (f"{T_GATE}::test_drift_switches_off_everywhere_until_there_is_another_profile",),
    ),
    Mutant(
        "drift-is-told-to-nobody",
        GATE,
        "            self._profiles.switch_off(pair, state.profile, state.reason)\n",
        "            pass\n",
        "each process of an engine has to be misled by itself",
        (f"{T_GATE}::test_drift_switches_off_everywhere_until_there_is_another_profile",),
    ),
    Mutant(
        "suspicion-changes-nothing",
        GATE,
        "            if state.until_check and not state.watch.is_suspicious:\n",
        "            if state.until_check:\n",
        "drift is seen after thirty times as many wrong answers",
        (f"{T_GATE}::test_the_first_and_every_nth_request_is_checked_and_all_under_suspicion",),
    ),
    Mutant(
        "answers-that-are-no-numbers",
        DRIFT,
        "    return ~(gap <= HALF) | ~lossy.isfinite().all(-1)\n",
        "    return gap > HALF\n",
        "an answer of NaN counts as a good one",
        (f"{T_GATE}::test_near_ties_do_not_mislead",),
    ),
    Mutant(
        "exact-in-the-middle",
        RUNS,
        "        if run.is_exact and (run.token_start or run.rotated_from or run.sender is not None):\n",
        "        if False:\n",
        "a cache that is another's, or stood elsewhere, is taken for the model's own",
        (f"{T_WORK}::test_runs_that_do_not_fit_are_refused",),
    ),
    Mutant(
        "reused-where-logits-are-wanted",
        RUNS,
        "    if not 1 <= logit_count <= token_count - last:\n",
        "    if not 1 <= logit_count:\n",
        "logits are asked of tokens that nobody computed",
        (f"{T_WORK}::test_runs_that_do_not_fit_are_refused",),
    ),
    Mutant(
        "sender-of-another-architecture",
        RUNS,
        "            check_sender(spec, run.sender)\n",
        "            pass\n",
        "another architecture's cache is loaded",
        (f"{T_WORK}::test_a_sender_of_another_architecture_is_named",),
    ),
    Mutant(
        "sender-of-another-tokenizer",
        RUNS,
        '"layer_count", "hidden_size", "vocab_size", "tokenizer_digest", "cache_dtype",',
        '"layer_count", "hidden_size", "vocab_size", "cache_dtype",',
        "the cache of other words with the same numbers is loaded",
        ("tests/e2e/test_partial_prefill.py::test_a_sender_of_another_tokenizer_is_refused_and_shares_no_cache",),
    ),
]
