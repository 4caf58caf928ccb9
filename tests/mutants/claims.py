"""Nodes that would send the same chunk: one does, and nobody waits for one that went."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

LEVELS = "kvstore/movement/levels.py"
CLAIMS = "tests/tiers/shared/test_claims.py"
LEFT = "kvstore/movement/left.py"
WRITES = "kvstore/movement/writes.py"

MUTANTS = [
    Mutant(
        "two-nodes-send-it-at-once",
        WRITES,
        "            if state is UploadState.TAKEN and self._may_be_left(row):\n",
        "            if False:\n",
        "nodes that store the same at the same moment all send it",
        (f"{CLAIMS}::test_a_herd_that_stores_one_prompt_at_once_sends_each_chunk_once",),
    ),
    Mutant(
        "a-claim-is-believed-for-ever",
        LEFT,
        "        return self._clock.monotonic() - self._rows[row].since_s < LEFT_S_MAX\n",
        "        return True\n",
        "what somebody wrote in a claim's place keeps a chunk from ever being sent",
        (f"{CLAIMS}::test_a_claim_that_never_ends_delays_a_chunk_and_no_other",),
    ),
    Mutant(
        "a-look-ten-times-a-second",
        LEFT,
        "        left.pause_s = min(2 * left.pause_s, LATER_S)\n",
        "",
        "what another node writes costs hundreds of requests that are billed",
        (f"{CLAIMS}::test_what_is_left_is_looked_for_less_and_less_often",),
    ),
    Mutant(
        "asked-for-and-left",
        WRITES,
        "                self._left.hurry(row)\n                self._queue.resume([row])\n",
        "                pass\n",
        "a store that asks for a level waits out a pause that was for nobody",
        (f"{CLAIMS}::test_what_is_asked_for_while_it_is_left_is_looked_for_at_once",),
    ),
    Mutant(
        "gone-is-damaged",
        "kvstore/movement/loads.py",
        '                why = MissReason.EVICTED if error.fields.get("reason") in WENT else MissReason.CORRUPT\n',
        "                why = MissReason.CORRUPT\n",
        "what an engine drops while it is read looks like damage",
        (f"{CLAIMS}::test_what_goes_while_it_is_read_is_a_miss_and_no_damage",),
    ),
    Mutant(
        "what-is-claimed-is-looked-for",
        "kvstore/tiers/s3/tier.py",
        "        states = dict(zip(own, map(self._state_of, await self.probe(own, timeout_s)), strict=True))\n",
        "        states = dict(zip(keys, map(self._state_of, await self.probe(keys, timeout_s)), strict=True))\n",
        "each look for what another node uploads is a request that is billed",
        (f"{CLAIMS}::test_what_another_node_uploads_is_not_looked_for_in_s3",),
    ),
    Mutant(
        "what-is-there-stays-claimed",
        "kvstore/tiers/s3/tier.py",
        "        await claims.release([key for key, state in states.items() if state is UploadState.THERE])\n",
        "",
        "nodes wait for a chunk that is in the bucket until the claim of who looked for it ends",
        (f"{CLAIMS}::test_uploads_to_s3_are_claimed_in_redis_while_it_answers",),
    ),
    Mutant(
        "an-upload-stays-claimed",
        "kvstore/tiers/s3/tier.py",
        "                await self._claims.release([header.storage_key])\n",
        "                pass\n",
        "nodes wait for a chunk that is in the bucket until the claim of who put it there ends",
        (f"{CLAIMS}::test_what_another_node_uploads_is_not_looked_for_in_s3",),
    ),
    Mutant(
        "a-level-waits-for-a-claim",
        LEVELS,
        "                writes.insist(chunks)\n",
        "                pass\n",
        "a store that asked for a level fails because another node's claim outlives its deadline",
        (f"{CLAIMS}::test_who_waits_for_a_level_is_not_kept_by_a_claim_that_nobody_ends",),
    ),
    Mutant(
        "left-and-told-done",
        WRITES,
        "        is_through = row not in self._queue or not (row in self._demands or self._queue.is_aside(row))\n",
        "        is_through = row not in self._demands or row not in self._queue or self._queue.is_aside(row)\n",
        "a store that asked for a level is told at once that it was not reached",
        (f"{CLAIMS}::test_a_herd_that_asks_for_shared_has_it_proven_by_each_node",),
    ),
    Mutant(
        "a-turn-goes-to-the-next-in-its-row",
        "kvstore/movement/queue.py",
        "        return row in self._chunks and self._chunks[row] == self._identity_of(row)\n",
        "        return row in self._chunks\n",
        "a chunk that the settings do not want there is sent in the place of one that was evicted",
        (
            "tests/tiers/shared/test_tried_again.py::"
            "test_a_chunk_in_the_row_of_one_that_waited_for_its_turn_is_not_sent_in_its_place",
        ),
    ),
    Mutant(
        "aside-for-another-chunk",
        "kvstore/movement/queue.py",
        "        if self._chunks.get(row, identity) != identity:\n            self.cancel([row])\n",
        "",
        "a chunk waits aside, or goes first, because one that was evicted did",
        ("tests/movement/test_queue.py::test_a_chunk_in_the_row_of_one_that_waits_has_a_turn_of_its_own",),
    ),
]
