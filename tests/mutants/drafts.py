"""What of a vLLM engine's cache has a name: its dtype and scales, and the layers of a draft."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

DRAFTS = "clients/kvstore_client/engines/vllm/drafts.py"
GEOMETRY = "clients/kvstore_client/engines/vllm/geometry.py"
IDENTITY = "clients/kvstore_client/engines/vllm/identity.py"
LOOKUPS = "clients/kvstore_client/engines/vllm/lookups.py"
NAMING = "clients/kvstore_client/engines/vllm/naming.py"
PAGES = "clients/kvstore_client/engines/vllm/pages.py"
SCHEDULER = "clients/kvstore_client/engines/vllm/scheduler.py"
T_DRAFTS = "tests/engines/vllm/test_drafts.py"
T_IDENTITY = "tests/engines/vllm/test_identity.py"
REFUSED = f"{T_IDENTITY}::test_caches_whose_bytes_have_no_name_are_refused"
NO_NAME = f"{T_DRAFTS}::test_drafts_whose_cache_has_no_name_are_refused"
WHOLE = f"{T_DRAFTS}::test_a_block_is_whole_once_all_of_it_was_computed_with_drafts"
WEIGHTS = f"{T_IDENTITY}::test_a_drafts_layers_have_its_weights_in_their_name"
RANKS = "tests/engines/vllm/test_loads.py::test_ranks_keep_their_heads_together_or_not_at_all"
LAYOUT = "tests/engines/vllm/test_bad_input.py::test_the_cpu_backends_pages_are_read_as_its_kernel_writes_them"

MUTANTS = [
    Mutant(
        "scales-of-each-token",
        GEOMETRY,
        "    if mode == PER_TENSOR and called in FP8:\n",
        "    if mode and called in FP8:\n",
        "bytes are kept without the scales that they mean nothing without",
        (REFUSED,),
    ),
    Mutant(
        "eight-bits-of-another-kind",
        GEOMETRY,
        "    if mode == PER_TENSOR and called in FP8:\n        return FP8[called]\n",
        '    if mode == PER_TENSOR:\n        return "float8_e4m3fn"\n',
        "bytes of one 8-bit dtype are read as those of another",
        (REFUSED,),
    ),
    Mutant(
        "modes-without-a-name",
        GEOMETRY,
        "    if mode:\n",
        "    if False:\n",
        "packed bytes are kept as if they were numbers",
        (REFUSED,),
    ),
    Mutant(
        "layers-of-several-dtypes",
        GEOMETRY,
        "    if len(dtypes) != 1:\n",
        "    if False:\n",
        "layers that are not quantised are named as if they were",
        (REFUSED,),
    ),
    Mutant(
        "transposed-or-not",
        PAGES,
        "    while scale < count:\n",
        "    while scale < 1:\n",
        "K of a page is read in the wrong order",
        (LAYOUT,),
    ),
    Mutant(
        "heads-of-the-next-rank",
        PAGES,
        "spec.layers[0].kv_heads // shares, rank // replicas\n",
        "spec.layers[0].kv_heads // shares, rank % shares\n",
        "a rank loads and keeps heads that it does not have",
        (RANKS,),
    ),
    Mutant(
        "layers-that-no-rank-keeps",
        PAGES,
        "        self.kept = range(rank % replicas, len(tensors), replicas)\n",
        "        self.kept = range(rank // replicas, len(tensors), replicas)\n",
        "of the ranks with the same heads all keep the same layers, and nobody the others",
        (RANKS,),
    ),
    Mutant(
        "drafts-of-any-kind",
        DRAFTS,
        "    if found.method not in (*OF_HIDDEN_STATES, *OF_TOKENS):\n",
        "    if False:\n",
        "a draft's cache is kept whose rules nobody has read",
        (NO_NAME,),
    ),
    Mutant(
        "a-draft-of-another-dtype",
        DRAFTS,
        "    if own not in (None, cache_dtype):\n",
        "    if False:\n",
        "the draft's layers are named by the target's dtype",
        (NO_NAME,),
    ),
    Mutant(
        "a-draft-of-many-layers",
        DRAFTS,
        '    if draft.method == "mtp" and layer_count != 1:\n',
        "    if False:\n",
        "layers that vLLM never computed of a prompt are kept",
        (NO_NAME,),
    ),
    Mutant(
        "blocks-before-another-token",
        SCHEDULER,
        "        if not self._behind.are_of(request, blocks[0]):\n",
        "        if False:\n",
        "a block of vLLM's prefix cache is kept whose draft's cache is another prompt's",
        (f"{T_DRAFTS}::test_a_block_that_was_computed_before_another_token_is_not_kept",),
    ),
    Mutant(
        "sessions-that-drop-a-token",
        NAMING,
        '        if getattr(request, "resumable", False):\n',
        "        if False:\n",
        "a draft's cache is kept of a token that a session dropped",
        (f"{T_DRAFTS}::test_a_session_whose_last_token_is_dropped_is_not_kept",),
    ),
    Mutant(
        "a-token-that-another-request-tells",
        NAMING,
        "            if place > first or self._tokens.get(block) == name:\n",
        "            if place > first or isinstance(self._tokens.get(block), str):\n",
        "a block whose next token is not known is taken for one that this request's follows",
        (f"{T_DRAFTS}::test_the_token_behind_a_block_is_known_once_it_is_sampled",),
    ),
    Mutant(
        "layers-with-more-heads",
        GEOMETRY,
        "    if replicas > 1 and not mla:",
        "    if False:",
        "a rank is given another one's head of the layers that have more heads",
        (
            "tests/engines/vllm/test_identity.py::"
            "test_ranks_that_have_one_head_of_each_layer_need_layers_that_are_alike",
        ),
    ),
    Mutant(
        "a-token-that-does-not-follow",
        DRAFTS,
        "    if reads_ahead and not is_second and ",
        "    if False and ",
        "a draft's cache of a prompt depends on where vLLM cut it into pieces",
        (f"{T_DRAFTS}::test_a_draft_that_reads_another_token_behind_a_piece_is_refused",),
    ),
    Mutant(
        "blocks-of-another-prompt",
        DRAFTS,
        '    "disable_eagle_block_drop": ',
        '    "of_another_name": ',
        "what another prompt's next token made of a draft's cache is kept as this one's",
        (NO_NAME,),
    ),
    Mutant(
        "drafts-of-another-revision",
        IDENTITY,
        "    if (str(model.model), model.revision) != (str(target.model), target.revision):",
        "    if str(model.model) != str(target.model):",
        "an engine loads what another revision's draft computed",
        (f"{T_IDENTITY}::test_what_else_a_draft_depends_on_is_in_its_name",),
    ),
    Mutant(
        "drafts-of-another-length",
        IDENTITY,
        "(model.max_model_len, target.max_model_len)",
        "model.max_model_len",
        "an engine loads what a draft with another rope computed",
        (f"{T_IDENTITY}::test_what_else_a_draft_depends_on_is_in_its_name",),
    ),
    Mutant(
        "tokens-of-another-prompt",
        LOOKUPS,
        "        stop = min(self._whole(self._naming.sure_tokens(answer.match.prefix_token_count)), useful)\n",
        "        stop = min(self._whole(answer.match.prefix_token_count), useful)\n",
        "the draft goes on behind a token that read another prompt's next one",
        (f"{T_DRAFTS}::test_the_last_block_is_computed_where_the_draft_reads_ahead",),
    ),
    Mutant(
        "the-next-token-unsaid",
        NAMING,
        "        return (*era, *extras_of(request), *ahead)\n",
        "        return (*era, *extras_of(request))\n",
        "a chunk is loaded whose draft has read another prompt's next token",
        (f"{T_DRAFTS}::test_a_chunk_is_loaded_where_the_token_behind_it_is_the_same",),
    ),
    Mutant(
        "the-next-image-unsaid",
        NAMING,
        "    begins = {offset: name for offset, _, name in items}\n",
        "    begins: dict[int, str] = {}\n",
        "a chunk is loaded whose draft has seen another image behind it",
        (f"{T_DRAFTS}::test_the_image_behind_a_chunk_is_in_its_name",),
    ),
    Mutant(
        "a-draft-by-hashes-that-look-back",
        NAMING,
        '    if digests == "vllm" and draft is not None and draft.reads_ahead:\n',
        "    if False:\n",
        "chunks are named by hashes that do not have what their draft read",
        (f"{T_DRAFTS}::test_vllms_hashes_name_no_token_behind_a_block",),
    ),
    Mutant(
        "steps-without-drafts",
        SCHEDULER,
        "        if self._undrafted.has(blocks[0]):\n",
        "        if False:\n",
        "what another prompt left in a draft's pages is kept as this one's",
        (f"{T_DRAFTS}::test_blocks_of_a_step_without_drafts_are_not_kept",),
    ),
    Mutant(
        "long-sequences-of-others",
        SCHEDULER,
        "            if stop > longest:\n",
        "            if stop > longest and name in self._tracked:\n",
        "a sequence that is not tracked keeps the draft from a step, and nobody notices",
        (f"{T_DRAFTS}::test_blocks_of_a_step_without_drafts_are_not_kept",),
    ),
    Mutant(
        "blocks-that-were-begun-without",
        DRAFTS,
        "                self._blocks.difference_update(blocks[-(-start // size) : -(-stop // size)])\n",
        "                self._blocks.difference_update(blocks[start // size : -(-stop // size)])\n",
        "a block is kept whose first tokens lack the draft's cache",
        (WHOLE,),
    ),
    Mutant(
        "blocks-that-were-ended-without",
        DRAFTS,
        "                self._blocks.update(blocks[start // size : -(-stop // size)])\n",
        "                self._blocks.update(blocks[start // size : stop // size])\n",
        "a block is kept whose last tokens lack the draft's cache",
        (WHOLE,),
    ),
    Mutant(
        "drafts-of-other-weights",
        IDENTITY,
        "        _add_files(hasher, files)\n    return",
        "        pass\n    return",
        "an engine loads what another draft computed",
        (WEIGHTS,),
    ),
    Mutant(
        "drafts-of-another-configuration",
        IDENTITY,
        "    _add_files(hasher, [path / name for name in CONFIGURATIONS if (path / name).is_file()])\n",
        "",
        "an engine loads what a draft with other settings computed",
        (WEIGHTS,),
    ),
    Mutant(
        "drafts-by-another-method",
        IDENTITY,
        '    hasher.update(f"{draft.method}\\0{model.dtype}\\0',
        '    hasher.update(f"{model.dtype}\\0',
        "an engine loads what the same weights computed from other states",
        (WEIGHTS,),
    ),
]
