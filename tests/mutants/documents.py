"""Documents in prompts of vLLM: whom what is computed over them may reach."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

REUSE = "clients/kvstore_client/engines/vllm/reuse.py"
DOCUMENTS = "clients/kvstore_client/engines/vllm/documents.py"
SCHEDULER = "clients/kvstore_client/engines/vllm/scheduler.py"
WORTH = "clients/kvstore_client/engines/vllm/worth.py"
T_DOCUMENTS = "tests/engines/vllm/test_documents.py"

MUTANTS = [
    Mutant(
        "blocks-of-mended-caches-are-kept",
        REUSE,
        "        tracked.is_doubtful = takes_derived(request)\n",
        "",
        "what was computed over mended blocks of vLLM's own cache is stored as the model's own",
        (f"{T_DOCUMENTS}::test_a_request_that_takes_mended_caches_is_not_kept",),
    ),
    Mutant(
        "mended-without-a-salt",
        REUSE,
        "        if tracked.is_doubtful:\n",
        "        if True:\n",
        "a mended cache lies in vLLM's own prefix cache for all",
        (f"{T_DOCUMENTS}::test_documents_of_another_salt_or_of_a_request_without_one_are_not_reused",),
    ),
    Mutant(
        "salts-of-tenants-are-one",
        DOCUMENTS,
        "    return salt[len(DERIVED) + 1 :] if takes_derived(request) else salt\n",
        '    return "" if takes_derived(request) else salt\n',
        "a tenant's documents are reused for another one",
        (f"{T_DOCUMENTS}::test_documents_of_another_salt_or_of_a_request_without_one_are_not_reused",),
    ),
    Mutant(
        "blocks-that-were-not-mended-stay",
        SCHEDULER,
        "        wrong = set(failed)\n",
        "        wrong = set(failed) if is_layerwise else set()\n",
        "vLLM gives blocks that nothing was written to to the next request with this prefix",
        (f"{T_DOCUMENTS}::test_blocks_of_a_mend_that_fails_are_dropped_though_its_request_was_aborted_meanwhile",),
    ),
    Mutant(
        "blocks-computed-over-those-that-were-not-mended-stay",
        SCHEDULER,
        "                if tracked.is_doubtful:\n                    wrong",
        "                if is_layerwise:\n                    wrong",
        "vLLM gives blocks that were computed over nothing to the next request with this prefix",
        (f"{T_DOCUMENTS}::test_blocks_computed_beside_a_mend_that_fails_are_dropped_too",),
    ),
    Mutant(
        "computed-over-blocks-that-another-one-fills",
        SCHEDULER,
        "                self._filling.append((request, found.computed))\n            return\n",
        "            return\n",
        "where a mend fails, another request of its step is computed over blocks that nobody has written",
        (f"{T_DOCUMENTS}::test_a_request_that_has_blocks_which_a_mend_fills_waits_for_the_next_step",),
    ),
    Mutant(
        "what-vllm-has-is-computed-again",
        REUSE,
        "        by_vllm = count - max(computed, min(prefix, count - 1))\n",
        "        by_vllm = count\n",
        "a prompt of which vLLM has most is computed anew, and all requests of the step wait",
        (f"{T_DOCUMENTS}::test_what_vllm_has_behind_the_documents_is_not_computed_again",),
    ),
    Mutant(
        "mended-though-vllm-is-faster",
        WORTH,
        "max(0.0, 1.0 - spent_s / vllm_s)\n",
        "1.0\n",
        "a short prompt comes later than without its documents, and all requests of its step wait",
        (f"{T_DOCUMENTS}::test_a_prompt_that_vllm_computes_sooner_is_not_mended",),
    ),
    Mutant(
        "not-mended-after-one-that-was-slow",
        WORTH,
        " or len(costs) < SEEN_MIN:\n",
        " or not costs:\n",
        "the first mend of an engine, which takes longest, is the only one of its minute",
        (f"{T_DOCUMENTS}::test_one_slow_mend_ends_no_others",),
    ),
    Mutant(
        "not-mended-ever-again",
        WORTH,
        " if each.at_s >= since_s]\n",
        "]\n",
        "after a minute in which the machine was busy no prompt is computed over its documents any more",
        (f"{T_DOCUMENTS}::test_a_prompt_that_vllm_computes_sooner_is_not_mended",),
    ),
    Mutant(
        "computed-in-full-within-a-step",
        "clients/kvstore_client/recompute/prefill.py",
        "            if plan.reused_token_count < request.reused_min:\n",
        "            if False:\n",
        "a prompt whose documents are gone is computed while all requests of the step wait, and counts as a mend",
        (f"{T_DOCUMENTS}::test_a_prompt_whose_documents_are_gone_when_it_is_mended_is_computed_by_vllm",),
    ),
    Mutant(
        "lost-midway-and-computed-in-full",
        "clients/kvstore_client/recompute/prefill.py",
        "        if self._request.reused_min:\n            raise DataLoss(reason)\n",
        "",
        "a prompt whose documents do not come is computed while all requests of the step wait",
        (f"{T_DOCUMENTS}::test_a_sidecar_that_stalls_is_waited_for_once_by_the_mends_of_a_step",),
    ),
    Mutant(
        "a-mend-is-measured-as-a-prefill",
        SCHEDULER,
        ", mends=bool(self._mends)",
        "",
        "plans load what is faster computed, for a few tokens seem to take as long as a whole prompt",
        (f"{T_DOCUMENTS}::test_a_step_that_mends_says_nothing_of_what_vllm_computes_in_a_time",),
    ),
]
