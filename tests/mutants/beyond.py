"""What lies beyond the node: what is promised of it, what routers and operators are told, and what ends."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

LEVELS = "kvstore/movement/levels.py"
LOCATING = "kvstore/controller/locating.py"
DIRECTORY = "kvstore/directory/directory.py"
LISTING = "kvstore/tiers/s3/listing.py"
ROUTERS = "tests/directory/test_routers.py"
LOCATED = "tests/tiers/shared/test_located.py"
CHANGES = "kvstore/controller/operators/changes.py"
STALLED = "tests/tiers/shared/test_stalled_changes.py"

MUTANTS = [
    Mutant(
        "a-node-warms-itself-beyond-its-room",
        "kvstore/server/warming.py",
        " and arena.used_bytes + byte_count <= FULL * arena.capacity_bytes\n",
        "\n",
        "hints of another node push out what this node's engines use",
        ("tests/server/test_warming.py::test_what_has_no_room_is_not_brought",),
    ),
    Mutant(
        "a-node-warms-itself-beyond-the-setting",
        "kvstore/server/warming.py",
        "left - len(asked))",
        "left)",
        "a node brings all that another one ever fetched",
        ("tests/e2e/test_warm_up.py::test_no_more_than_the_setting_says_is_brought",),
    ),
    Mutant(
        "hints-without-an-envelope-are-followed",
        "kvstore/server/warming.py",
        'opened is None or (self._kind != "none" and opened == data)',
        "opened is None",
        "whoever can write to Redis chooses what new nodes read",
        ("tests/server/test_warming.py::test_only_hints_in_our_envelope_are_followed",),
    ),
    Mutant(
        "a-new-node-is-warmed-beyond-its-room",
        "ops/kvstore_ops/operators/warming.py",
        "    return arena.used_bytes + byte_count <= FULL * arena.capacity_bytes\n",
        "    return True\n",
        "hints of another node push out what this node's engines use",
        ("tests/e2e/test_warming.py::test_a_new_node_brings_what_another_fetches_most_and_no_more_than_has_room",),
    ),
    Mutant(
        "object-although-a-part-was-too-small-to-be-sent",
        LEVELS,
        "        return is_whole and not shared.copies.tier.takes(self._names.of(row).layout)\n",
        "        return False\n",
        "OBJECT is acknowledged of a chunk that no bucket was given",
        ("tests/tiers/shared/test_levels_sizes.py::test_object_is_not_reached_while_a_part_is_too_small_to_be_sent",),
    ),
    Mutant(
        "parts-of-chunks-asked-as-one-chain",
        LOCATING,
        "        parts = [part for chunks in chains for part in zip(*chunks, strict=True)]\n",
        "        parts = [[key for keys in chunks for key in keys] for chunks in chains]\n",
        "a router hears that a bucket has what it never had",
        (f"{LOCATED}::test_a_bucket_that_has_no_e_is_not_said_to_have_it",),
    ),
    Mutant(
        "a-check-on-the-side-holds-chunks",
        "kvstore/movement/checks.py",
        "        while self._rests:\n",
        "        while False:\n",
        "an operator hears that chunks are in use which nobody uses, and they stay",
        ("tests/controller/test_operators.py::test_a_check_on_the_side_holds_no_chunk_for_an_operator",),
    ),
    Mutant(
        "one-callers-haste-closes-the-directory",
        DIRECTORY,
        "            self.is_reachable = self.is_reachable and timeout_s < SLOW_S\n",
        "            self.is_reachable = False\n",
        "one router without patience takes the directory from all others",
        (f"{ROUTERS}::test_a_caller_without_patience_leaves_the_directory_to_the_others",),
    ),
    Mutant(
        "a-connection-for-each-part-of-a-question",
        DIRECTORY,
        "        async with self._turns:\n",
        "        if True:\n",
        "one call of a router opens a hundred connections",
        (f"{ROUTERS}::test_many_keys_take_few_connections",),
    ),
    Mutant(
        "given-up-meanwhile-and-forgotten",
        "kvstore/tiers/redis/errands.py",
        "        for key in removed:  # others were given up meanwhile\n            del self._given_up[key]\n",
        "        self._given_up.clear()\n",
        "half-written chunks stay in the engine",
        ("tests/tiers/redis/test_errands.py::test_what_is_given_up_while_others_are_removed_is_removed_next",),
    ),
    Mutant(
        "the-same-page-for-ever",
        LISTING,
        "        if token == before:\n",
        "        if False:\n",
        "a scan of a store that pages badly never ends",
        ("tests/tiers/s3/test_listing.py::test_a_list_that_cannot_be_read_to_its_end_is_an_error",),
    ),
    Mutant(
        "half-a-list-taken-for-whole",
        LISTING,
        '    if answer.get("IsTruncated") and not following:\n',
        "    if False:\n",
        "a scan passes over the rest of a bucket",
        ("tests/tiers/s3/test_listing.py::test_a_list_that_cannot_be_read_to_its_end_is_an_error",),
    ),
    Mutant(
        "a-password-that-a-server-repeats",
        "kvstore/tiers/redis/replies.py",
        '    text = text.partition(", with args")[0]',
        "    text = text",
        "a password stands in status and in the log",
        ("tests/tiers/redis/test_refusals.py::test_a_password_that_a_server_repeats_goes_no_further",),
    ),
    Mutant(
        "a-stalled-tier-is-tried-chunk-by-chunk",
        CHANGES,
        "            if clock.monotonic() - arrived_s >= BATCH_S_MAX and not dry_run:\n",
        "            if False:\n",
        "a drain says failed of chunks that it never tried",
        (f"{STALLED}::test_a_move_to_a_device_that_stalls_ends_and_counts_what_was_not_tried",),
    ),
    Mutant(
        "a-slow-move-is-ended",
        CHANGES,
        "                    arrived_s = clock.monotonic() if there > before else arrived_s\n",
        "",
        "a drain into a slow tier never ends well",
        (f"{STALLED}::test_a_move_that_gets_on_slowly_is_not_ended",),
    ),
    Mutant(
        "a-look-without-end",
        "kvstore/controller/operators/looks.py",
        "        await asyncio.wait([task], timeout=left_s)\n",
        "        await asyncio.wait([task])\n",
        "an operator's verify waits for a device for ever",
        (f"{STALLED}::test_what_a_stalled_device_has_is_neither_verified_nor_brought_for_ever",),
    ),
    Mutant(
        "a-change-that-waits-in-silence",
        "kvstore/controller/operators/heartbeats.py",
        "                while not (await asyncio.wait([step], timeout=HEARTBEAT_S))[0]:\n",
        "                while not (await asyncio.wait([step]))[0]:\n",
        "an operator takes a service for dead that waits for a tier, and leaves it half way",
        (f"{STALLED}::test_a_prefetch_from_a_device_that_stalls_is_heard_of",),
    ),
    Mutant(
        "brought-for-ever",
        "kvstore/movement/relocation.py",
        "            async with asyncio.timeout(timeout_s):\n",
        "            async with asyncio.timeout(None):\n",
        "an operator's move into memory waits for a device for ever",
        (f"{STALLED}::test_what_is_brought_while_the_device_falls_silent_is_told",),
    ),
    Mutant(
        "a-tenants-name-is-the-start-of-a-digest",
        "ops/kvstore_ops/scan.py",
        "    return Wanted(tenant=exact or tenant.lower(), ",
        "    return Wanted(tenant=tenant.lower(), ",
        "a deletion of one tenant's objects deletes another one's",
        ("tests/ops/test_scan.py::test_a_tenants_name_means_no_digest_that_begins_like_it",),
    ),
    Mutant(
        "one-digit-of-a-tenant-is-enough-to-delete",
        "ops/kvstore_ops/scan.py",
        "    least = DIGITS_MIN if is_for_deletion else 1\n",
        "    least = 1\n",
        "a deletion of one tenant's objects deletes another one's",
        ("tests/ops/test_scan.py::test_it_deletes_what_it_was_told_to_and_nothing_else",),
    ),
    Mutant(
        "a-scan-holds-objects-of-any-size",
        LISTING,
        "    if each.byte_count > WHOLE_BYTES_MAX:\n",
        "    if False:\n",
        "whoever may write to the bucket fills the memory of a scan",
        ("tests/ops/test_scan.py::test_what_is_large_is_read_alone_and_what_is_too_large_by_its_header",),
    ),
]
