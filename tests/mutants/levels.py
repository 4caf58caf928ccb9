"""What a receipt says of levels beyond the node: no more than is so."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

LEVELS = "kvstore/movement/levels.py"
SHARED = "kvstore/movement/shared.py"
SHARED_TARGET = "kvstore/movement/shared_target.py"
LEVEL_TESTS = "tests/tiers/shared/test_levels.py"

MUTANTS = [
    Mutant(
        "a-level-is-promised-on-what-was-not-asked-for",
        "kvstore/movement/levels.py",
        "            answers = await copies.ask(keys, until.left_s) if until.left_s > 0 else None\n",
        "            answers = await copies.ask(keys, until.left_s, [len(keys)]) if until.left_s > 0 else None\n",
        "OBJECT is reached by a chain of which the bucket lost a chunk in the middle",
        ("tests/tiers/shared/test_levels.py::test_a_chunk_that_went_in_the_middle_of_a_long_chain_is_missed",),
    ),
    Mutant(
        "promised-without-being-asked-for",
        LEVELS,
        "                if is_there is not None and not is_there:\n",
        "                if False:\n",
        "a receipt says SHARED of what the engine dropped",
        (f"{LEVEL_TESTS}::test_shared_was_readable_when_it_was_said",),
    ),
    Mutant(
        "a-level-of-another-chunk-in-the-row",
        LEVELS,
        "        return all(self._table.identity(row) == identity for row, identity in chunks.items())\n",
        "        return True\n",
        "a receipt says OBJECT of a chunk that went, for the one that its row became is there",
        (f"{LEVEL_TESTS}::test_a_chunk_that_goes_while_it_is_waited_for_has_no_level_of_another_in_its_row",),
    ),
    Mutant(
        "a-level-of-another-models-chunk",
        "kvstore/catalog/table.py",
        "        return self.space_id(self.spaces[row]), self.digests[row]\n",
        "        return 0, self.digests[row]\n",
        "a receipt says OBJECT of a chunk that went, for that of another model with the same tokens is there",
        (f"{LEVEL_TESTS}::test_a_chunk_that_goes_while_it_is_waited_for_has_no_level_of_another_in_its_row",),
    ),
    Mutant(
        "in-memory-when-it-was-asked",
        LEVELS,
        "        if not all(self._catalog.is_here(*each) for each in chunks.items()):",
        "        if False:",
        "a receipt says MEMORY of what left the node while other tiers were asked",
        (f"{LEVEL_TESTS}::test_what_leaves_the_node_while_other_tiers_are_asked_has_none_of_its_levels",),
    ),
    Mutant(
        "an-object-without-its-ancestors",
        LEVELS,
        "        return [*self._above(found), *found]\n",
        "        return found\n",
        "a receipt says OBJECT of what no start can reach",
        (f"{LEVEL_TESTS}::test_object_is_not_reached_while_an_ancestor_is_missing",),
    ),
    Mutant(
        "a-tiers-word-is-a-promise",
        SHARED,
        "        return bool(self._column[row] & self._seen)\n",
        "        return bool(self._column[row] & self._said)\n",
        "a receipt says OBJECT of what is damaged there",
        (f"{LEVEL_TESTS}::test_what_a_tier_merely_says_is_no_promise_until_it_was_read",),
    ),
    Mutant(
        "adopted-unread",
        SHARED_TARGET,
        "            if not await self.is_whole(row):\n",
        "            if False:\n",
        "a receipt says OBJECT of what is damaged there",
        (f"{LEVEL_TESTS}::test_what_a_tier_merely_says_is_no_promise_until_it_was_read",),
    ),
    Mutant(
        "a-level-waits-for-the-device",
        LEVELS,
        "        is_waited_for = asked is None or bool(beyond[wanted].reason and beyond[wanted].is_settled)\n",
        "        is_waited_for = True\n",
        "a device that stalls delays what is in the object store",
        (f"{LEVEL_TESTS}::test_a_device_that_stalls_delays_no_level_beyond_it",),
    ),
    Mutant(
        "a-level-of-no-tier",
        "kvstore/controller/controller.py",
        "            self.parts.movement.levels.check(request.durability)\n",
        "",
        "a store asks for a level that nothing gives",
        (f"{LEVEL_TESTS}::test_a_level_of_no_tier_says_which_setting_adds_it_and_no_store_can_ask_for_it",),
    ),
    Mutant(
        "the-old-level-is-the-highest",
        LEVELS,
        "        return Durability.MEMORY if Durability.LOCAL in self.missing else Durability.LOCAL\n",
        "        return max(set(Durability) - self.missing.keys())\n",
        "a client of an earlier release takes SHARED for more than the device",
        (f"{LEVEL_TESTS}::test_every_level_is_reached_by_itself_and_the_old_one_is_the_nodes_own",),
    ),
    Mutant(
        "values-asked-beyond-the-node-by-a-client",
        "clients/kvstore_client/opaque/calls.py",
        "    if durability is not None and durability > Durability.LOCAL:\n",
        "    if False:\n",
        "a value is copied before its store is refused",
        ("tests/e2e/test_levels.py::test_values_stay_on_their_node",),
    ),
]
