"""Copies on a device: a cache of memory, whose bytes count only while their generation is what it was."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

POOL = "kvstore/tiers/hbm/pool.py"
HBM = "kvstore/movement/hbm.py"
RESIDENT = "clients/kvstore_client/planes/shared_memory/resident.py"
T_MOVEMENT = "tests/movement/test_hbm.py"
T_E2E = "tests/e2e/test_hbm.py"

MUTANTS = (
    Mutant(
        "device-copy-without-generation",
        POOL,
        "        self._values[extent.slot] += np.uint64(1)\n",
        "",
        "a reader on the device copies what took a chunk's place, and takes it for the chunk",
        (f"{T_E2E}::test_a_copy_that_leaves_the_pool_under_a_fetch_is_asked_for_again",),
    ),
    Mutant(
        "device-generation-is-not-read",
        RESIDENT,
        "            current = current and (pool is None or chunk.near is None or pool.is_current(chunk.near))\n",
        "",
        "a reader on the device copies what took a chunk's place, and takes it for the chunk",
        (f"{T_E2E}::test_a_copy_that_leaves_the_pool_under_a_fetch_is_asked_for_again",),
    ),
    Mutant(
        "device-keeps-what-memory-gave-up",
        "kvstore/catalog/copies.py",
        "        for told in self.on_leaving:\n            told(row)\n",
        "",
        "the device has the only copy of a chunk, or one of a chunk that was written anew",
        (f"{T_MOVEMENT}::test_what_leaves_memory_leaves_the_device_and_is_read_from_nowhere_there",),
    ),
    Mutant(
        "device-copy-of-what-left-meanwhile",
        HBM,
        "        if row in self._there or not self._memory.holds(row, placement):\n",
        "        if row in self._there:\n",
        "what was copied while memory gave it up is told as the chunk",
        (f"{T_MOVEMENT}::test_a_copy_that_left_memory_on_its_way_does_not_count",),
    ),
    Mutant(
        "device-evicts-what-is-leased",
        HBM,
        "            if row not in self._request and not self._table.is_held(row) and helps(residency):\n",
        "            if row not in self._request and helps(residency):\n",
        "a chunk leaves the device while a reader that holds it copies it layer by layer",
        (f"{T_MOVEMENT}::test_the_least_recently_used_go_first_and_held_ones_stay",),
    ),
    Mutant(
        "verified-from-the-device",
        "clients/kvstore_client/planes/shared_memory/mapped.py",
        "        if not self._has_pool or wanted.verify or not device:\n",
        "        if not self._has_pool or not device:\n",
        "what another client wrote on the device passes a fetch that was to be verified",
        (f"{T_E2E}::test_the_bytes_come_from_the_pool_and_from_nowhere_else",),
    ),
    Mutant(
        "device-room-free-while-it-is-written",
        "kvstore/tiers/hbm/tier.py",
        "            job.add_done_callback(lambda _: self.pool.free(extent))\n",
        "            self.pool.free(extent)\n",
        "a copy that nobody waits for any more lands in the room of the next one",
        (f"{T_MOVEMENT}::test_a_cancelled_copy_does_not_wait_for_the_device_and_its_room_is_free_afterwards",),
    ),
    Mutant(
        "device-header-is-believed",
        "kvstore/tiers/hbm/tier.py",
        "            if packed.tobytes() != found.packed:\n",
        "            if False:\n",
        "a header that a client wrote on the device stays there unnoticed",
        (f"{T_MOVEMENT}::test_a_check_finds_what_somebody_wrote_there",),
    ),
)
