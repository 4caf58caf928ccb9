"""Loads: never slower than a prefill, and planned by rates that were measured."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

KEPT = "kvstore/planning/kept.py"
METERS = "kvstore/movement/meters.py"
PLANNER = "kvstore/planning/loading/planner.py"
RATES = "kvstore/planning/loading/rates.py"
COMPUTE = "kvstore/planning/loading/compute.py"
CLIENT = "clients/kvstore_client/loading/planner.py"
PATIENCE = "clients/kvstore_client/loading/patience.py"
PREFILLS = "kvstore/controller/prefills/prefills.py"
T_CALL = "tests/e2e/test_prefill_call.py"
CANDIDATES = "kvstore/planning/loading/candidates.py"
ORDER = "kvstore/planning/order.py"
VLLM = "clients/kvstore_client/engines/vllm/planning.py"
LOOKUPS = "clients/kvstore_client/engines/vllm/lookups.py"
T_ORDER = "tests/planning/test_order.py"
T_VLLM = "tests/engines/vllm/test_planned.py"
T_PATIENCE = "tests/engines/test_patience.py"
T_PLANNED = "tests/engines/test_planned_loads.py"
T_LOADING = "tests/planning/test_loading.py"
T_KEPT = "tests/planning/test_kept.py"
T_METERS = "tests/tiers/test_meters.py"
T_RATES = "tests/planning/test_rates.py"

T_STILL = "tests/engines/test_standing_still.py"
INQUIRY = "clients/kvstore_client/recompute/inquiry.py"

ENGINES = "kvstore/controller/prefills/engines.py"
PREFILL = "clients/kvstore_client/recompute/prefill.py"
T_TOLD = "tests/server/test_rates.py"

BLENDS = "kvstore/planning/blends.py"
WEIGHING = "clients/kvstore_client/recompute/weighing.py"
T_BLENDS = "tests/planning/test_blends.py"
T_DOCUMENTS = "tests/e2e/test_planned_documents.py"
T_TOLD_BLENDS = "tests/e2e/test_told_blends.py"
WIRE = "kvstore/wire/plans.py"
OUTCOME = "kvstore/planning/loading/outcome.py"

MUTANTS = [
    Mutant(
        "a-way-that-nobody-asked-for-is-taken",
        WIRE,
        "    if given is not None and WAYS.get(given.way) in ways:\n",
        "    if given is not None and given.way in WAYS:\n",
        "a sidecar's plan of documents is loaded as if it were the prompt's own prefix",
        (f"{T_TOLD_BLENDS}::test_a_way_that_nobody_asked_for_is_computed",),
    ),
    Mutant(
        "a-way-that-nobody-knows-has-a-prefills-time",
        WIRE,
        "chosen, why, is_measured = known[0], UNKNOWN_WAY, False",
        "chosen, why, is_measured = known[0], UNKNOWN_WAY, message.is_measured",
        "plans of a later release are compared with a prefill that nobody computed",
        (f"{T_TOLD_BLENDS}::test_a_release_that_knows_no_blends_takes_the_plan_for_no_time",),
    ),
    Mutant(
        "a-check-by-full-prefill-is-the-plans-time",
        PREFILL,
        "None if is_checked else timeline.total_s",
        "timeline.total_s",
        "plans of documents are said to be off by the full prefill that checks them",
        (f"{T_TOLD_BLENDS}::test_what_was_checked_by_a_full_prefill_tells_no_time",),
    ),
    Mutant(
        "who-observes-reuses-no-documents",
        OUTCOME,
        "if each.way in (Way.LOAD, Way.BLEND)]",
        "if each.way is Way.LOAD]",
        "what observing reuses is compared with a prefill",
        (f"{T_TOLD_BLENDS}::test_who_observes_reuses_all_and_that_is_compared",),
    ),
    Mutant(
        "a-blend-need-not-beat-a-prefill",
        PLANNER,
        '    if candidate.way is Way.PREFILL:\n        return ""\n',
        '    if candidate.way in (Way.PREFILL, Way.BLEND):\n        return ""\n',
        "documents in a tier of any slowness are loaded where computing them is sure to be faster",
        (f"{T_BLENDS}::test_a_blend_that_may_take_longer_than_a_prefill_is_refused",),
    ),
    Mutant(
        "a-gap-costs-nothing",
        CANDIDATES,
        "    rest_s = facts.compute.seconds(facts.token_count - blend.token_count, blend.token_count)\n",
        "    rest_s = facts.compute.seconds(facts.token_count - blend.lossy_stop, blend.lossy_stop)\n",
        "a prompt with tokens between its documents is blended where a prefill is faster",
        (f"{T_BLENDS}::test_no_reuse_is_a_tenth_faster_and_none_is_slower_than_a_prefill",),
    ),
    Mutant(
        "a-smaller-reuse-takes-its-own-setting",
        BLENDS,
        "        is_sticky = plan.recompute in (None, whole.recompute) and _lossy(plan) <= allowed\n",
        "        is_sticky = True\n",
        "answers change with the load of a tier",
        (f"{T_BLENDS}::test_a_smaller_reuse_never_takes_another_setting",),
    ),
    Mutant(
        "documents-are-reused-at-any-speed",
        WEIGHING,
        "        if candidate is loading.chosen:\n",
        "        if candidate is blends[0]:\n",
        "a plan says that computing is faster, and documents are loaded all the same",
        (f"{T_DOCUMENTS}::test_documents_are_blended_from_a_fast_device_and_computed_beside_a_slow_one",),
    ),
    Mutant(
        "any-plan-that-is-told-is-kept",
        "kvstore/controller/prefills/prefills.py",
        "outcome.mode in MODES and is_sound_plan(outcome.plan) and 0.0 <= outcome.age_s <= SECONDS_MAX",
        "True",
        "one client's NaN makes every look at the last plans fail",
        ("tests/e2e/test_told_plans.py::test_a_plan_with_numbers_that_none_has_is_left_out",),
    ),
    Mutant(
        "documents-wait-for-a-calls-deadline",
        PREFILL,
        "                plain_s(client, request) if plan.runs else 0.0,\n",
        "                0.0,\n",
        "a tier that stops costs a prompt with documents ten seconds",
        (f"{T_PATIENCE}::test_a_prompt_with_documents_does_so_too",),
    ),
    Mutant(
        "what-is-given-back-waits-for-a-calls-deadline",
        INQUIRY,
        "    elif result_in_time(release, 0.0 if held.is_silent else ANSWER_S_MIN, lambda _: None) is None:\n",
        "    elif release() is None:\n",
        "a sidecar that stops between two answers costs a prompt with documents ten seconds for each of its tickets",
        (f"{T_PATIENCE}::test_nor_is_it_to_give_back_what_it_held_before_it_stood_still",),
    ),
    Mutant(
        "a-sidecar-that-stands-still-is-asked-on",
        INQUIRY,
        "    if held.is_silent:\n",
        "    if False:\n",
        "a sidecar that stands still costs as many prefills as a prompt has senders",
        (f"{T_STILL}::test_it_is_asked_once_however_many_senders_there_are",),
    ),
    Mutant(
        "what-the-sidecar-has-not-opened-is-waited-for",
        "clients/kvstore_client/fetch/transfer.py",
        "        elif not self.ended.done():\n",
        "        elif False:\n",
        "a load that was given up is waited for until a call's deadline, where the sidecar has said nothing of it",
        (f"{T_STILL}::test_it_opens_no_fetch_of_what_it_holds",),
    ),
    Mutant(
        "patience-outlives-an-interrupt",
        PATIENCE,
        "            self.end()\n            raise\n",
        "            raise\n",
        "each interrupt at the beginning of a load leaves a thread behind that never ends",
        ("tests/engines/test_interrupted_patience.py::test_patience_ends",),
    ),
    Mutant(
        "engines-faster-than-any-device",
        ENGINES,
        "        if prefill.seconds * FASTEST_OPERATIONS_S < operations.token * prefill.new_tokens:\n",
        "        if False:\n",
        "one client's lie has every new engine of the model compute what it should load",
        (f"{T_TOLD}::test_durations_in_which_no_device_computes_are_left_out",),
    ),
    Mutant(
        "a-way-that-nobody-knows-is-loaded",
        INQUIRY,
        'if mode == "on" and plan is not None and plan.chosen.way is Way.PREFILL:\n',
        "if False:\n",
        "chunks that a later release holds for a way of its own are loaded as if they began the prompt",
        (f"{T_CALL}::test_a_chosen_way_that_only_a_later_release_knows_means_compute",),
    ),
    Mutant(
        "a-steps-time-is-memorys",
        CLIENT,
        "            if least_s <= expected_s <= most_s and most_s > TELLING * least_s:\n",
        "            if False:\n",
        "small loads that wait for a long step make memory look slow, until nothing is loaded",
        (f"{T_VLLM}::test_a_small_load_that_waits_for_a_long_step_does_not_make_memory_slow",),
    ),
    Mutant(
        "a-stalled-load-costs-two-prefills",
        PATIENCE,
        "min(prefill_s, chosen.ttft_high_s)",
        "prefill_s",
        "a tier that stops is waited for as long as a prefill takes, and then all is computed",
        (f"{T_VLLM}::test_what_is_faster_loaded_is_loaded_whole",),
    ),
    Mutant(
        "nobody-ages",
        ORDER,
        "        if contexts[index].waited_s + now_s < wait_s_max:\n",
        "        if True:\n",
        "a context that shares nothing waits for ever",
        (f"{T_ORDER}::test_a_stranger_waits_no_longer_than_the_bound",),
    ),
    Mutant(
        "observing-changes-what-vllm-loads",
        LOOKUPS,
        'decision is not None and self._planner.mode == "on" and',
        "decision is not None and",
        "an engine that observes computes what it would have loaded",
        (f"{T_VLLM}::test_observing_says_what_it_would_do_and_loads_all_the_same",),
    ),
    Mutant(
        "what-vllm-has-is-computed-once-more",
        VLLM,
        "            behind(given, computed), unit_tokens",
        "            given, unit_tokens",
        "a plan counts tokens that vLLM has, and stops where it need not",
        (f"{T_VLLM}::test_what_vllm_has_is_neither_loaded_nor_computed",),
    ),
    Mutant(
        "a-doubtful-tier-spoils-the-rest",
        CANDIDATES,
        "        if self.ttft_s(0, first, is_high=True) <= self._prefill_s:\n            return first\n",
        "        return first\n",
        "where the best stop is doubtful nothing is loaded, though a part of it is sure",
        (f"{T_VLLM}::test_the_first_tokens_are_loaded_where_the_rest_lies_too_deep",),
    ),
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
        ' or found.get("digest") != digest_of(content):\n',
        ":\n",
        "a damaged file decides what is loaded",
        (f"{T_KEPT}::test_what_is_kept_is_what_was_known_and_every_changed_byte_is_seen",),
    ),
    Mutant(
        "reads-given-up-take-the-time-of-others",
        METERS,
        "        if meter.reads and (not counted or now",
        "        if meter.reads and (now",
        "a client that begins and cancels makes a tier look faster than it is",
        (f"{T_METERS}::test_reads_that_are_given_up_do_not_make_a_tier_look_faster",),
    ),
    Mutant(
        "an-engine-stays-the-one-it-was",
        COMPUTE,
        "            if min(ratios) > LOAD_MAX or max(ratios) < 1 / LOAD_MAX:\n",
        "            if False:\n",
        "plans are wrong by far for sixteen requests",
        (f"{T_RATES}::test_an_engine_that_became_another_one_is_known_after_three_requests",),
    ),
    Mutant(
        "a-few-tokens-say-what-a-prompt-takes",
        COMPUTE,
        "most_tokens=most if most < READING_TOKENS else 0",
        "most_tokens=0",
        "an engine that only computes what follows a load looks so slow that nothing is computed again",
        (f"{T_RATES}::test_a_few_tokens_do_not_say_what_a_prompt_takes",),
    ),
    Mutant(
        "large-prefills-are-forgotten",
        COMPUTE,
        "    return prefills[1:] if large else (prefills[0], *prefills[2:])\n",
        "    return prefills[1:]\n",
        "after 32 prompts that were loaded nobody knows what a prefill takes",
        (f"{T_RATES}::test_the_last_large_prefill_is_remembered_however_many_small_ones_follow",),
    ),
    Mutant(
        "what-follows-a-front-is-learned-as-all",
        "clients/kvstore_client/recompute/prefill.py",
        "        if self._front or plan.recompute is not None",
        "        if plan.recompute is not None",
        "an engine that computed the end of a prompt is taken for one that computed all of it in that time",
        (
            "tests/engines/test_racing.py::test_what_was_computed_while_a_load_was_late_is_not_computed_again",
            f"{T_CALL}::test_the_front_is_computed_while_what_lies_behind_loads",
        ),
    ),
    Mutant(
        "rates-of-a-sidecar-are-believed",
        CLIENT,
        "        if rate.is_sound:\n            told",
        "        if True:\n            told",
        "a rate that is no number makes every load look good",
        (f"{T_PLANNED}::test_what_a_sidecar_tells_of_its_tiers_may_be_absurd",),
    ),
    Mutant(
        "the-way-from-memory-is-never-tried-again",
        CLIENT,
        "or (tier is Tier.DRAM and chunk.token_start) or",
        "or tier is Tier.DRAM or",
        "one bad minute, and nothing is loaded for good",
        (f"{T_PLANNED}::test_a_way_from_memory_that_was_slow_for_a_while_is_found_to_be_fast_again",),
    ),
    Mutant(
        "patience-without-end",
        PATIENCE,
        "                self._give_up()\n",
        "                pass\n",
        "a tier that stops in the middle of a plan is waited for until a call's deadline",
        (f"{T_PATIENCE}::test_a_generation_computes_what_a_stalled_tier_does_not_bring",),
    ),
    Mutant(
        "every-read-by-itself",
        METERS,
        "        if not meter.reads:\n            meter.since_s",
        "        if True:\n            meter.since_s",
        "reads side by side make a tier look faster than it is",
        (f"{T_METERS}::test_a_tier_that_is_never_idle_is_measured_every_second",),
    ),
    Mutant(
        "more-time-than-went-by",
        PREFILLS,
        " and computed.seconds <= took_s",
        "",
        "a client that lies makes its sidecar take an engine for slow",
        (f"{T_CALL}::test_lies_teach_nothing",),
    ),
    Mutant(
        "more-tokens-than-the-prompt-has",
        PREFILLS,
        "computed.new_tokens + computed.context_tokens <= token_count and ",
        "",
        "a client that lies makes its sidecar take an engine for fast",
        (f"{T_CALL}::test_a_prefill_of_more_than_the_prompt_teaches_nothing",),
    ),
    Mutant(
        "a-stream-outlives-its-session",
        "kvstore/controller/sessions/session.py",
        "            end()\n",
        "            pass\n",
        "a client that connects again and again takes all calls of its tenant",
        ("tests/server/test_abandoned.py::test_a_partial_prefill_ends_with_its_session",),
    ),
    Mutant(
        "a-plan-outlives-its-client",
        PREFILLS,
        "        self._tickets.release(planned.found.ticket)\n        if planned",
        "        if planned",
        "what was planned for a client that is gone stays in memory until its ticket expires",
        (f"{T_CALL}::test_a_client_that_goes_in_the_middle_holds_nothing",),
    ),
    Mutant(
        "all-is-held-that-was-found",
        PREFILLS,
        "        self._tickets.release(found.ticket)\n        if stop <= first:",
        "        if stop <= first:",
        "the ticket for all that was found is forgotten, and holds it",
        (f"{T_CALL}::test_it_is_computed_where_that_is_fastest_and_nothing_is_held",),
    ),
    Mutant(
        "a-race-without-an-end",
        "clients/kvstore_client/recompute/racing.py",
        "            if self.token_count >= self._stop:\n",
        "            if self.token_count >= len(self._request.tokens):\n",
        "a prompt whose load stopped is computed, and waits on",
        ("tests/engines/test_racing.py::test_what_was_computed_while_a_load_was_late_is_not_computed_again",),
    ),
    Mutant(
        "what-a-race-computed-is-lost",
        "clients/kvstore_client/recompute/prefill.py",
        "            if self._race is not None and self._race.token_count:\n",
        "            if False:\n",
        "a load that is given up costs a second prefill",
        ("tests/engines/test_racing.py::test_what_was_computed_while_a_load_was_late_is_not_computed_again",),
    ),
]
