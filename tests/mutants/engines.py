"""Engines: whose memory is read and written, and whose cache is loaded and kept."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

OPAQUE = "clients/kvstore_client/opaque/calls.py"
READING = "clients/kvstore_client/opaque/reader.py"
SGLANG = "clients/kvstore_client/engines/sglang.py"
SCHEDULER = "clients/kvstore_client/engines/vllm/scheduler.py"
JOBS = "kvstore/seams/scheduler.py"
T_BYTES = "tests/e2e/test_bytes.py"
T_SGLANG = "tests/engines/test_sglang.py"
T_VLLM = "tests/engines/vllm/test_loads.py"
T_FAILED = "tests/engines/vllm/test_failed_loads.py"
T_SAVES = "tests/engines/vllm/test_saves.py"
SAVES = "clients/kvstore_client/engines/vllm/saves.py"
WORKER = "clients/kvstore_client/engines/vllm/worker.py"
NAMING = "clients/kvstore_client/engines/vllm/naming.py"
IDENTITY = "clients/kvstore_client/engines/vllm/identity.py"
T_IDENTITY = "tests/engines/vllm/test_identity.py"
GATHERING = "clients/kvstore_client/store/gathering.py"
INDICES = f"{T_SGLANG}::test_indices_that_are_no_page_of_the_pool_touch_no_memory"

MUTANTS = [
    Mutant(
        "indices-before-the-pool",
        SGLANG,
        "    if found.min() < 0 or (",
        "    if (",
        "memory before the pool is stored, and written over",
        (INDICES,),
    ),
    Mutant(
        "indices-behind-the-pool",
        SGLANG,
        " or (size is not None and found.max() >= size):\n",
        ":\n",
        "memory behind the pool is stored, and written over",
        (INDICES,),
    ),
    Mutant(
        "indices-with-holes",
        SGLANG,
        "    if (pages != pages[:, :1] + np.arange(step)).any():\n",
        "    if False:\n",
        "a page is read as one run, and its tokens lie elsewhere",
        (INDICES,),
    ),
    Mutant(
        "indices-that-are-no-numbers",
        SGLANG,
        '    if found.ndim != 1 or found.dtype.kind not in "iu":\n',
        "    if False:\n",
        "a mask is taken for the first tokens of the pool",
        (INDICES,),
    ),
    Mutant(
        "more-indices-than-pages",
        SGLANG,
        "    if found.size != page_count * step:\n",
        "    if False:\n",
        "keys are stored with the pages of others",
        (f"{T_SGLANG}::test_wrong_indices_and_an_unnamed_model_are_said",),
    ),
    Mutant(
        "pages-of-another-form",
        SGLANG,
        '            facts |= {name: str(getattr(pool, name, None)) for name in ("dtype", "layout", "page_size")}\n',
        "",
        "an engine reads pages that were packed in another way",
        (f"{T_SGLANG}::test_another_dtype_layout_or_page_size_never_shares",),
    ),
    Mutant(
        "pages-of-another-rank",
        SGLANG,
        '        if getattr(storage_config, "is_mla_model", False):  # every rank has the same latents\n',
        "        if True:\n",
        "a rank reads another rank's heads",
        (f"{T_SGLANG}::test_another_model_rank_or_weights_never_share",),
    ),
    Mutant(
        "pages-of-other-weights",
        SGLANG,
        '        self._identity["weights"] = extra.get("weights_digest") or f"unverified:{model}"\n',
        '        self._identity["weights"] = f"unverified:{model}"\n',
        "after a change of weights the old cache is served",
        (f"{T_SGLANG}::test_another_model_rank_or_weights_never_share",),
    ),
    Mutant(
        "values-of-another-size",
        READING,
        "                    if head is not None and head.size == targets[number].size:\n",
        "                    if head is not None:\n",
        "a page is filled with a shorter value and what lies behind it",
        (f"{T_BYTES}::test_many_at_once_and_each_by_itself[local]",),
    ),
    Mutant(
        "good-or-not",
        READING,
        "                    done[number] = is_good\n",
        "                    done[number] = True\n",
        "bytes of a value that went under the copy are a page",
        (f"{T_BYTES}::test_a_value_whose_place_is_anothers_under_its_copy_is_a_miss",),
    ),
    Mutant(
        "targets-that-share-memory",
        OPAQUE,
        "    check_apart([span for span, _ in spans], [name for _, name in spans])\n",
        "",
        "a page is fetched over another one",
        (f"{T_BYTES}::test_targets_that_share_memory_are_refused[local]",),
    ),
    Mutant(
        "puts-without-a-limit",
        OPAQUE,
        "        if len(receipts) >= PUTS_AT_ONCE:\n",
        "        if False:\n",
        "a call with many pages passes what a session may reserve, and most of them are not kept",
        (f"{T_BYTES}::test_more_values_at_once_than_a_session_may_reserve[local]",),
    ),
    Mutant(
        "refused-and-kept",
        OPAQUE,
        "        return receipt.wait(max(0.0, timeout_s)) > Durability.NONE\n",
        "        return receipt.wait(max(0.0, timeout_s)) >= Durability.NONE\n",
        "an engine drops a page from its memory that nobody has",
        (f"{T_BYTES}::test_a_value_that_finds_no_room_is_not_there_at_all",),
    ),
    Mutant(
        "value-replaced-under-its-copy",
        READING,
        "        good = prefix.settle(bad)\n        return [chunk.token_start < good for chunk, *_ in work]\n",
        "        return [True for _ in work]\n",
        "the bytes of the next value are handed out",
        (f"{T_BYTES}::test_a_value_whose_place_is_anothers_under_its_copy_is_a_miss",),
    ),
    Mutant(
        "loaded-to-the-last-token",
        SCHEDULER,
        "        useful = self._whole(int(request.num_tokens) - 1)\n",
        "        useful = self._whole(int(request.num_tokens))\n",
        "vLLM has no token left to compute, and no logits",
        (f"{T_VLLM}::test_a_prompt_that_is_whole_leaves_a_block_to_compute",),
    ),
    Mutant(
        "loaded-where-nothing-may-be-reused",
        SCHEDULER,
        "        if not self._does_load or useful <= computed or request.skip_reading_prefix_cache:\n",
        "        if not self._does_load or useful <= computed:\n",
        "a request that wants the logits of its prompt is given none",
        (f"{T_VLLM}::test_a_prompt_that_is_whole_leaves_a_block_to_compute",),
    ),
    Mutant(
        "loaded-again-after-it-failed",
        SCHEDULER,
        "        if tracked is None or tracked.has_failed or self._patience.is_spent:\n",
        "        if tracked is None or self._patience.is_spent:\n",
        "a request goes round and round over a load that fails",
        (f"{T_FAILED}::test_a_load_that_fails_is_told_and_not_tried_again",),
    ),
    Mutant(
        "kept-though-it-is-doubtful",
        SCHEDULER,
        "        if until <= tracked.kept or tracked.is_doubtful:\n",
        "        if until <= tracked.kept:\n",
        "what was computed beside blocks that never came is stored as the model's own",
        (f"{T_FAILED}::test_a_load_that_fails_is_told_and_not_tried_again",),
    ),
    Mutant(
        "blocks-of-before-it-was-preempted",
        SCHEDULER,
        "                if is_whole:\n                    tracked.block_ids = []\n",
        "",
        "the blocks of another request are stored as this one's",
        (f"{T_VLLM}::test_an_engine_that_only_stores_forgets_the_blocks_of_before_it_was_preempted",),
    ),
    Mutant(
        "shared-with-the-old-weights",
        SCHEDULER,
        "        self._adapters = self._adapters.of_unknown_weights()\n",
        "",
        "after a change of weights the old cache is loaded",
        (f"{T_VLLM}::test_after_a_reset_nothing_of_before_is_loaded_or_kept",),
    ),
    Mutant(
        "kept-from-before-the-reset",
        SCHEDULER,
        "                tracked.has_failed = tracked.is_doubtful = True\n",
        "                pass\n",
        "what two sets of weights computed is stored as one cache",
        (f"{T_VLLM}::test_after_a_reset_nothing_of_before_is_loaded_or_kept",),
    ),
    Mutant(
        "computed-over-a-failed-load-and-cached",
        SCHEDULER,
        "                wrong.update(tracked.block_ids[first:])\n",
        "",
        "vLLM gives blocks that were computed over a failed load to other requests",
        (f"{T_FAILED}::test_what_is_computed_over_a_failed_load_is_not_kept",),
    ),
    Mutant(
        "images-by-their-numbers",
        NAMING,
        '    if not getattr(items, "mm_processor_cache_gb", 1):\n',
        "    if False:\n",
        "an answer is about the first image of another process",
        (f"{T_IDENTITY}::test_images_need_a_name_by_their_content",),
    ),
    Mutant(
        "quantized-otherwise",
        IDENTITY,
        "    if online is not None:\n",
        "    if False:\n",
        "an engine loads what weights of another quantization computed",
        (f"{T_IDENTITY}::test_what_is_beside_the_configuration_is_in_the_identity",),
    ),
    Mutant(
        "blocks-of-another-adapter",
        SCHEDULER,
        "            self._doubt_mixed(request)\n",
        "            pass\n",
        "blocks that an adapter's files of before computed are stored as those of its new files",
        (f"{T_VLLM}::test_blocks_of_an_adapters_files_of_before_are_not_kept",),
    ),
    Mutant(
        "pages-given-away-while-read",
        SAVES,
        "        if wait(reading, END_S_MAX).not_done:\n",
        "        if False:\n",
        "a prompt is stored with the tokens of the one that got its blocks",
        (
            f"{T_SAVES}::test_a_block_that_is_given_out_again_is_read_before_it_is_written",
            f"{T_SAVES}::test_pages_are_not_given_away_under_a_save_that_reads_on",
        ),
    ),
    Mutant(
        "read-though-given-up",
        SAVES,
        "            self._reads = self._is_wanted\n",
        "            self._reads = True\n",
        "a save that was given up stores what its blocks hold by then",
        (f"{T_SAVES}::test_a_save_that_has_not_begun_is_given_up_for_its_blocks",),
    ),
    Mutant(
        "saves-that-nobody-ends",
        WORKER,
        "        if self._is_waiting or not self._can_give_way:\n",
        "        if self._is_waiting:\n",
        "where vLLM does not say what it writes, a save reads another prompt's tokens",
        (f"{T_SAVES}::test_where_nobody_says_which_blocks_change_a_save_ends_in_its_step",),
    ),
    Mutant(
        "blocks-given-out-unsaid",
        SCHEDULER,
        "                step.written += block_ids[computed // self._block_tokens :] if is_whole else block_ids\n",
        "",
        "a save reads blocks that are another request's by then",
        (f"{T_SAVES}::test_the_scheduler_names_the_blocks_that_a_step_may_write",),
    ),
    Mutant(
        "blocks-loaded-into-unsaid",
        SCHEDULER,
        "        self._written += block_ids[start // self._block_tokens :]\n",
        "",
        "a load writes blocks that a save still reads",
        (f"{T_SAVES}::test_the_scheduler_names_the_blocks_that_a_step_may_write",),
    ),
    Mutant(
        "blocks-computed-again-unsaid",
        SCHEDULER,
        "                if tracked.has_failed:  # it computes blocks again that it has\n",
        "                if False:\n",
        "blocks are written again, after a load that failed, while a save reads them",
        (f"{T_SAVES}::test_the_scheduler_names_the_blocks_that_a_step_may_write",),
    ),
    Mutant(
        "one-layer-for-all",
        GATHERING,
        "        self._position = position\n",
        "        self._position = 0\n",
        "each layer is stored as a copy of the first",
        ("tests/e2e/test_paged.py::test_a_store_takes_every_token_from_its_slot",),
    ),
    Mutant(
        "memory-kept-by-who-did-the-job",
        JOBS,
        "    call.clear()\n",
        "",
        "the memory of a lost cache stays until the next call, beside the next cache",
        ("tests/seams/test_jobs.py::test_what_a_job_was_about_is_free_when_its_end_is_told",),
    ),
    Mutant(
        "error-that-keeps-itself",
        JOBS,
        "    finally:\n        del future, error\n",
        "    finally:\n        pass\n",
        "the memory of a lost cache stays until garbage is collected, beside the next cache",
        ("tests/seams/test_jobs.py::test_an_error_goes_with_who_was_told_of_it",),
    ),
    Mutant(
        "cancelled-and-run",
        JOBS,
        "        if not future.set_running_or_notify_cancel():\n            return\n",
        "        future.set_running_or_notify_cancel()\n",
        "a copy that was called off writes into memory that is another's",
        ("tests/seams/test_jobs.py::test_a_cancelled_call_never_runs",),
    ),
]
