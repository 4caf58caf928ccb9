"""Prompts that one engine computes and another one answers, and staging that goes back while nobody uses it."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

LOOKUPS = "clients/kvstore_client/engines/vllm/lookups.py"
SCHEDULER = "clients/kvstore_client/engines/vllm/scheduler.py"
STAGING = "clients/kvstore_client/planes/shared_memory/staging.py"
MAPPED = "clients/kvstore_client/planes/shared_memory/mapped.py"
T_HANDED = "tests/engines/vllm/test_handover.py"
T_STAGING = "tests/e2e/test_staging.py"

MUTANTS = [
    Mutant(
        "handed-over-and-not-waited-for",
        LOOKUPS,
        "        if self._is_awaited(tracked, stored, computed, useful):\n",
        "        if False:\n",
        "the second engine computes what the first one is about to keep",
        (f"{T_HANDED}::test_the_second_engine_waits_for_what_the_first_keeps",),
    ),
    Mutant(
        "waited-for-without-end",
        LOOKUPS,
        "        return is_short and (until_s is None or self._clock.monotonic() < until_s)\n",
        "        return is_short\n",
        "a prompt whose first engine died never runs",
        (f"{T_HANDED}::test_what_never_comes_is_computed_after_a_while",),
    ),
    Mutant(
        "waited-for-where-nobody-answers",
        LOOKUPS,
        "        if answer.match.is_answered and self._is_about_to_come(",
        "        if self._is_about_to_come(",
        "while a sidecar is gone each prompt comes two seconds late, and a log says each look of it",
        (
            f"{T_HANDED}::test_while_no_sidecar_is_there_nothing_is_waited_for",
            f"{T_HANDED}::test_what_cannot_be_held_is_not_waited_for",
        ),
    ),
    Mutant(
        "each-look-is-a-decision",
        LOOKUPS,
        " or self._is_awaited(\n                    tracked, stored, computed, asked.useful\n                ):\n",
        ":\n",
        "a prompt that is waited for counts as hundreds of decisions, and of saved seconds",
        (f"{T_HANDED}::test_a_load_is_planned_when_its_wait_has_ended",),
    ),
    Mutant(
        "waited-for-longer-than-computing-takes",
        "clients/kvstore_client/engines/vllm/planning.py",
        "        return min(most_s, computing_s) if",
        "        return most_s if",
        "a first token comes later than if the second engine had computed the prompt",
        (f"{T_HANDED}::test_what_is_computed_sooner_is_not_waited_for",),
    ),
    Mutant(
        "waits-for-what-stays-on-its-node",
        LOOKUPS,
        "            if had >= promised // ",
        "            if had > promised // ",
        "each prompt of another node stands still for two seconds, for less than a chunk that never comes",
        (f"{T_HANDED}::test_a_part_of_a_chunk_is_not_waited_for_long",),
    ),
    Mutant(
        "looked-for-all-the-time",
        "clients/kvstore_client/engines/vllm/handover.py",
        "look_s * waiting_count / LOOKS_SHARE",
        "look_s",
        "while prompts are waited for the engine computes nothing",
        (f"{T_HANDED}::test_looking_again_takes_a_part_of_the_loops_time",),
    ),
    Mutant(
        "waiting-for-an-answer-takes-no-time",
        LOOKUPS,
        "            asked.took_s += waited_s\n",
        "",
        "where looks need a call, they take a third of the time in which running requests could go on",
        (f"{T_HANDED}::test_a_look_that_waits_for_a_call_takes_a_part_of_the_loops_time",),
    ),
    Mutant(
        "delayed-by-who-looks-for-nothing",
        LOOKUPS,
        "pause_s(look_s, len(self._awaiting))",
        "pause_s(look_s, len(self.waiting))",
        "behind a long queue a prompt that has come is found a second later",
        (f"{T_HANDED}::test_requests_that_look_for_nothing_delay_no_look",),
    ),
    Mutant(
        "last-chunk-is-a-part-of-one",
        LOOKUPS,
        "had >= promised // chunk * chunk:",
        "had >= wanted // chunk * chunk:",
        "the last chunk of a prompt that ends with it is computed once more",
        (f"{T_HANDED}::test_a_chunk_at_the_end_of_a_prompt_is_waited_for",),
    ),
    Mutant(
        "waited-for-after-a-preemption",
        SCHEDULER,
        "            tracked.prefilled = 0  # ",
        "            # ",
        "an answer that has begun stands still for what nobody will keep any more",
        (f"{T_HANDED}::test_a_request_that_was_preempted_waits_for_nobody",),
    ),
    Mutant(
        "waited-for-and-first",
        LOOKUPS,
        "                if not is_first or now_s < (tracked.prefilled_until_s or 0.0):",
        "                if not is_first:",
        "where memory is short, the requests behind one that waits are looked up again and again, and wait as long",
        (f"{T_HANDED}::test_who_waits_for_another_engine_takes_no_turn_from_those_behind",),
    ),
    Mutant(
        "held-while-waited-for",
        LOOKUPS,
        "            self.release(answer.match)\n            return None\n",
        "            return None\n",
        "each look of a waiting request holds its chunks until the ticket is too old",
        (f"{T_HANDED}::test_a_part_of_it_is_waited_on_and_held_by_nobody",),
    ),
    Mutant(
        "waited-for-under-another-name",
        SCHEDULER,
        " if self._is_alone and self._naming.is_common else 0\n",
        " if self._is_alone else 0\n",
        "after a reset each prompt stands still for what nobody keeps by this engine's names",
        (f"{T_HANDED}::test_engines_with_other_weights_wait_for_nothing_and_promise_nothing",),
    ),
    Mutant(
        "promised-under-another-name",
        SCHEDULER,
        " or tracked.is_doubtful or not self._naming.is_common:",
        " or tracked.is_doubtful:",
        "after a reset other engines wait for each prompt in vain",
        (f"{T_HANDED}::test_engines_with_other_weights_wait_for_nothing_and_promise_nothing",),
    ),
    Mutant(
        "waited-for-beside-others",
        SCHEDULER,
        "prefilled_tokens(request) if self._is_alone and",
        "prefilled_tokens(request) if",
        "a request that another connector could load at once waits for ours",
        (f"{T_HANDED}::test_beside_other_connectors_nothing_is_waited_for",),
    ),
    Mutant(
        "staging-in-use-goes-back",
        STAGING,
        "                if file.was_used or file.used_bytes:\n",
        "                if file.was_used:\n",
        "the sidecar cannot read what a client has just copied",
        (f"{T_STAGING}::test_what_a_store_still_uses_is_not_idle",),
    ),
    Mutant(
        "staging-never-goes-back",
        STAGING,
        "                file.was_used = False\n",
        "                pass\n",
        "what busy clients took once is missing for others until they end",
        (f"{T_STAGING}::test_what_a_client_stored_by_goes_back_when_it_is_idle",),
    ),
    Mutant(
        "staging-that-is-read-is-forgotten",
        STAGING,
        "look from where\n                    continue\n",
        "look from where\n                    pass\n",
        "what the sidecar does not take back now counts against the budget for ever",
        (f"{T_STAGING}::test_staging_that_the_sidecar_does_not_take_back_stays",),
    ),
    Mutant(
        "staging-that-may-be-gone-is-written",
        STAGING,
        "        offset = None if self.may_be_gone else self._free.take(byte_count)\n",
        "        offset = self._free.take(byte_count)\n",
        "a store writes where the sidecar reads nothing any more, and is refused",
        (f"{T_STAGING}::test_staging_of_which_nobody_knows_whether_it_went_back_is_not_used_and_goes_back",),
    ),
    Mutant(
        "late-answer-is-the-next-ones",
        MAPPED,
        "                    self._late_count += may_be_late and not come\n",
        "",
        "the answer to the next question is taken for the one after it",
        (f"{T_STAGING}::test_a_session_outlives_a_sidecar_that_stands_still_while_idle_staging_goes_back",),
    ),
]
