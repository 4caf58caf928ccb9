"""Bytes on their way into a chunk: filled means moved, and no memory is given away under a mover."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CONTROLLER = "kvstore/controller/controller.py"
COMMIT = "kvstore/controller/stores/commit.py"
PUBLISH = "kvstore/controller/stores/publish.py"
UPLOAD = "clients/kvstore_client/planes/shared_memory/store.py"
FILL = "kvstore/controller/stores/fill.py"
MOVER = "kvstore/controller/stores/mover.py"
FILLING = "kvstore/controller/stores/filling.py"
RESERVATIONS = "kvstore/controller/stores/reservations.py"
DEADLINE = "kvstore/seams/deadline.py"
JOBS = "kvstore/seams/jobs.py"
SCHEDULER = "kvstore/seams/scheduler.py"
BOUNDS = "kvstore/wire/bounds.py"
SERVICES = "kvstore/server/services.py"
T_MOVES = "tests/controller/test_moves.py"
T_JOBS = "tests/seams/test_jobs.py"
T_LIMITS = "tests/wire/test_limits.py"
T_CALLS = "tests/controller/test_deadlines.py"
T_CONTROLLER = "tests/controller/test_controller.py"
T_AT_ONCE = "tests/e2e/test_at_once.py"

MUTANTS = [
    Mutant(
        "run-of-two-lists",
        UPLOAD,
        "        self._ahead, self._staged = ahead, staged  # ",
        "        self._ahead = ahead\n        self._staged = staged  # ",
        "who is interrupted gives a run back twice, and two stores write there",
        (f"{T_AT_ONCE}::test_wherever_a_caller_is_interrupted_each_run_is_given_back_once",),
    ),
    Mutant(
        "calls-sent-ahead-unheard",
        UPLOAD,
        "            self._session.answer(self._told.pop())\n",
        "            self._told.pop()\n",
        "a commit overtakes chunks that were sent ahead, and a refusal of them is not told",
        (f"{T_AT_ONCE}::test_a_store_of_which_a_call_was_refused_keeps_nothing_more_and_says_why",),
    ),
    Mutant(
        "claimed-means-filled",
        PUBLISH,
        "        if not filling.filled.all() or (",
        "        if not filling.claimed.all() or (",
        "a chunk is published of which a mover refused a part",
        (f"{T_MOVES}::test_each_job_of_a_store_in_turn_fails_and_nothing_wrong_is_served",),
    ),
    Mutant(
        "moved-and-another-filled",
        FILLING,
        "        self.filled[move.first : move.stop] = True\n",
        "        self.filled[:] = True\n",
        "one move that ended well fills the whole chunk",
        (f"{T_MOVES}::test_each_job_of_a_store_in_turn_fails_and_nothing_wrong_is_served",),
    ),
    Mutant(
        "any-number-of-checksums",
        MOVER,
        "        if len(rows) == (self.stop - self.first) * CHECKSUM_BYTES:\n",
        "        if True:\n",
        "a mover's answer that is too short is a bug somewhere else",
        (f"{T_MOVES}::test_each_job_of_a_store_in_turn_fails_and_nothing_wrong_is_served",),
    ),
    Mutant(
        "filled-twice",
        FILL,
        "        if filling.claimed[fill.strip_first : stop].any():\n",
        "        if False:\n",
        "two fills write one strip, and its checksum is of either",
        (
            f"{T_CONTROLLER}::test_filling_twice_is_refused",
            f"{T_MOVES}::test_what_failed_takes_no_second_fill_and_is_dropped_whole",
        ),
    ),
    Mutant(
        "filled-beyond-its-strips",
        FILL,
        "        if fill.strip_first < 0 or fill.strip_count < 1 or stop > layout.strip_count:\n",
        "        if fill.strip_first < 0 or fill.strip_count < 1:\n",
        "a fill names strips that the chunk does not have",
        (f"{T_CONTROLLER}::test_a_fill_outside_its_chunk_or_staging_is_refused",),
    ),
    Mutant(
        "small-fills-before-everybody",
        FILL,
        "                await self._room(reservation, deadline)\n",
        "",
        "one message of a client has the stores of all others fail",
        ("tests/controller/test_deadlines.py::test_a_long_list_of_fills_leaves_the_movers_to_others_in_between",),
    ),
    Mutant(
        "staging-closed-under-its-movers",
        CONTROLLER,
        "        if self.reservations.are_moving(session):\n",
        "        if False:\n",
        "movers read memory that was given back, and the chunk is what came after",
        (f"{T_MOVES}::test_staging_is_not_closed_while_movers_read_it",),
    ),
    Mutant(
        "freed-under-its-movers",
        RESERVATIONS,
        "        await self.idle(reservation, deadline)\n        if not reservation.has_ended:\n",
        "        reservation.busy = 0\n        if not reservation.has_ended:\n",
        "movers write into what is another chunk's by now",
        (f"{T_MOVES}::test_a_job_that_never_answers_keeps_its_memory_and_nothing_of_it_is_served",),
    ),
    Mutant(
        "movers-waited-for-without-end",
        RESERVATIONS,
        "                async with asyncio.timeout(deadline.left_s):\n",
        "                async with asyncio.timeout(None):\n",
        "a mover that hangs holds up its caller for ever",
        (f"{T_MOVES}::test_a_job_that_never_answers_keeps_its_memory_and_nothing_of_it_is_served",),
    ),
    Mutant(
        "each-chunk-waited-for-anew",
        COMMIT,
        "                await asyncio.wait(filling.moving, timeout=deadline.left_s)\n",
        "                await asyncio.wait(filling.moving, timeout=self._parts.deadline_s)\n",
        "a commit of many chunks outlasts its caller by as many deadlines",
        (f"{T_CALLS}::test_a_commit_of_many_chunks_waits_once",),
    ),
    Mutant(
        "other-stores-waited-for-to-the-end",
        COMMIT,
        "patience or deadline.sooner(deadline.left_s / 2)  # so that",
        "patience or deadline.sooner(deadline.left_s)  # so that",
        "a commit that could be answered is given up by its caller",
        (f"{T_CALLS}::test_a_commit_answers_before_its_caller_gives_up_when_another_store_does_not_end",),
    ),
    Mutant(
        "any-deadline-of-a-caller",
        DEADLINE,
        "        return Deadline(clock, min(caller_s, now_s + most_s), caller_s)\n",
        "        return Deadline(clock, now_s + most_s if remaining_s is None else caller_s, caller_s)\n",
        "a caller that waits for ever holds what it asked for as long",
        (f"{T_CALLS}::test_no_caller_makes_a_call_wait_longer_than_the_service_does",),
    ),
    Mutant(
        "later-than-its-caller",
        DEADLINE,
        "        return Deadline(self.clock, min(self.until_s + seconds, self.caller_until_s), self.caller_until_s)\n",
        "        return Deadline(self.clock, self.until_s + seconds, self.caller_until_s)\n",
        "a shard goes on waiting for others when its caller has gone",
        (
            f"{T_CALLS}::test_a_shard_waits_for_the_others_as_long_as_a_store_may_take_and_its_caller_waits",
            f"{T_CALLS}::test_a_reader_of_a_store_in_flight_waits_as_long_as_that_may_take_and_its_caller_waits",
        ),
    ),
    Mutant(
        "callers-time-left-behind",
        SERVICES,
        "        return self._controller.deadline(context.time_remaining())\n",
        "        return self._controller.deadline()\n",
        "a call goes on for somebody who has gone",
        (
            "tests/server/test_call_deadlines.py::test_a_step_of_a_store_waits_no_longer_than_its_caller",
            "tests/server/test_call_deadlines.py::test_a_fetch_waits_no_longer_than_its_caller",
        ),
    ),
    Mutant(
        "refused-and-run-later",
        SCHEDULER,
        "            if future.cancel():\n                raise\n",
        "            raise\n",
        "a job that was refused runs when its memory is another's",
        (f"{T_JOBS}::test_a_call_that_found_no_thread_never_runs",),
    ),
    Mutant(
        "cancelled-and-let-go-too-early",
        JOBS,
        "        except asyncio.CancelledError as error:\n            cancelled = error\n",
        "        except asyncio.CancelledError as error:\n            raise error\n",
        "who was cancelled gives memory back that a job still writes",
        (f"{T_JOBS}::test_who_is_cancelled_is_let_go_when_its_job_has_ended",),
    ),
    Mutant(
        "message-of-any-size",
        BOUNDS,
        "    if len(data) > most:\n",
        "    if False:\n",
        "a message is decoded before anybody asks how large it is",
        (f"{T_LIMITS}::test_a_request_too_large_for_its_fields_is_refused_before_it_is_decoded",),
    ),
    Mutant(
        "list-of-any-length",
        BOUNDS,
        "            if found > count:\n",
        "            if False:\n",
        "one message holds up everybody for seconds",
        (f"{T_LIMITS}::test_one_more_than_the_limit_is_refused_by_name",),
    ),
    Mutant(
        "short-message-with-a-long-list",
        BOUNDS,
        "    entries_bytes = limit.count * (2 if has_lengths else 1)",
        "    entries_bytes = limit.count * (2 if has_lengths else 2)",
        "a list is not looked at, though its entries are shorter than it was thought they could be",
        (f"{T_LIMITS}::test_one_more_than_the_limit_is_refused_by_name",),
    ),
    Mutant(
        "short-message-with-a-list-of-empty-entries",
        BOUNDS,
        "    entries_bytes = limit.count * (2 if has_lengths else 1)",
        "    entries_bytes = limit.count * (3 if has_lengths else 1)",
        "the same of entries that are empty texts or messages",
        (f"{T_LIMITS}::test_one_more_than_the_limit_is_refused_by_name",),
    ),
    Mutant(
        "parts-of-any-number",
        BOUNDS,
        "    if chunk_count * part_count > PARTS_MAX:\n",
        "    if False:\n",
        "two lists within their limits are billions together",
        (f"{T_LIMITS}::test_many_chunks_of_many_parts_are_refused_together",),
    ),
    Mutant(
        "cancelled-and-its-lease-stays",
        SERVICES,
        "                self._controller.release(session, [result.lease_id])\n                raise\n",
        "                raise\n",
        "a fetch that nobody heard of holds its chunks until its session ends",
        ("tests/server/test_abandoned.py::test_a_fetch_that_is_cancelled_before_its_reply_leaves_no_lease",),
    ),
    Mutant(
        "spare-goes-with-the-copy",
        "kvstore/movement/removal.py",
        "        if spares:\n            copies.spares[row] = spares\n        if was_fastest:\n",
        "        if spares:\n            copies.tier.remove([spares[0].residency])\n        if was_fastest:\n",
        "what was acknowledged is nowhere on the device until the chunk is written anew",
        ("tests/tiers/nvme/test_spares.py::test_memory_gives_way_to_a_second_copy",),
    ),
    Mutant(
        "cancelled-and-yet-stored",
        "kvstore/movement/writes.py",
        "            async with asyncio.timeout(timeout_s):\n                await self._progress.wait()\n",
        "            await asyncio.wait_for(self._progress.wait(), timeout_s)\n",
        "a store goes on whose caller has gone",
        ("tests/controller/test_cancelled.py::test_a_store_that_waits_for_room",),
    ),
    Mutant(
        "memory-given-away-under-a-write",
        "kvstore/movement/writes.py",
        "        opened = await self._memory.tier.open(name, residency)\n        try:\n",
        "        opened = await self._memory.tier.open(name, residency)\n        opened.close()\n        try:\n",
        "a value's bytes lie in a slot that nobody knows of, and come back after a newer value",
        ("tests/tiers/nvme/test_meanwhile.py::test_memory_that_a_write_reads_takes_no_other_chunk",),
    ),
    Mutant(
        "cancelled-shard-that-stays",
        COMMIT,
        "            async with asyncio.timeout(until.left_s):\n                await reservation.ended.wait()\n",
        "            await asyncio.wait_for(reservation.ended.wait(), until.left_s)\n",
        "a commit answers a caller who has gone",
        ("tests/controller/test_cancelled.py::test_a_shard_that_waits_for_the_others",),
    ),
    Mutant(
        "promise-given-up-as-a-spare",
        "kvstore/movement/eviction.py",
        "        doubtful = {row for row, _ in spares if not self._copies.is_proven(row)}\n",
        "        doubtful = set[int]()\n",
        "of two copies the one stays whose sync had failed, and a power cut takes it",
        ("tests/tiers/nvme/test_spares.py::test_what_stays_of_a_chunk_when_a_file_gives_way_outlives_a_power_cut",),
    ),
]
