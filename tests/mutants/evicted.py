"""What leaves a tier when it needs room, and what does not."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

EVICTION = "kvstore/movement/eviction.py"
T_CONTROLLER = "tests/controller/test_controller.py"
T_EVICTION = "tests/movement/test_eviction.py"
T_ROOM = "tests/movement/test_room.py"

MUTANTS = (
    Mutant(
        "held-chunks-are-evicted",
        EVICTION,
        "                return may_go(row) and row not in keep and not self._table.is_held(row)\n",
        "                return may_go(row) and row not in keep\n",
        "what a client copies is given up under its copy",
        (f"{T_CONTROLLER}::test_tickets_and_leases_keep_their_chunks",),
    ),
    Mutant(
        "chosen-before-it-was-used",
        EVICTION,
        "            if self._copies.policy.place(row) == place and eligible(row):\n",
        "            if row in self._copies and eligible(row):\n",
        "what was used a moment ago goes, because it was chosen before",
        (f"{T_EVICTION}::test_a_chosen_victim_that_was_used_since_stays",),
    ),
    Mutant(
        "children-of-another-size-stay",
        EVICTION,
        "(helps_itself | with_parent) &",
        "helps_itself &",
        "a device full of conversations whose ends are short takes no more of them",
        (f"{T_EVICTION}::test_a_child_of_another_size_goes_before_its_parent_wherever_it_is_found",),
    ),
    Mutant(
        "blocked-by-what-memory-alone-has",
        EVICTION,
        "is_of_use(row) and below.of(row) is not None, of_use",
        "is_of_use(row) and not table.child_counts[row], of_use",
        "chunks that nobody uses stay on a full device for the ends of prompts in memory, and it takes nothing new",
        (f"{T_EVICTION}::test_what_only_memory_has_goes_with_the_chunk_that_it_hangs_on",),
    ),
    Mutant(
        "left-below-in-memory",
        EVICTION,
        "                    self._give_up_all(below.of(row) or ())\n",
        "                    pass\n",
        "chunks stay in memory that nobody finds any more",
        (f"{T_EVICTION}::test_what_only_memory_has_goes_with_the_chunk_that_it_hangs_on",),
    ),
    Mutant(
        "gone-from-memory-for-the-device",
        EVICTION,
        "if not any(copies.keeps(row) for copies in self._table.copies if copies is not self._copies):\n",
        "if True:\n",
        "the device has memory give up what it could still serve",
        (f"{T_EVICTION}::test_what_memory_can_still_give_without_the_device_stays_there",),
    ),
    Mutant(
        "held-below-is-evicted",
        EVICTION,
        "            and not self._table.is_held(each)\n",
        "",
        "what a client copies is given up under its copy, because its parent leaves the device",
        (f"{T_EVICTION}::test_a_chunk_stays_while_something_below_it_is_in_use_or_on_the_device",),
    ),
    Mutant(
        "parents-before-children-on-the-device",
        EVICTION,
        "            and not any(copies.keeps(each) for copies in self._others)\n",
        "",
        "a crash finds chunks on the device whose parents had left it",
        (f"{T_EVICTION}::test_a_parent_stays_for_a_child_that_is_in_memory_and_on_the_device",),
    ),
    Mutant(
        "held-neighbours-are-evicted",
        EVICTION,
        "row == ABSENT or row in keep or table.is_held(row) for row in rows",
        "row == ABSENT for row in rows",
        "what a client copies is given up under its copy, because a larger chunk needs the room beside it",
        (f"{T_ROOM}::test_neighbours_that_are_in_use_stay",),
    ),
    Mutant(
        "neighbours-leave-their-children",
        EVICTION,
        "table.child_counts[row] == children[row] for row in alone",
        "True for row in alone",
        "chunks stay in memory that nobody finds any more",
        (f"{T_ROOM}::test_neighbours_go_for_a_larger_chunk_and_leave_no_child_behind",),
    ),
    Mutant(
        "neighbours-before-they-are-written",
        "kvstore/movement/room.py",
        "product((False, True) if evict_unwritten else (False,), ",
        "product((evict_unwritten,), ",
        "a store that waits for the device is refused, because a larger chunk takes its room and not that of others",
        (f"{T_ROOM}::test_neighbours_that_only_memory_has_stay_while_others_can_go",),
    ),
    Mutant(
        "a-slot-is-taken-from-who-frees-it",
        "kvstore/tiers/nvme/free_slots.py",
        "            if self._sought_bytes != slot_bytes:\n",
        "            if True:\n",
        "a writer is told that the tier is full, while chunks could leave it",
        ("tests/tiers/nvme/test_free_slots.py::test_a_slot_that_one_writer_frees_is_not_taken_by_another",),
    ),
)
