"""Documents in prompts of vLLM: whom what is computed over them may reach."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

REUSE = "clients/kvstore_client/engines/vllm/reuse.py"
DOCUMENTS = "clients/kvstore_client/engines/vllm/documents.py"
SCHEDULER = "clients/kvstore_client/engines/vllm/scheduler.py"
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
]
