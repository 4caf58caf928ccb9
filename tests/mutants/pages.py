"""An engine's pages: every token in its slot, and nothing else written."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

AXES = "clients/kvstore_client/fetch/axes.py"
PAGED = "clients/kvstore_client/fetch/paged.py"
T_PAGED = "tests/e2e/test_paged.py"
T_WARM = "tests/e2e/test_warm.py"
GIVEN = "clients/kvstore_client/fetch/given.py"
IN_MEMORY = "clients/kvstore_client/fetch/in_memory.py"
FUSED = "clients/kvstore_client/fetch/fused.py"
T_STORED = "tests/e2e/test_stored_in_one_pass.py"

MUTANTS = [
    Mutant(
        "runs-of-slabs-from-a-chunks-begin",
        FUSED,
        'f"i{size}", memory.data, at * size - base, strides',
        'f"i{size}", memory.data, at * size - layout.header_bytes, strides',
        "a large chunk's later slabs are written behind their room in staging, from tensors and from pages",
        (f"{T_STORED}::test_what_was_stored_is_fetched",),
    ),
    Mutant(
        "alike-without-a-look",
        IN_MEMORY,
        "(_shape, _dtype, _is_cpu, kind.stride)",
        "(_shape, _is_cpu, kind.stride)",
        "a last layer of another dtype is fetched into as if it were right",
        ("tests/e2e/test_targets.py::test_one_odd_plane_among_planes_that_are_right_is_found",),
    ),
    Mutant(
        "alike-but-k-and-v",
        GIVEN,
        " or k.dtype != dtype or v.dtype != dtype:\n",
        " or k.dtype != dtype:\n",
        "all V are fetched as another dtype",
        ("tests/e2e/test_targets.py::test_all_v_of_another_dtype_are_found",),
    ),
    Mutant(
        "alike-and-not-yet-negated",
        IN_MEMORY,
        " or any(map(asked.is_odd, flat)):",
        ":",
        "a fetch into a negated view leaves the negative of the cache",
        ("tests/e2e/test_targets.py::test_one_odd_plane_among_planes_that_are_right_is_found",),
    ),
    Mutant(
        "alike-and-over-each-other",
        GIVEN,
        "    if distance is None or found.distance < distance:\n",
        "    if distance is None:\n",
        "a layer is fetched over another one",
        ("tests/e2e/test_doors.py::test_planes_that_share_memory_are_refused_and_interleaved_ones_are_not",),
    ),
    Mutant(
        "alike-in-shapes-of-another-model",
        GIVEN,
        "(k_shape, v_shape) != ((heads, room, k_dim), (heads, room, v_dim)) or k.repeats",
        "k.repeats",
        "planes of another model are fetched into, as far as their bytes reach",
        ("tests/e2e/test_targets.py::test_planes_of_another_model_that_are_all_alike_are_refused",),
    ),
    Mutant(
        "alike-and-repeated",
        GIVEN,
        " or k.repeats or v.repeats:",
        ":",
        "a fetch into a plane whose items share memory keeps the last ones",
        ("tests/e2e/test_targets.py::test_planes_that_all_have_items_in_one_place_are_refused",),
    ),
    Mutant(
        "pages-that-no-graph-sees",
        PAGED,
        "            pages.are_written()\n",
        "            pass\n",
        "a gradient is computed from bytes that a fetch wrote over its own",
        (f"{T_PAGED}::test_a_graph_that_needs_pages_learns_of_a_fetch_into_them",),
    ),
    Mutant(
        "alike-in-other-shapes",
        IN_MEMORY,
        "(_shape, _dtype, _is_cpu, kind.stride)",
        "(_dtype, _is_cpu, kind.stride)",
        "a fetch into layers of unlike room ends with an error of torch's",
        ("tests/e2e/test_targets.py::test_layers_of_one_stride_have_room_of_their_own",),
    ),
    Mutant(
        "alike-in-other-strides",
        IN_MEMORY,
        "(_shape, _dtype, _is_cpu, kind.stride)",
        "(_shape, _dtype, _is_cpu)",
        "a layer is fetched over another one, which lies between its heads",
        (
            "tests/e2e/test_targets.py::test_a_plane_that_reaches_over_another_one_is_found",
            "tests/e2e/test_plain_copies.py::test_planes_of_several_strides",
        ),
    ),
    Mutant(
        "pages-from-the-middle-of-one",
        PAGED,
        "        if pieces or any((token - begin) % self.page_size for token, _ in runs):\n",
        "        if pieces:\n",
        "pages are filled with the tokens of the pages before them",
        (f"{T_WARM}::test_tokens_before_the_first_page_are_not_taken_for_a_page",),
    ),
    Mutant(
        "pages-without-their-parts",
        PAGED,
        "        if pieces or any((token",
        "        if any((token",
        "tokens that fill a part of a page are left out of a fetch",
        (f"{T_WARM}::test_pages_are_filled_in_one_pass_without_the_sidecar",),
    ),
    Mutant(
        "layers-of-one-look-at-one-place",
        AXES,
        "self.are_alike and overlapping(list(map(Span.of, self.given))) is None",
        "self.are_alike",
        "a layer's pages are fetched over another one's",
        (f"{T_PAGED}::test_layers_of_one_pool_that_share_memory_are_refused_and_interleaved_ones_are_not",),
    ),
    Mutant(
        "pages-alike-without-a-look",
        AXES,
        "        are_alike = len(looks) == 1 and None not in looks and",
        "        are_alike = None not in looks and",
        "a last layer of another dtype is fetched into as if it were right",
        (f"{T_PAGED}::test_a_last_layer_of_another_dtype_is_found",),
    ),
    Mutant(
        "pages-alike-and-read-only",
        AXES,
        "value.strides, value.dtype, value.flags.writeable))",
        "value.strides, value.dtype))",
        "a fetch ends with an error of ours at an engine's read-only pages",
        (f"{T_PAGED}::test_pages_that_cannot_be_written_are_refused",),
    ),
]
