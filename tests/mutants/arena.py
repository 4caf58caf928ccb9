"""Memory that others read while we write: generations, extents, seals, mappings."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ARENA = "kvstore/arena/arena.py"
RUNS = "kvstore/seams/runs.py"
STAGING = "kvstore/arena/staging.py"
MEMORY = "kvstore/seams/memory.py"
MAPPING = "kvstore/seams/mapping.py"
FENCE = "kvstore/seams/fence.py"
T_FENCE = "tests/seams/test_fence.py"
T_ARENA = "tests/arena/test_arena.py"
T_WARM = "tests/sim/test_warm.py"
T_MAPPING = "tests/seams/test_mapping.py"

MUTANTS = [
    Mutant(
        "generation-never-changes",
        ARENA,
        "        self._values[placement.slot] += np.uint64(1)\n",
        "",
        "a reader of a chunk that went takes the next one's bytes for it",
        (f"{T_ARENA}::test_the_generation_changes_before_the_bytes_are_given_away",),
    ),
    Mutant(
        "generation-changes-too-late",
        ARENA,
        "        self._values[placement.slot] += np.uint64(1)\n"
        "        fence()  # and it changes before any byte does, for readers on other processors too\n"
        '        self._faults.reach("arena.free.bumped")\n',
        '        self._faults.reach("arena.free.bumped")\n        fence()\n'
        "        self._values[placement.slot] += np.uint64(1)\n",
        "a reader finds its generation unchanged over bytes that changed",
        (f"{T_ARENA}::test_the_generation_changes_before_the_bytes_are_given_away",),
    ),
    Mutant(
        "generation-returns",
        ARENA,
        "        self._values[placement.slot] += np.uint64(1)\n",
        "        self._values[placement.slot] = np.uint64(3 - placement.generation)\n",
        "a reader that copies slowly finds its generation again, over other bytes",
        (f"{T_WARM}::test_what_is_copied_without_a_call_is_what_was_stored",),
    ),
    Mutant(
        "generation-never-asked",
        "clients/kvstore_client/planes/shared_memory/resident.py",
        "            current = self._is_current(chunk.slot, chunk.generation)\n",
        "            current = True\n",
        "bytes that changed under a copy without a call count",
        (f"{T_WARM}::test_what_is_copied_without_a_call_is_what_was_stored",),
    ),
    Mutant(
        "generation-without-a-fence",
        ARENA,
        "        fence()  # and it changes before any byte does, for readers on other processors too\n",
        "",
        "on ARM a reader sees new bytes and the old generation",
        (f"{T_FENCE}::test_a_generation_changes_before_its_bytes_may",),
    ),
    Mutant(
        "copy-without-a-fence",
        "clients/kvstore_client/planes/shared_memory/resident.py",
        "        fence()  # the copies' loads come before the generations'\n",
        "",
        "on ARM the generation is read before the bytes are",
        (f"{T_FENCE}::test_a_generation_that_changes_at_the_fence_is_seen",),
    ),
    Mutant(
        "fence-that-orders-nothing",
        FENCE,
        "    try:\n        lock.release()\n",
        "    try:\n        pass\n",
        "on ARM loads and stores pass each other",
        (f"{T_FENCE}::test_the_fence_orders_what_reorders",),
    ),
    Mutant(
        "slot-of-a-chunk-that-lives",
        ARENA,
        "        slot = self._slots.pop()\n",
        "        slot = self._slots[-1]\n",
        "two chunks share a generation: one that goes takes the other's readers with it, or does not",
        (f"{T_ARENA}::TestArenaMachine",),
    ),
    Mutant(
        "run-handed-out-twice",
        RUNS,
        "            self._offsets[index] += byte_count\n            self._sizes[index] -= byte_count\n",
        "            pass\n",
        "two chunks lie over each other",
        (f"{T_ARENA}::TestArenaMachine",),
    ),
    Mutant(
        "split-leaks-when-it-does-not-fit",
        ARENA,
        "            self.regions[extent.region].give_back(extent.offset, extent.byte_count)\n        return []",
        "            pass\n        return []",
        "the arena fills with bytes that nobody has",
        (f"{T_ARENA}::TestArenaMachine",),
    ),
    Mutant(
        "staging-run-past-its-end",
        STAGING,
        "if offset < 0 or byte_count < 0 or offset + byte_count > self.byte_count:",
        "if offset < 0 or byte_count < 0:",
        "a fill reads less than its strips, or memory that is not the client's",
        (f"{T_ARENA}::test_a_run_of_staging_lies_inside_it",),
    ),
    Mutant(
        "staging-run-before-its-start",
        STAGING,
        "if offset < 0 or byte_count < 0 or offset + byte_count > self.byte_count:",
        "if byte_count < 0 or offset + byte_count > self.byte_count:",
        "a negative offset reads the end of the staging, or something shorter",
        (f"{T_ARENA}::test_a_run_of_staging_lies_inside_it",),
    ),
    Mutant(
        "arena-open-for-writing",
        MEMORY,
        "READ_ONLY_SEALS = F_SEAL_FUTURE_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL",
        "READ_ONLY_SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL",
        "any client changes what all others read",
        (f"{T_ARENA}::test_a_receiver_of_a_region_can_only_read",),
    ),
    Mutant(
        "arena-open-for-truncation",
        MEMORY,
        "READ_ONLY_SEALS = F_SEAL_FUTURE_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL",
        "READ_ONLY_SEALS = F_SEAL_FUTURE_WRITE | F_SEAL_GROW | F_SEAL_SEAL",
        "any client ends the server and the other clients with SIGBUS",
        (f"{T_ARENA}::test_a_receiver_of_a_region_can_only_read",),
    ),
    Mutant(
        "staging-open-for-truncation",
        MEMORY,
        "FIXED_SIZE_SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL",
        "FIXED_SIZE_SEALS = F_SEAL_GROW | F_SEAL_SEAL",
        "a client that shrinks its staging ends the server with SIGBUS",
        (f"{T_ARENA}::test_staging_can_be_written_and_not_shrunk",),
    ),
    Mutant(
        "memory-open-for-further-seals",
        MEMORY,
        "READ_ONLY_SEALS = F_SEAL_FUTURE_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL",
        "READ_ONLY_SEALS = F_SEAL_FUTURE_WRITE | F_SEAL_SHRINK | F_SEAL_GROW",
        "a client seals the arena against the server's own writes",
        (f"{T_ARENA}::test_a_receiver_of_a_region_can_only_read",),
    ),
    Mutant(
        "mapping-inherited-by-forks",
        MAPPING,
        "        _advise(self._address, byte_count, mmap.MADV_DONTFORK)\n",
        "",
        "an engine's forked worker keeps the arena's memory after everybody else let go",
        (f"{T_MAPPING}::test_a_forked_child_neither_has_the_pages_nor_unmaps_what_lies_there",),
    ),
    Mutant(
        "fork-unmaps-what-is-not-its-own",
        MAPPING,
        "    if os.getpid() == owner_pid:\n",
        "    if True:\n",
        "a forked worker unmaps what lies at those addresses by then",
        (f"{T_MAPPING}::test_a_forked_child_neither_has_the_pages_nor_unmaps_what_lies_there",),
    ),
]
