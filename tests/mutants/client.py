"""The client: bytes count only if they were still the chunk's after the copy, and no wait is for ever."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

GATHERING = "clients/kvstore_client/store/gathering.py"
KNOWN = "clients/kvstore_client/segments/known.py"
COPYING = "clients/kvstore_client/copying.py"
FETCHED = "clients/kvstore_client/fetch/fetched.py"
T_THREADS = "tests/e2e/test_failing_threads.py"
OVERLAP = "clients/kvstore_client/overlap.py"
PARTS = "clients/kvstore_client/planes/parts.py"
PREFIX = "clients/kvstore_client/planes/shared_memory/prefix.py"
READING = "clients/kvstore_client/planes/shared_memory/reading.py"
RESIDENT = "clients/kvstore_client/planes/shared_memory/resident.py"
T_ANOTHER_CHUNK = "tests/e2e/remote/test_strangers.py::test_a_server_that_sends_another_chunk_is_a_miss"
T_WARM = "tests/e2e/test_warm.py"
PRESENCE = "kvstore/presence.py"
CHUNKS = "clients/kvstore_client/planes/shared_memory/known.py"
MAPPED = "clients/kvstore_client/planes/shared_memory/mapped.py"
SESSION = "clients/kvstore_client/planes/shared_memory/session.py"
TARGET = "clients/kvstore_client/fetch/target.py"
VALUE = "clients/kvstore_client/opaque/value.py"
WORKER = "clients/kvstore_client/engines/vllm/worker.py"
T_FAILURES = "tests/e2e/test_failures.py"
T_TABLE = "tests/presence/test_table.py"

MUTANTS = [
    Mutant(
        "preamble-of-another-prompt",
        "clients/kvstore_client/prompt.py",
        "    if not np.array_equal(tokens[: preamble.size], preamble):\n",
        "    if False:\n",
        "a document is taken for exact where something else comes before it",
        ("tests/e2e/test_segments.py::test_a_prompt_that_begins_otherwise_is_refused",),
    ),
    Mutant(
        "copied-after-it-went",
        RESIDENT,
        "        return slot < len(self._generations) and bool(self._generations[slot] == generation)\n",
        "        return True\n",
        "the bytes of the next chunk are handed out for one whose lease was revoked",
        (f"{T_FAILURES}::test_use_after_free_is_a_miss",),
    ),
    Mutant(
        "slot-beyond-the-generations",
        RESIDENT,
        "        return slot < len(self._generations) and bool(",
        "        return bool(",
        "a sidecar that names a slot which there is not ends the engine's step with an error of ours",
        (f"{T_FAILURES}::test_a_confused_answer_is_a_miss",),
    ),
    Mutant(
        "warm-and-left-under-the-copy",
        "clients/kvstore_client/fetch/calls.py",
        "            if found.token_count == prefix.token_count or prefix.is_leased:\n",
        "            if True:\n",
        "what left under a copy without a lease is a miss, though the device has it",
        (f"{T_WARM}::test_what_left_memory_under_the_copy_comes_from_the_device",),
    ),
    Mutant(
        "warm-with-any-header",
        CHUNKS,
        "            if xxh3_64_intdigest(known.header) != known.hash:",
        "            if False:",
        "memory that went bad where a header lies is not noticed",
        (f"{T_FAILURES}::test_a_damaged_arena_is_noticed_by_verify",),
    ),
    Mutant(
        "warm-and-never-told",
        SESSION,
        "            self.presence.use(name, digests[hits - 1], token_count)\n",
        "",
        "what is used without a call leaves first",
        (f"{T_WARM}::test_what_is_used_without_a_call_stays",),
    ),
    Mutant(
        "warm-at-another-place",
        CHUNKS,
        "if known is None or known.chunk.token_start != number * chunk_tokens:",
        "if known is None:",
        "a chunk that an engine's hashes name elsewhere leaves a hole of old bytes before it",
        (f"{T_WARM}::test_a_chunk_that_hashes_name_elsewhere_is_asked_for",),
    ),
    Mutant(
        "warm-after-the-end",
        CHUNKS,
        "                if self._is_over:  # the session ended under the fetch: nobody would let go of its memory\n",
        "                if False:\n",
        "an idle client keeps the memory of a sidecar that is gone",
        (f"{T_WARM}::test_a_session_that_ended_knows_no_chunks",),
    ),
    Mutant(
        "long-chains-cost-nothing",
        "kvstore/controller/fetches/fetch.py",
        "            while row != ROOT_ROW and left:  # what is walked counts, whatever comes of it\n",
        "            while row != ROOT_ROW and len(chain) < TOLD_CHUNKS_MAX:\n",
        "a packet of long chains holds the event loop",
        (f"{T_WARM}::test_what_one_packet_tells_is_bounded",),
    ),
    Mutant(
        "fetched-another-chunk",
        PARTS,
        "    if header.chain_digest != digest or header.fingerprint",
        "    if header.fingerprint",
        "another chunk of the model is handed out where the sidecar names a wrong place, or sends its bytes",
        (f"{T_FAILURES}::test_a_confused_answer_is_a_miss", T_ANOTHER_CHUNK),
    ),
    Mutant(
        "verify-does-not",
        TARGET,
        "            if not chunk.is_intact(index, wanted.head_start, wanted.head_stop):\n",
        "            if False:\n",
        "who asks for checked bytes gets others",
        (f"{T_FAILURES}::test_a_damaged_arena_is_noticed_by_verify",),
    ),
    Mutant(
        "bad-bytes-into-pages",
        "clients/kvstore_client/fetch/paged.py",
        "                    bad.add(id(chunk))\n                    continue\n",
        "                    bad.add(id(chunk))\n",
        "bytes that failed their checksums are written over an engine's pages",
        ("tests/e2e/test_paged.py::test_a_chunk_that_fails_its_checksums_is_not_written",),
    ),
    Mutant(
        "mappings-outlive-their-server",
        MAPPED,
        "        self._regions.clear()\n",
        "        pass\n",
        "each restart leaves an arena's memory behind in every engine",
        (f"{T_FAILURES}::test_the_mappings_go_with_the_server",),
    ),
    Mutant(
        "answer-taken-for-the-next-question",
        MAPPED,
        "except BaseException:  # an interrupt: as below\n                self.close()\n",
        "except BaseException:  # an interrupt: as below\n",
        "an interrupted question's answer gives the next one memory of another size",
        ("tests/e2e/test_staging.py::test_an_interrupt_while_staging_is_asked_for_leaves_no_answer_for_the_next",),
    ),
    Mutant(
        "tensor-whose-items-share-memory",
        OVERLAP,
        "        if step < reach:\n",
        "        if False:\n",
        "a fetch into an expanded tensor leaves the last token everywhere",
        ("tests/e2e/test_round_trip.py::test_tensors_whose_items_share_memory_are_refused",),
    ),
    Mutant(
        "two-tensors-that-share-memory",
        OVERLAP,
        "    if found is not None:\n        one, other",
        "    if False:\n        one, other",
        "a layer is fetched over another one",
        ("tests/e2e/test_doors.py::test_planes_that_share_memory_are_refused_and_interleaved_ones_are_not",),
    ),
    Mutant(
        "one-layer-looked-at-for-all",
        "clients/kvstore_client/halves.py",
        "        if kind is not None and kind == right:\n",
        "        if kind is not None and right is not None:\n",
        "a last layer of another dtype is fetched into as if it were right",
        ("tests/e2e/test_targets.py::test_one_odd_plane_among_planes_that_are_right_is_found",),
    ),
    Mutant(
        "one-behind-the-other-for-apart",
        OVERLAP,
        "one[2] <= other[1] or one[0] != other[0]",
        "one[1] < other[1] or one[0] != other[0]",
        "a fetch into tensors that share some of their bytes leaves what came last",
        ("tests/e2e/test_targets.py::test_tensors_lie_apart_where_no_two_of_them_meet",),
    ),
    Mutant(
        "views-beyond-their-plane",
        "clients/kvstore_client/fetch/fused.py",
        "        if last.token_start + last.layout.token_count > token_count:\n",
        "        if False:\n",
        "a chunk that lies elsewhere in its prompt is written over the next plane",
        ("tests/e2e/test_targets.py::test_views_do_not_reach_beyond_their_plane",),
    ),
    Mutant(
        "a-plane-from-its-storages-begin",
        "clients/kvstore_client/fetch/fused.py",
        "plane.storage_offset() + skipped)",
        "skipped)",
        "a fetch into views writes where another view of the storage lies",
        ("tests/e2e/test_plain_copies.py::test_dense_planes",),
    ),
    Mutant(
        "padding-is-stored",
        GATHERING,
        "        if (pages.slots < 0).any():\n",
        "        if False:\n",
        "a slot of -1 stores the last page's tokens",
        ("tests/e2e/writers/test_pieces.py::test_a_token_without_a_slot_is_refused",),
    ),
    Mutant(
        "document-by-its-hash",
        KNOWN,
        "                if fits and token_digest(tokens[start:stop]) == entry.digest:\n",
        "                if fits:\n",
        "a text whose hash collides is taken for a known document",
        ("tests/segments/test_known.py::test_candidates_that_all_collide_are_decided_by_their_tokens",),
    ),
    Mutant(
        "retired-table-believed",
        PRESENCE,
        "    return None if flags & RETIRED else not flags & PARTIAL\n",
        "    return not flags & PARTIAL\n",
        "a client goes on reading a table that nobody writes any more",
        (f"{T_TABLE}::test_who_has_the_old_table_is_told_to_ask_for_the_new_one",),
    ),
    Mutant(
        "retired-table-is-not-said",
        PRESENCE,
        "        retired[0] = RETIRED\n",
        "",
        "a client goes on reading a table that nobody writes any more",
        (f"{T_TABLE}::test_who_has_the_old_table_is_told_to_ask_for_the_new_one",),
    ),
    Mutant(
        "partial-table-believed",
        PRESENCE,
        "    return None if flags & RETIRED else not flags & PARTIAL\n",
        "    return None if flags & RETIRED else True\n",
        "what found no word in the table is said to be missing",
        (f"{T_TABLE}::test_what_finds_no_room_is_not_said_to_be_missing",),
    ),
    Mutant(
        "kept-over-a-failed-load",
        WORKER,
        "is_wanted=not save.reads(self._doubtful.keys()))\n",
        "is_wanted=True)\n",
        "what was computed from blocks that never came is stored as the model's own",
        ("tests/engines/vllm/test_failed_loads.py::test_what_is_computed_over_a_failed_load_is_not_kept",),
    ),
    Mutant(
        "failed-load-is-not-told",
        WORKER,
        "        self._failed |= set(blocks)\n",
        "",
        "vLLM attends to blocks that never came",
        ("tests/engines/vllm/test_failed_loads.py::test_a_load_that_fails_is_told_and_not_tried_again",),
    ),
    Mutant(
        "copies-that-failed-unseen",
        COPYING,
        "    for future in copies:\n        check(future)\n",
        "",
        "a fetch has holes where a copy has failed",
        ("tests/e2e/test_copying.py::test_pieces_that_a_helper_lost_are_not_said_to_be_done",),
    ),
    Mutant(
        "pieces-that-a-helper-lost",
        COPYING,
        "        if undone:\n            raise\n",
        "        pass\n",
        "a fetch has holes where the thread that helped has failed",
        ("tests/e2e/test_copying.py::test_pieces_that_a_helper_lost_are_not_said_to_be_done",),
    ),
    Mutant(
        "helper-left-running",
        COPYING,
        "            if helper is not None and not stopped([helper], timeout_s):\n",
        "            if False:\n",
        "a helper writes into tensors that its caller has back",
        ("tests/e2e/test_copying.py::test_who_fails_waits_for_the_helper_which_takes_nothing_more",),
    ),
    Mutant(
        "helper-takes-more",
        COPYING,
        "            left.clear()\n",
        "",
        "after an interrupt all the rest is copied before the caller gets its tensors back",
        ("tests/e2e/test_copying.py::test_who_fails_waits_for_the_helper_which_takes_nothing_more",),
    ),
    Mutant(
        "copies-left-running",
        COPYING,
        "    running = [each for each in copies if not each.cancel()]\n",
        "    return True\n",
        "a copy writes into tensors, or staging, that its caller has back",
        (f"{T_THREADS}::test_who_is_interrupted_leaves_no_copy_behind",),
    ),
    Mutant(
        "copy-that-hangs-is-a-miss",
        FETCHED,
        "        if not target.is_callers:\n",
        "        if True:\n",
        "an engine computes into its pages what a late copy then writes over",
        (f"{T_THREADS}::test_a_copy_that_hangs_is_never_a_miss_for_who_gave_the_memory",),
    ),
    Mutant(
        "table-of-a-dead-sidecar",
        "clients/kvstore_client/lookup/presence.py",
        "        if found is not None and self._is_open():",
        "        if found is not None:",
        "a sidecar that ended still says what it has",
        ("tests/presence/test_lookup_without.py::test_a_killed_sidecar_has_nothing_before_anybody_noticed",),
    ),
    Mutant(
        "layer-of-a-lost-chunk",
        "clients/kvstore_client/fetch/stream.py",
        "if self.good_token_count < self.token_count:\n",
        "if False:\n",
        "a stream shows a layer whose bytes are the next chunk's by now",
        ("tests/e2e/test_failures.py::test_use_after_free_is_a_miss",),
    ),
    Mutant(
        "header-of-another-model",
        PARTS,
        "    if header.chain_digest != digest or header.fingerprint != fingerprint(wanted.spec, kind, layer):\n",
        "    if header.chain_digest != digest:\n",
        "another model's cache of the same words is handed out",
        ("tests/e2e/test_headers.py::test_another_models_chunk_of_the_same_tokens_is_a_miss", T_ANOTHER_CHUNK),
    ),
    Mutant(
        "header-of-another-exactness",
        PARTS,
        "    if header.exactness is not exactness:\n",
        "    if False:\n",
        "what is derived is handed out as exact",
        ("tests/e2e/test_headers.py::test_a_derived_chunk_in_an_exact_ones_place_is_a_miss",),
    ),
    Mutant(
        "extents-of-another-size",
        READING,
        "    if not _hold(extents, layout):\n",
        "    if False:\n",
        "slabs are read from memory that is another chunk's",
        ("tests/e2e/test_headers.py::test_extents_that_do_not_hold_a_chunk_are_a_miss",),
    ),
    Mutant(
        "derived-stored-as-exact",
        "clients/kvstore_client/derived.py",
        "    if is_derived(planes, slots):\n        raise",
        "    if False:\n        raise",
        "what was fetched as derived is stored as exact, and served as exact for ever",
        ("tests/e2e/test_exactness.py::test_what_is_fetched_as_derived_is_not_stored_as_exact",),
    ),
    Mutant(
        "fetched-as-derived-and-forgotten",
        "clients/kvstore_client/fetch/fetched.py",
        "    if prefix.exactness is not Exactness.EXACT:\n",
        "    if False:\n",
        "nobody knows any more that tensors were fetched as derived",
        ("tests/e2e/test_exactness.py::test_what_is_fetched_as_derived_is_not_stored_as_exact",),
    ),
    Mutant(
        "slices-that-forget",
        "clients/kvstore_client/derived.py",
        "        return LayeredKV(found, self.exactness) if isinstance(index, slice) else found\n",
        "        return LayeredKV(found) if isinstance(index, slice) else found\n",
        "half of a merged cache is stored as exact",
        ("tests/e2e/test_exactness.py::test_containers_know_it_however_they_are_copied",),
    ),
    Mutant(
        "value-of-any-length",
        "clients/kvstore_client/opaque/value.py",
        "        if magic != MAGIC or (size <= room) != is_whole or not (is_whole or room =="
        " CHUNK_BYTES - HEAD.size):\n",
        "        if magic != MAGIC:\n",
        "a header has a reader take memory without bounds",
        ("tests/e2e/test_value_heads.py::test_a_head_that_says_more_than_is_stored_is_a_miss",),
    ),
    Mutant(
        "parts-of-two-values",
        "clients/kvstore_client/opaque/value.py",
        '        rest = (self.first + version + struct.pack("<Q", number) for number in numbers)\n',
        '        rest = (self.first + struct.pack("<Q", number) for number in numbers)\n',
        "a value is half an older one",
        (
            "tests/e2e/test_value_heads.py::test_the_chunks_of_two_versions_of_a_value_have_no_name_in_common_but_the_first",
        ),
    ),
]
