"""What goes to shared tiers, what is told to them, and what is read back."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SHARED = "kvstore/movement/shared.py"
SHARED_TARGET = "kvstore/movement/shared_target.py"
STORED = "tests/tiers/shared/test_writes.py"
USES = "tests/tiers/shared/test_uses.py"
WRITES = "kvstore/movement/writes.py"

MUTANTS = [
    Mutant(
        "values-that-may-be-replaced-are-shared",
        SHARED,
        "    return not space.may_be_replaced\n",
        "    return True\n",
        "another node finds a value that was replaced",
        (f"{STORED}::test_values_that_may_be_replaced_stay_on_their_node",),
    ),
    Mutant(
        "a-row-that-keeps-anothers-hints",
        "kvstore/catalog/table.py",
        "        self.shared[row] = 0\n",
        "",
        "a chunk is never written to a shared tier, for the row's last chunk was",
        (f"{STORED}::test_a_row_that_is_used_again_has_no_hints",),
    ),
    Mutant(
        "every-node-sends-it",
        WRITES,
        "            state = await self.target.finds(row, self._queue.waiting(), is_proof=row in self._demands)\n",
        "            state = UploadState.FREE\n",
        "a hundred nodes send the same prompt",
        (f"{STORED}::test_many_nodes_that_meet_one_prompt_send_it_once",),
    ),
    Mutant(
        "a-model-that-nobody-registered",
        SHARED_TARGET,
        "        if space.model_spec is None:  # an earlier life's: its size is not known before it is registered\n",
        "        if False:\n",
        "where chunks are demoted the device takes none once it has to give up an earlier life's",
        (f"{STORED}::test_what_an_earlier_life_stored_of_a_model_that_nobody_registered_leaves_like_any_other",),
    ),
    Mutant(
        "another-chunks-row-is-sent",
        WRITES,
        "not self._lacks(row) or not self.takes(row):\n",
        "not self._lacks(row):\n",
        "a value that may be replaced goes to other nodes",
        (f"{STORED}::test_a_row_of_another_chunk_is_not_sent_in_the_place_of_one_that_went",),
    ),
    Mutant(
        "values-asked-beyond-the-node",
        "kvstore/controller/stores/claim.py",
        "        if request.durability > Durability.LOCAL and any(space.may_be_replaced for space in spaces):\n",
        "        if False:\n",
        "a store waits for a level that its value never reaches",
        (f"{STORED}::test_no_store_of_values_can_ask_for_a_level_beyond_the_node",),
    ),
    Mutant(
        "reading-back-pushes-out-last-copies",
        "kvstore/movement/readbacks.py",
        "evict_unwritten=is_urgent)\n",
        "evict_unwritten=True)\n",
        "acknowledged chunks go for a move that nobody waits for",
        (f"{STORED}::test_reading_back_makes_nothing_go_that_no_slower_tier_has",),
    ),
    Mutant(
        "read-back-for-good",
        "kvstore/movement/readbacks.py",
        "            self._lent[row] = self._table.identity(row)\n",
        "            pass\n",
        "moves between slower tiers push out what readers use",
        (f"{STORED}::test_what_an_earlier_life_stored_has_come_back_with_its_first_use",),
    ),
    Mutant(
        "undemoted-in-silence",
        "kvstore/movement/eviction.py",
        "            self._leaves(row)\n",
        "            pass\n",
        "nobody hears that chunks leave before a tier took them",
        (f"{STORED}::test_making_room_waits_for_no_shared_tier_and_what_goes_undemoted_is_counted",),
    ),
    Mutant(
        "told-of-every-use",
        "kvstore/movement/uses.py",
        "            fresh = set(chain) - self._touched\n",
        "            fresh = set(chain)\n",
        "an engine is told of each use of a hot prompt",
        (f"{USES}::test_an_engine_is_told_of_one_chunk_once_a_minute",),
    ),
    Mutant(
        "never-told",
        "kvstore/movement/uses.py",
        "            self._waiting |= fresh\n",
        "            pass\n",
        "engines drop the beginnings of hot prompts",
        (f"{USES}::test_what_every_node_has_itself_stays_in_the_engine",),
    ),
    Mutant(
        "what-found-the-queue-full-is-forgotten",
        WRITES,
        "            self._lacks_some = True\n",
        "            pass\n",
        "an outage leaves chunks out of a tier for ever",
        (f"{STORED}::test_what_found_the_queue_full_is_found_again_also_once_memory_let_it_go",),
    ),
]
