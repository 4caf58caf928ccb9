"""Copies by compiled code: what the words say of rows, blocks and shares."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

BATCH = "kernels/kvstore_copies/batch.py"
FUSED = "clients/kvstore_client/fetch/fused.py"
IN_MEMORY = "clients/kvstore_client/fetch/in_memory.py"
CHECKED = "kernels/kvstore_copies/checked.py"
T_COPIES = "tests/kernels/test_copies.py"
T_CHECKED = "tests/kernels/test_checked.py"
T_PLAIN = "tests/e2e/test_plain_copies.py"

MUTANTS = [
    Mutant(
        "rows-of-one-end",
        BATCH,
        "        if not axes and target == source == row_bytes:\n",
        "        if not axes and target == row_bytes:\n",
        "items that lie apart at the source are copied with what lies between them",
        (f"{T_COPIES}::test_the_bytes_are_numpys_and_none_beside_is_touched",),
    ),
    Mutant(
        "axes-joined-by-the-target-alone",
        BATCH,
        "        elif axes and (target, source) == (axes[-1][0] * axes[-1][1], axes[-1][0] * axes[-1][2]):\n",
        "        elif axes and target == axes[-1][0] * axes[-1][1]:\n",
        "two axes become one that the source does not have",
        (f"{T_COPIES}::test_the_bytes_are_numpys_and_none_beside_is_touched",),
    ),
    Mutant(
        "too-few-calls",
        BATCH,
        "-(-self._slice_count // count)",
        "self._slice_count // count",
        "the last slices are copied by no call, and memory that nobody wrote counts as fetched",
        (f"{T_COPIES}::test_the_bytes_are_numpys_and_none_beside_is_touched",),
    ),
    Mutant(
        "sources-of-the-block-before",
        BATCH,
        "        place += 2 * count\n",
        "        place += count\n",
        "a block reads the addresses of another one",
        (f"{T_COPIES}::test_copies_of_several_kinds_are_one_batch",),
    ),
    Mutant(
        "pages-of-several-strides",
        BATCH,
        "        if any((each.shape, each.strides) != (first.shape, first.strides) for each in arrays):\n",
        "        if any(each.shape != first.shape for each in arrays) and not arrays:\n",
        "pages of one layer are written in the order of another layer's axes",
        (f"{T_COPIES}::test_arrays_of_several_strides_are_left_to_others",),
    ),
    Mutant(
        "columns-that-nobody-asked",
        "kernels/kvstore_copies/tensors.py",
        "storages, questions, words",
        "storages, (), words",
        "views that are not yet negated are written as they lie",
        (
            "tests/kernels/test_tensors.py::test_columns_are_told_with_their_rooms_and_storages",
            "tests/e2e/test_targets.py::test_one_odd_plane_among_planes_that_are_right_is_found",
        ),
    ),
    Mutant(
        "planes-beyond-their-storage",
        IN_MEMORY,
        "        if last + self.item_size > self.room:\n",
        "        if self.room < 0:\n",
        "what lies behind a storage that was resized is stored, or written over",
        (f"{T_PLAIN}::test_tensors_that_lost_their_memory_are_neither_read_nor_written",),
    ),
    Mutant(
        "sources-beyond-their-region",
        FUSED,
        "    if placed is None or placed[1].size < run.stride * (count - 1) + layout.total_bytes:\n",
        "    if placed is None:\n",
        "what lies behind the sidecar's memory is read, or the process dies of it",
        ("tests/e2e/test_targets.py::test_a_chunk_that_its_region_does_not_hold_is_not_read",),
    ),
    Mutant(
        "a-fetch-that-no-graph-sees",
        FUSED,
        "        if self.halves or not is_tensor(self.sides[0][0]):\n",
        "        if True:\n",
        "a gradient is computed from bytes that a fetch wrote over its own",
        (f"{T_PLAIN}::test_a_graph_that_needs_a_tensor_learns_of_a_fetch_into_it",),
    ),
    Mutant(
        "copies-from-the-first-token-on",
        IN_MEMORY,
        "        begins = [each + skipped for each in self.addresses] if start else self.addresses\n",
        "        begins = self.addresses\n",
        "every run of chunks is written to the beginning of its plane",
        (f"{T_PLAIN}::test_runs_of_chunks_that_lie_apart",),
    ),
    Mutant(
        "odd-lengths-digested-in-one-pass",
        CHECKED,
        "    if int(lengths.min()) < PIECE_BYTES_MIN or (lengths % STRIPE_BYTES).any():\n",
        "    if int(lengths.min()) < PIECE_BYTES_MIN:\n",
        "the end of a strip is neither copied nor checksummed",
        (f"{T_CHECKED}::test_other_lengths_are_left_to_others",),
    ),
    Mutant(
        "short-strips-digested-in-one-pass",
        CHECKED,
        "    if int(lengths.min()) < PIECE_BYTES_MIN or (lengths % STRIPE_BYTES).any():\n",
        "    if (lengths % STRIPE_BYTES).any():\n",
        "short strips have another digest than the library's, and every reader calls them damaged",
        (f"{T_CHECKED}::test_other_lengths_are_left_to_others",),
    ),
    Mutant(
        "pieces-beyond-the-source",
        CHECKED,
        "end > min(target.size, source.size)",
        "end > target.size",
        "what lies behind a client's staging is stored",
        (f"{T_CHECKED}::test_pieces_outside_the_memory_are_refused",),
    ),
    Mutant(
        "pieces-of-memory-that-lies-apart",
        CHECKED,
        "not all(each.flags.c_contiguous for each in (target, source))",
        "not any(each.flags.c_contiguous for each in (target, source))",
        "what lies between the items is copied",
        (f"{T_CHECKED}::test_memory_that_does_not_lie_in_one_piece_is_left_to_others",),
    ),
    Mutant(
        "fewer-stops-than-starts",
        CHECKED,
        "starts.shape != stops.shape or (is_written and not target.flags.writeable)",
        "is_written and not target.flags.writeable",
        "what lies behind the offsets is a length",
        (f"{T_CHECKED}::test_pieces_outside_the_memory_are_refused",),
    ),
    Mutant(
        "a-target-that-may-not-be-written",
        CHECKED,
        "starts.shape != stops.shape or (is_written and not target.flags.writeable)",
        "starts.shape != stops.shape",
        "memory that others only read is written",
        (f"{T_CHECKED}::test_a_target_that_may_not_be_written_is_refused",),
    ),
    Mutant(
        "seeds-of-rows-that-lie-apart",
        CHECKED,
        "rows, words = np.ascontiguousarray(messages), np",
        "rows, words = messages, np",
        "strips have the seeds of other layers and heads",
        (f"{T_CHECKED}::test_seeds_are_the_librarys",),
    ),
]
