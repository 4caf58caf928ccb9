"""The stored format: what a header may say, what a strip's checksum is bound to, what decompression may do."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

HEADER = "kvstore/chunk/header.py"
CHECKSUM = "kvstore/chunk/checksum.py"
ENCODING = "kvstore/chunk/encoding.py"
PLANES = "kvstore/chunk/planes.py"
STRIPS = "kvstore/chunk/strips.py"
T_CHUNK = "tests/chunk/test_chunk.py"
T_ENCODING = "tests/chunk/test_encoding.py"
T_PLANES = "tests/chunk/test_planes.py"
T_STRIPS = "tests/chunk/test_strips.py"

MUTANTS = [
    Mutant(
        "header-checksum",
        HEADER,
        "if xxhash.xxh3_128_digest(whole) != checksum:",
        "if False:",
        "a header that rotted is believed",
        (f"{T_CHUNK}::test_a_damaged_header_is_data_loss_and_nothing_worse",),
    ),
    Mutant(
        "header-of-a-newer-release",
        HEADER,
        "if reader > FORMAT_VERSION or version < 1 or features & ~KNOWN_FEATURES:",
        "if version < 1 or features & ~KNOWN_FEATURES:",
        "a chunk that says it needs a newer reader is read by this one",
        (f"{T_CHUNK}::test_each_field_that_contradicts_the_layout_is_refused",),
    ),
    Mutant(
        "header-with-unknown-features",
        HEADER,
        "or version < 1 or features & ~KNOWN_FEATURES:",
        "or version < 1:",
        "what a feature changes is read as if it were not there",
        (f"{T_CHUNK}::test_each_field_that_contradicts_the_layout_is_refused",),
    ),
    Mutant(
        "header-longer-than-its-data",
        HEADER,
        "table_end <= header_bytes <= min(len(data), HEADER_BYTES_MAX)",
        "table_end <= header_bytes",
        "a header that was cut short is an error of ours instead of a loss",
        (f"{T_CHUNK}::test_a_header_cut_short_is_data_loss_even_when_it_is_sealed",),
    ),
    Mutant(
        "header-with-an-envelope",
        HEADER,
        "if not codes or envelope or tag_bytes or zero:",
        "if not codes:",
        "encrypted bytes are served as they lie",
        (f"{T_CHUNK}::test_each_field_that_contradicts_the_layout_is_refused",),
    ),
    Mutant(
        "header-of-any-token-count",
        HEADER,
        "    if token_count > TOKEN_COUNT_MAX:\n",
        "    if False:\n",
        "one forged header ends every start that reads headers",
        ("tests/tiers/nvme/test_forged.py::test_a_chunk_of_more_tokens_than_there_can_be",),
    ),
    Mutant(
        "region-of-any-number",
        "kvstore/tiers/nvme/regions.py",
        "if slot_bytes % PAGE_BYTES or number >= REGION_COUNT_MAX:\n",
        "if slot_bytes % PAGE_BYTES:\n",
        "a forged region is taken for another one: what is stored there and acknowledged is lost",
        ("tests/tiers/nvme/test_forged.py::test_a_region_of_a_number_that_no_residency_holds",),
    ),
    Mutant(
        "header-of-another-kind",
        HEADER,
        "header.kind is layout.kind",
        "True",
        "keys and values are served as hidden states",
        (f"{T_CHUNK}::test_each_field_that_contradicts_the_layout_is_refused",),
    ),
    Mutant(
        "header-of-another-layer",
        HEADER,
        "and header.e_layer == (layout.slabs[0].layer if layout.kind is CacheKind.E else -1)",
        "",
        "the hidden states of another layer are served",
        (f"{T_CHUNK}::test_each_field_that_contradicts_the_layout_is_refused",),
    ),
    Mutant(
        "header-of-fewer-tokens",
        HEADER,
        "and header.token_count == layout.token_count",
        "",
        "a partial chunk is served as another one",
        (f"{T_CHUNK}::test_each_field_that_contradicts_the_layout_is_refused",),
    ),
    Mutant(
        "raw-strips-elsewhere",
        HEADER,
        'if not raw or (table["offset"] != layout.strip_offsets).any():',
        "if not raw:",
        "strips are read from where they do not lie",
        (f"{T_CHUNK}::test_each_field_that_contradicts_the_layout_is_refused",),
    ),
    Mutant(
        "stored-strips-too-long",
        HEADER,
        "if (lengths < 1).any() or (lengths > layout.strip_lengths).any():",
        "if (lengths < 1).any():",
        "a header has a reader take memory without bounds",
        (f"{T_ENCODING}::test_a_table_true_to_itself_is_still_bounded_by_the_layout",),
    ),
    Mutant(
        "stored-strips-elsewhere",
        HEADER,
        'if body_bytes != stored.body_bytes or (table["offset"] != stored.offsets).any():',
        "if body_bytes != stored.body_bytes:",
        "strips are read over each other",
        (f"{T_ENCODING}::test_a_table_that_no_writer_makes_is_refused",),
    ),
    Mutant(
        "seed-without-its-head",
        CHECKSUM,
        "unpack(blake3(pack(layer, head), key=key).digest(8))",
        "unpack(blake3(pack(layer, 0), key=key).digest(8))",
        "one head's bytes pass for another's",
        (f"{T_CHUNK}::test_right_bytes_in_a_wrong_place_fail",),
    ),
    Mutant(
        "seed-without-its-layer",
        CHECKSUM,
        "unpack(blake3(pack(layer, head), key=key).digest(8))",
        "unpack(blake3(pack(0, head), key=key).digest(8))",
        "one layer's bytes pass for another's",
        (f"{T_CHUNK}::test_right_bytes_in_a_wrong_place_fail",),
    ),
    Mutant(
        "seed-without-the-write",
        CHECKSUM,
        'blake3(b"kvstore/strips/1\\0" + storage_key + write_id)',
        'blake3(b"kvstore/strips/1\\0" + storage_key)',
        "strips of two writes of a chunk pass as one",
        (f"{T_CHUNK}::test_right_bytes_in_a_wrong_place_fail",),
    ),
    Mutant(
        "seed-without-the-chunk",
        CHECKSUM,
        'blake3(b"kvstore/strips/1\\0" + storage_key + write_id)',
        'blake3(b"kvstore/strips/1\\0" + write_id)',
        "another chunk's strips pass for this one's",
        (f"{T_CHUNK}::test_right_bytes_in_a_wrong_place_fail",),
    ),
    Mutant(
        "slab-never-checked",
        CHECKSUM,
        "return found == checksums[start : start + len(found) // CHECKSUM_BYTES].tobytes()",
        "return True",
        "rotten bytes are served",
        (f"{T_CHUNK}::test_every_strip_of_every_kind_is_bound_to_its_place",),
    ),
    Mutant(
        "encoded-unchecked",
        ENCODING,
        "if not verify_slab(piece, layout, index, seeds, header.checksums):",
        "if False:",
        "bytes that rotted in memory are stored under a fresh checksum",
        (f"{T_ENCODING}::test_a_chunk_gone_bad_in_memory_is_not_given_a_fresh_checksum",),
    ),
    Mutant(
        "decoded-whatever-its-length",
        ENCODING,
        "if stored.size != slab_range(header, layout, slab_index, slab_index + 1)[1]:",
        "if False:",
        "a slab that was read short is decoded",
        (f"{T_ENCODING}::test_a_stored_slab_of_another_length_is_refused",),
    ),
    Mutant(
        "decoded-unchecked",
        ENCODING,
        "if xxhash.xxh3_128_digest(piece.data, seeds[strip]) != header.checksums[strip].tobytes():",
        "if False:",
        "rotten bytes are decompressed and served",
        (f"{T_ENCODING}::test_a_flipped_byte_is_noticed_or_changes_nothing",),
    ),
    Mutant(
        "gaps-left-as-they-were",
        ENCODING,
        "        _zero_gaps(layout, slab_index, target)",
        "        pass",
        "what lay in memory before goes to a client in a slab's gaps",
        (f"{T_ENCODING}::test_raw_in_place_is_verified_and_its_gaps_zeroed",),
    ),
    Mutant(
        "planes-of-any-length",
        PLANES,
        "if place + sum(sizes) != stored.size or not 0 < min(sizes) <= max(sizes) <= elements.size:",
        "if not 0 < min(sizes) <= max(sizes) <= elements.size:",
        "what follows a strip is taken for part of it",
        (f"{T_PLANES}::test_a_form_that_does_not_fill_the_strip_is_refused",),
    ),
    Mutant(
        "plane-longer-than-its-strip",
        PLANES,
        "not 0 < min(sizes) <= max(sizes) <= elements.size:",
        "not 0 < min(sizes):",
        "a plane is longer than what a writer may store",
        (f"{T_PLANES}::test_a_form_that_does_not_fill_the_strip_is_refused",),
    ),
    Mutant(
        "plane-shorter-than-its-strip",
        PLANES,
        "return np.frombuffer(plane, np.uint8) if len(plane) == plane_bytes else None",
        "return np.resize(np.frombuffer(plane, np.uint8), plane_bytes)",
        "a plane that ends early is filled up with something",
        (f"{T_PLANES}::test_a_form_that_does_not_fill_the_strip_is_refused",),
    ),
    Mutant(
        "copied-and-the-source-checksummed",
        STRIPS,
        "            rows += [xxhash.xxh3_128_digest(target[start:stop].data, seed) for start, stop, seed in strips]\n"
        "            done = end",
        "            rows += [xxhash.xxh3_128_digest(source[start:stop].data, seed) for start, stop, seed in strips]\n"
        "            done = end",
        "a client that writes its staging during the copy has a checksum for bytes that are not stored",
        (f"{T_STRIPS}::test_a_copy_is_checked_by_what_was_copied",),
    ),
    Mutant(
        "copied-gaps-left-as-they-were",
        STRIPS,
        "        self.zero_gaps(target)\n",
        "",
        "a client's bytes, or another chunk's, stay in the gaps of a stored chunk",
        (f"{T_STRIPS}::test_a_copy_is_checked_by_what_was_copied",),
    ),
    Mutant(
        "right-whatever-they-are",
        STRIPS,
        "        if not strips.are_right(data, expected[start:stop]):",
        "        if False:",
        "what a device read wrong is served",
        (f"{T_STRIPS}::test_strips_in_memory_are_right_or_not",),
    ),
]
