"""Lossy reuse: by a profile of these weights only, and only while it still holds."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

DECISION = "kvstore/planning/decision.py"
DRIFT = "clients/kvstore_client/gate/drift.py"
GATE = "clients/kvstore_client/gate/gate.py"
OFFERS = "kvstore/planning/offers.py"
PERMIT = "kvstore/planning/permit.py"
PROFILE = "kvstore/planning/profile.py"
RUNS = "clients/kvstore_client/recompute/runs.py"
SENDER = "kvstore/planning/sender.py"
T_DECISION = "tests/planning/test_decision.py"
T_GATE = "tests/recompute/test_gate.py"
T_PROFILE = "tests/recompute/test_profile.py"
T_WORK = "tests/recompute/test_work.py"

MUTANTS = [
    Mutant(
        "a-beam-search-makes-a-mended-cache-exact",
        "clients/kvstore_client/engines/transformers_layers.py",
        "            mark_derived([self.keys, self.values])\n",
        "            pass\n",
        "the cache of an answer over mended documents is stored as exact",
        ("tests/engines/test_kept_prompts.py::test_what_transformers_copies_of_a_derived_cache_is_derived",),
    ),
    Mutant(
        "profile-found-by-its-name",
        PERMIT,
        "            self.profile.check(receiver, sender)\n",
        "            pass\n",
        "one model's profile lets another's caches through",
        (f"{T_GATE}::test_anothers_profile_under_this_name_is_refused",),
    ),
    Mutant(
        "no-profile-is-a-permit",
        OFFERS,
        "    return Choice((offer,), offer.permit.setting, offer.permit.reason)\n",
        "    return Choice((offer,), offer.permit.setting or Recompute.reuse())\n",
        "caches are reused that no profile lets through",
        (f"{T_DECISION}::test_without_a_permit_or_a_setting_only_what_is_exact_is_reused",),
    ),
    Mutant(
        "two-settings-and-the-first-decides",
        OFFERS,
        "next((each for each in settings if all(map(each.covers, settings))), None)",
        "next((each for each in settings), None)",
        "a sibling's cache is computed again only as far as is enough for the model's own",
        (f"{T_DECISION}::test_settings_of_which_neither_covers_the_other_are_not_mixed",),
    ),
    Mutant(
        "segment-reused-beyond-what-is-stored",
        OFFERS,
        "        stop = min(segment.token_start + segment.stored_token_count, limit)\n",
        "        stop = min(segment.token_stop, limit)\n",
        "a document of which the end is gone is fetched whole, and the prompt computed in full for it",
        (f"{T_DECISION}::test_nothing_is_reused_beyond_what_was_found",),
    ),
    Mutant(
        "planned-twice",
        OFFERS,
        "                start = max(start, taken.stop)\n",
        "",
        "two caches land on the same rows",
        (f"{T_DECISION}::test_no_token_is_reused_twice_and_none_whose_logits_are_wanted",),
    ),
    Mutant(
        "e-beyond-what-came",
        DECISION,
        "stop=min(offered.stop, offered.cache.token_start + known.token_count))\n",
        "stop=offered.stop)\n",
        "rows start from hidden states that nobody stored",
        (f"{T_DECISION}::test_nothing_is_reused_beyond_what_was_found",),
    ),
    Mutant(
        "planned-though-all-is-computed",
        DECISION,
        "    if not facts.allows_lossy or not (facts.senders or facts.own.segments):\n",
        "    if not (facts.senders or facts.own.segments):\n",
        "bytes are fetched to be computed again",
        (f"{T_DECISION}::test_without_a_permit_or_a_setting_only_what_is_exact_is_reused",),
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
        "            if watched.watch.has_drifted:\n",
        "            if False:\n",
        "answers go on misleading though every check says so",
        (f"{T_GATE}::test_drift_switches_off_everywhere_until_there_is_another_profile",),
    ),
    Mutant(
        "deterministic-and-lossy-all-the-same",
        "kvstore/planning/terms.py",
        "and not self.is_deterministic and not self.is_overdue",
        "and not self.is_overdue",
        "who asked for exact reuse gets an answer over mended documents",
        ("tests/engines/test_terms.py::test_who_sets_no_quality_or_wants_all_of_it_gets_what_is_exact",),
    ),
    Mutant(
        "the-gates-floor-and-not-the-requests",
        GATE,
        "self.floor if floor is None else floor",
        "self.floor",
        "an answer costs more quality, or more time, than its caller said",
        ("tests/engines/test_terms.py::test_quality_chooses_the_setting_by_which_documents_are_mended",),
    ),
    Mutant(
        "drift-is-told-to-nobody",
        GATE,
        "            self._profiles.switch_off(pair, state.profile, reason)\n",
        "            pass\n",
        "each process of an engine has to be misled by itself",
        (f"{T_GATE}::test_drift_switches_off_everywhere_until_there_is_another_profile",),
    ),
    Mutant(
        "suspicion-changes-nothing",
        GATE,
        "            if watched.until_check and not watched.watch.is_suspicious:\n",
        "            if watched.until_check:\n",
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
        "        if run.is_exact and (is_lossy or run.rotated_from != run.token_start or run.sender is not None):\n",
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
        SENDER,
        '"layer_count", "hidden_size", "vocab_size", "tokenizer_digest", "cache_dtype",',
        '"layer_count", "hidden_size", "vocab_size", "cache_dtype",',
        "the cache of other words with the same numbers is loaded",
        ("tests/e2e/test_partial_prefill.py::test_a_sender_of_another_tokenizer_is_refused_and_shares_no_cache",),
    ),
]
