"""Kernels: attention by position, and keys that moved."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ATTENTION = "kernels/kvstore_kernels/attention.py"
ROTARY = "kernels/kvstore_kernels/rotary.py"
SELECTION = "kernels/kvstore_kernels/selection.py"
PROGRAMS = "kernels/kvstore_kernels/gpu/programs"
T_GPU_ATTENTION = "tests/kernels/test_gpu_attention.py"
T_GPU_STRIPS = "tests/kernels/test_gpu_strips.py"
T_ARRIVAL = "tests/kernels/test_arrival.py"
T_ATTENTION = "tests/kernels/test_attention.py"
T_ROTARY = "tests/kernels/test_rotary.py"
T_SELECTION = "tests/kernels/test_selection.py"

MUTANTS = [
    Mutant(
        "attention-sees-the-future",
        ATTENTION,
        "    seen = q_positions[:, None] >= k_positions ",
        "    seen = q_positions[:, None] >= k_positions - 1 ",
        "a recomputed row is computed from a token that comes after it",
        (f"{T_ATTENTION}::test_positions_may_have_gaps_and_begin_anywhere",),
    ),
    Mutant(
        "attention-past-its-window",
        ATTENTION,
        "        seen &= (q_positions - window)[:, None] < k_positions\n",
        "        seen &= (q_positions - window)[:, None] <= k_positions\n",
        "a row of a sliding layer sees one token more than the model's own",
        (f"{T_ATTENTION}::test_attention_equals_the_formula",),
    ),
    Mutant(
        "attention-by-place",
        ATTENTION,
        "    return torch.equal(q_positions, k_positions) and bool((k_positions.diff() > 0).all())",
        "    return q_positions.shape == k_positions.shape",
        "rows are masked by where they stand instead of by their position",
        (f"{T_ATTENTION}::test_where_all_tokens_are_rows_a_repeated_position_still_counts",),
    ),
    Mutant(
        "positions-in-any-order",
        ATTENTION,
        "        if bool((positions.diff() < 0).any()):",
        "        if False:",
        "keys beyond the last one that is looked for are left out in silence",
        (f"{T_ATTENTION}::test_what_does_not_fit_is_refused",),
    ),
    Mutant(
        "keys-turned-backwards",
        ROTARY,
        "        block.result_halves[0].addcmul_(block.wide_halves[1], part.sin, value=-1)\n"
        "        block.result_halves[1].addcmul_(block.wide_halves[0], part.sin)\n",
        "        block.result_halves[0].addcmul_(block.wide_halves[1], part.sin)\n"
        "        block.result_halves[1].addcmul_(block.wide_halves[0], part.sin, value=-1)\n",
        "a document that moved is attended to as if it stood elsewhere",
        (f"{T_ROTARY}::test_a_rotation_turns_as_the_model_does",),
    ),
    Mutant(
        "dims-that-do-not-turn-are-lost",
        ROTARY,
        "    if rest and (out is not x or scale != 1.0):",
        "    if False:",
        "of a partly rotated head the rest is whatever lay in the cache",
        (
            f"{T_ARRIVAL}::test_arrival_in_a_dense_cache[64-2-torch.bfloat16]",
            f"{T_ROTARY}::test_partial_rotary_of_the_default_kind_is_transformers",
        ),
    ),
    Mutant(
        "no-number-counts-as-nothing",
        SELECTION,
        "    ranked = torch.where(scores.isnan(), math.inf, scores.float())\n",
        "    ranked = torch.where(scores.isnan(), -math.inf, scores.float())\n",
        "a row whose deviation overflowed is the last to be recomputed",
        (f"{T_SELECTION}::test_the_highest_come_ascending_and_ties_go_to_the_earlier",),
    ),
    Mutant(
        "gpu-attention-past-its-row",
        f"{PROGRAMS}/attention.py",
        "            seen = (key[None, :] >= start[:, None]) & (key[None, :] < stop[:, None])\n"
        "            scores = tl.where",
        "            seen = (key[None, :] >= start[:, None]) & (key[None, :] < high)\n            scores = tl.where",
        "on a GPU, a row is computed from tokens that come after it, which other rows of its tile see",
        (f"{T_GPU_ATTENTION}::test_planes",),
    ),
    Mutant(
        "gpu-attention-reads-what-no-row-sees",
        f"{PROGRAMS}/attention.py",
        "            values = tl.load(v_pointers, mask=inside[:, None] & (v_dims < V_DIM)[None, :], other=0.0)",
        "            values = tl.load(v_pointers, mask=(v_dims < V_DIM)[None, :], other=0.0)",
        "on a GPU, memory that is not yet written makes a row NaN",
        (f"{T_GPU_ATTENTION}::test_what_no_row_sees_may_be_anything",),
    ),
    Mutant(
        "gpu-slots-outside-the-pages",
        f"{PROGRAMS}/strips.py",
        "        inside = inside & (slot >= 0) & (slot < slot_stop)",
        "        inside = inside & (slot >= 0)",
        "on a GPU, a wrong slot overwrites memory of another tensor",
        (f"{T_GPU_STRIPS}::test_a_slot_outside_the_pages_is_not_written",),
    ),
    Mutant(
        "gpu-broken-runs-look-whole",
        f"{PROGRAMS}/strips.py",
        '                tl.store(scales, tl.where(broken, float("nan"), scale))',
        "                tl.store(scales, scale)",
        "a run of NaN is stored as zeros",
        (f"{T_GPU_STRIPS}::test_a_run_that_is_not_finite_decodes_to_nan",),
    ),
]
