"""The client's copies of a GPU's tensors: addresses, what goes together, and when a copy has ended."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ROOM = "clients/kvstore_client/cuda"
T_CPU = "tests/e2e/test_gpu_by_cpu.py"
T_LAUNCH = "tests/e2e/test_gpu_by_interpreter.py"
SCATTERED = "test_chunks_that_lie_here_and_there_cross_together"

MUTANTS = (
    Mutant(
        "cuda-rows-on-each-other",
        f"{ROOM}/mirror.py",
        "            begin += rows.row_count * rows.width\n",
        "",
        "chunks of several runs cross to one place, and the last is taken for all",
        (f"{T_CPU}::{SCATTERED}",),
    ),
    Mutant(
        "cuda-joins-what-does-not-follow",
        f"{ROOM}/fetching.py",
        "last.layout is first.layout and last.token_start + last.layout.token_count == first.token_start\n",
        "last.layout is first.layout\n",
        "chunks behind a gap are put in the places of the gap's tokens",
        (f"{T_CPU}::{SCATTERED}",),
    ),
    Mutant(
        "cuda-launch-without-places",
        f"{ROOM}/launches.py",
        "        table[:, :, 3] += tokens[:, None]\n",
        "",
        "every chunk is put in the places of the first",
        (f"{T_LAUNCH}::{SCATTERED}",),
    ),
    Mutant(
        "cuda-launch-of-one-layer",
        f"{ROOM}/launches.py",
        "planes[np.asarray(positions)[parts.places], parts.halves]",
        "planes[parts.places, parts.halves]",
        "a layer that is fetched alone is put in the place of the first",
        (f"{T_CPU}::test_heads_layers_and_streams", f"{T_LAUNCH}::test_layers_in_turn_are_launched_one_by_one"),
    ),
    Mutant(
        "cuda-interrupt-before-the-end",
        f"{ROOM}/lanes.py",
        "                interrupt = error\n",
        "                raise\n",
        "after an interrupt a GPU still writes to memory that its caller has back",
        (f"{T_CPU}::test_an_interrupt_comes_after_the_last_copy",),
    ),
    Mutant(
        "cuda-layers-without-an-end",
        "clients/kvstore_client/planes/shared_memory/landing.py",
        "        self._turns[-1].add_done_callback(partial(_end, list(copies.values())))\n",
        "",
        "layers of which a copy failed are waited for until the time is over",
        (f"{T_CPU}::test_layers_in_turn_of_which_a_copy_fails_are_not_shown",),
    ),
    Mutant(
        "cuda-pages-that-are-unmapped-under-it",
        "kvstore/seams/mapping.py",
        "        for each in before:\n            each()\n        _libc.munmap(address, byte_count)\n",
        "        _libc.munmap(address, byte_count)\n        for each in before:\n            each()\n",
        "CUDA goes on with memory that is no longer there",
        ("tests/seams/test_mapping.py::test_what_is_done_before_unmapping_finds_the_pages_there",),
    ),
)
