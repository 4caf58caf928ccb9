"""Layers with block tables of their own, in vLLM: which blocks are read and written, and when."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

GEOMETRY = "clients/kvstore_client/engines/vllm/geometry.py"
GROUPS = "clients/kvstore_client/engines/vllm/groups.py"
SAVES = "clients/kvstore_client/engines/vllm/saves.py"
SCHEDULER = "clients/kvstore_client/engines/vllm/scheduler.py"
STEP = "clients/kvstore_client/engines/vllm/step.py"
WORKER = "clients/kvstore_client/engines/vllm/worker.py"
T_GROUPS = "tests/engines/vllm/test_groups.py"
T_FITS = "tests/engines/vllm/test_group_settings.py"
T_IDENTITY = "tests/engines/vllm/test_identity.py"
LOAD = f"{T_GROUPS}::test_a_load_fills_the_blocks_that_each_group_has"
PIECES = f"{T_GROUPS}::test_a_prefill_in_pieces_is_kept_while_its_blocks_are_there"
WRITTEN = f"{T_GROUPS}::test_a_step_names_the_blocks_of_all_groups_that_it_may_write"
FAILED = f"{T_GROUPS}::test_a_load_that_fails_is_told_by_its_request"
PART = f"{T_GROUPS}::test_a_load_of_which_a_part_cannot_begin_has_failed"
MISSING = f"{T_GROUPS}::test_behind_a_chunk_that_is_missing_nothing_is_kept"
NULL = f"{T_GROUPS}::test_a_null_block_is_never_read_for_a_chunk"
T_MOVED = "tests/engines/vllm/test_moved.py"
LONGEST = f"{T_FITS}::test_the_longest_chunk_is_there_when_it_is_computed"

MUTANTS = [
    Mutant(
        "null-block-written",
        GROUPS,
        "        if self.window:\n            slots[of_tokens == NULL_BLOCK] = -1\n",
        "",
        "loads of all requests write over each other in the block that stands for none",
        (LOAD,),
    ),
    Mutant(
        "null-block-read",
        GROUPS,
        "        if not self.window:\n            return 0\n",
        "        return 0\n",
        "a chunk is stored whose first tokens are of a block that stands for none",
        (NULL, PIECES),
    ),
    Mutant(
        "first-of-the-blocks-that-are-there",
        GROUPS,
        "for place in range(len(block_ids) - 1, -1, -1) if",
        "for place in range(len(block_ids)) if",
        "blocks between two that stand for none are read as if they were there",
        (PIECES,),
    ),
    Mutant(
        "blocks-as-they-were-given",
        SCHEDULER,
        "        tables = self._of_groups(state.resolve_block_ids(tracked.request.request_id))\n",
        "        tables = tracked.block_ids\n",
        "blocks that left a window are read when they are another request's",
        (PIECES, NULL),
    ),
    Mutant(
        "half-a-chunk-of-what-is-there",
        SCHEDULER,
        "        first = -(-max(held) // self._chunk_tokens) * self._chunk_tokens\n",
        "        first = max(held) // self._chunk_tokens * self._chunk_tokens\n",
        "the first tokens of a chunk are read from the block that stands for none",
        (PIECES,),
    ),
    Mutant(
        "windows-of-the-first-group-alone",
        SCHEDULER,
        "        first = -(-max(held) //",
        "        first = -(-min(held) //",
        "a chunk is stored of which one group has no blocks any more",
        (PIECES, NULL),
    ),
    Mutant(
        "copies-that-cannot-be-kept",
        SAVES,
        " or writer.wanted_token_start < save.start:\n",
        ":\n",
        "chunks are copied that the sidecar does not keep, for want of those before them",
        (MISSING,),
    ),
    Mutant(
        "one-fetch-for-all-groups",
        SCHEDULER,
        "            readers=ranks * len(self._groups),\n",
        "            readers=ranks,\n",
        "the chunks leave memory before the last group has fetched them",
        (f"{T_GROUPS}::test_a_load_holds_what_each_group_fetches",),
    ),
    Mutant(
        "tables-that-are-not-told",
        SCHEDULER,
        "        if state is None:\n            return until, []\n",
        "        if state is None:\n            return 0, tracked.block_ids\n",
        "blocks that left a window are read when they are another request's",
        (f"{T_GROUPS}::test_without_vllms_tables_nothing_is_kept",),
    ),
    Mutant(
        "blocks-of-the-first-group-unsaid",
        SCHEDULER,
        "                    step.written += given[computed // size :] if is_whole else given\n",
        "                    step.written += [] if place else given[computed // size :] if is_whole else given\n",
        "a save reads a windowed block that is another request's by then",
        (WRITTEN,),
    ),
    Mutant(
        "saves-that-read-windowed-blocks-unseen",
        STEP,
        "        return not all(blocks.isdisjoint(each) for each in self.block_ids)\n",
        "        return not blocks.isdisjoint(self.block_ids[0])\n",
        "a step writes to windowed blocks that a save still reads",
        (f"{T_GROUPS}::test_a_save_gives_way_in_each_group",),
    ),
    Mutant(
        "tokens-of-the-prompts-beginning",
        SAVES,
        "token_start=save.start)",
        "token_start=0)",
        "later tokens are stored as the prompt's first ones",
        (PIECES,),
    ),
    Mutant(
        "failed-requests-untold",
        WORKER,
        "            self._failed_requests.add(load.request_id)\n",
        "            pass\n",
        "vLLM attends to blocks that never came",
        (FAILED, PART),
    ),
    Mutant(
        "failed-requests-looked-up-again",
        SCHEDULER,
        "            if (tracked := self._tracked.get(name)) is not None:\n                self._cut(tracked)\n",
        "            pass\n",
        "a request goes round and round over a load that fails",
        (FAILED,),
    ),
    Mutant(
        "a-part-that-did-not-begin",
        WORKER,
        "                moving.is_whole = False\n",
        "",
        "a group's layers are read though nothing of them came",
        (PART,),
    ),
    Mutant(
        "told-while-a-part-still-writes",
        WORKER,
        "            running = [each for each in moving.transfers if not each.is_done]\n",
        "            running = [each for each in moving.transfers[:1] if not each.is_done]\n",
        "a load writes to blocks that are another request's by then",
        (f"{T_GROUPS}::test_a_load_has_ended_when_all_of_it_has",),
    ),
    Mutant(
        "chunks-a-block-too-long",
        GROUPS,
        "        return -(-self.window // self.block_tokens) * self.block_tokens\n",
        "        return (self.window // self.block_tokens + 1) * self.block_tokens\n",
        "chunks that a step cuts are not kept, and so none behind them",
        (LONGEST,),
    ),
    Mutant(
        "chunks-longer-than-a-window",
        GROUPS,
        "    if longest is None or (given is not None and given <= longest):\n",
        "    if longest is None or given is not None:\n",
        "nothing of long prompts is kept, and nobody says why",
        (f"{T_FITS}::test_a_longer_chunk_is_refused",),
    ),
    Mutant(
        "layerwise-into-several-tables",
        GROUPS,
        '    if settings.load == "layerwise":\n',
        "    if False:\n",
        "a layerwise load that fails ends the engine",
        (f"{T_FITS}::test_what_needs_one_table_is_refused",),
    ),
    Mutant(
        "windows-of-some-layers-in-the-name",
        GEOMETRY,
        "    if len(groups) == 1 or len(windows) != 1 or len(shapes) != 1:\n",
        "    if True:\n",
        "engines with one table and with several share nothing",
        (f"{T_FITS}::test_layers_are_named_alike_with_one_table_and_with_several",),
    ),
    Mutant(
        "windows-of-layers-of-another-shape",
        GEOMETRY,
        " or len(shapes) != 1:\n",
        ":\n",
        "engines of a model with wider full layers share nothing, with one table and with several",
        (f"{T_FITS}::test_layers_of_several_shapes_have_their_own_windows",),
    ),
    Mutant(
        "kinds-of-caches-that-nobody-knows",
        GEOMETRY,
        "    if kind not in KNOWN:\n",
        "    if False:\n",
        "the states of recurrent layers are kept as if they were tokens' K and V",
        (f"{T_IDENTITY}::test_a_model_without_heads_is_refused_by_its_layers",),
    ),
    Mutant(
        "loads-counted-twice",
        "clients/kvstore_client/engines/vllm/moved.py",
        "            self._counts, self._seconds = Counter(), {}\n",
        "",
        "vLLM's metrics add what was told before with every step",
        (f"{T_MOVED}::test_a_prompt_that_is_kept_and_loaded_is_counted",),
    ),
    Mutant(
        "bytes-of-null-blocks-counted",
        WORKER,
        "int((slots >= 0).sum())",
        "slots.size",
        "vLLM's metrics show bytes that were never loaded",
        (f"{T_MOVED}::test_of_a_windowed_group_what_has_blocks_is_counted",),
    ),
    Mutant(
        "failed-loads-told-as-good",
        WORKER,
        '        self.moved.add("failed_loads")\n',
        "",
        "nobody sees in vLLM's metrics that loads fail",
        (f"{T_MOVED}::test_a_load_that_fails_and_a_save_that_gives_way_are_counted",),
    ),
    Mutant(
        "saves-that-give-way-told-as-kept",
        SAVES,
        "                return None\n            computed()\n",
        "                return wanted\n            computed()\n",
        "nobody sees in vLLM's metrics that prompts are not kept",
        (f"{T_MOVED}::test_a_share_that_gives_way_is_dropped",),
    ),
    Mutant(
        "saves-without-a-sidecar-uncounted",
        SAVES,
        "            if not wanted and not writer.failure:\n",
        "            if not wanted:\n",
        "nobody sees in vLLM's metrics that prompts are not kept while the sidecar is away",
        (f"{T_MOVED}::test_what_is_not_kept_of_several_tables_is_dropped",),
    ),
    Mutant(
        "pieces-counted-again-and-again",
        SAVES,
        "        return save.new\n",
        "        return int(save.tokens.size)\n",
        "a prompt of many pieces counts as many more tokens than it has",
        (f"{T_MOVED}::test_a_prompt_that_is_kept_in_pieces_is_counted_once",),
    ),
]
