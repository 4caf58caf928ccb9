"""Questions to shared tiers, and tiers that answer none."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SHARED = "kvstore/movement/shared.py"
SHARED_TIERS = "kvstore/movement/shared_tiers.py"
QUESTIONS = "kvstore/movement/questions.py"
T_QUESTIONS = "tests/tiers/shared/test_questions.py"
T_BREAKER = "tests/tiers/shared/test_breaker.py"

MUTANTS = [
    Mutant(
        "a-bound-for-each-tier-that-stands-still",
        SHARED_TIERS,
        "                until_s = now_s + min(timeout_s / 2, bound_s)\n",
        "                until_s = now_s + timeout_s / 2\n",
        "a lookup waits for one stalled tier after the other",
        (f"{T_QUESTIONS}::test_a_lookup_waits_for_one_bound_however_many_tiers_stand_still",),
    ),
    Mutant(
        "lookups-wait-for-a-silent-tier",
        SHARED,
        "        return self.is_asked and not self._questions.is_silent\n",
        "        return self.is_asked\n",
        "every lookup waits for a tier that stands still",
        (f"{T_QUESTIONS}::test_lookups_wait_a_few_times_for_a_tier_that_stands_still_and_then_do_without",),
    ),
    Mutant(
        "a-tier-that-owes-an-answer-is-waited-for",
        SHARED,
        "        is_in_doubt = self.breaker.is_in_doubt or self._questions.owes\n",
        "        is_in_doubt = self.breaker.is_in_doubt\n",
        "each lookup that finds out whether a tier still stands still waits its whole bound",
        (f"{T_QUESTIONS}::test_lookups_wait_a_few_times_for_a_tier_that_stands_still_and_then_do_without",),
    ),
    Mutant(
        "a-tier-that-failed-is-waited-for",
        SHARED,
        "        is_in_doubt = self.breaker.is_in_doubt or self._questions.owes\n",
        "        is_in_doubt = self._questions.owes\n",
        "each lookup that finds out whether a tier still fails waits its whole bound",
        (f"{T_QUESTIONS}::test_a_tier_that_failed_is_hardly_waited_for_until_it_has_answered",),
    ),
    Mutant(
        "a-tier-that-failed-is-up-between-two-pauses",
        SHARED,
        "        return self.breaker.is_in_doubt or not self.is_asked\n",
        "        return not self.is_asked\n",
        "an operator sees a tier that is away as up each time its pause is over",
        (f"{T_BREAKER}::test_a_tier_that_failed_is_failing_until_it_has_answered_also_without_requests",),
    ),
    Mutant(
        "silence-is-no-failure",
        SHARED,
        "            if is_failure and self._questions.owes:\n",
        "            if False:\n",
        "a tier that stands still is asked again and again, and said to be up",
        (f"{T_QUESTIONS}::test_lookups_wait_a_few_times_for_a_tier_that_stands_still_and_then_do_without",),
    ),
    Mutant(
        "questions-that-pile-up",
        QUESTIONS,
        "        return len(self._patient) < LATE_COUNT_MAX\n",
        "        return True\n",
        "each lookup leaves a question to a tier that stands still",
        (f"{T_QUESTIONS}::test_few_questions_stay_asked_and_none_once_the_service_stops",),
    ),
    Mutant(
        "a-late-answer-over-what-is-known",
        SHARED_TIERS,
        "            unheard = [self._hint_of(key, now_s) is None for key in keys]\n",
        "            unheard = [True for key in keys]\n",
        "a tier that a read found wrong is believed again",
        (f"{T_QUESTIONS}::test_a_late_answer_changes_nothing_that_a_read_found_out_meanwhile",),
    ),
]
