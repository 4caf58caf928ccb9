"""Fetches by tickets that name places, without a call, and layers that are copied together."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PLACED = "clients/kvstore_client/planes/shared_memory/placed.py"
FETCH = "kvstore/controller/fetches/fetch.py"
TEST = "tests/e2e/test_placed.py"

MUTANTS = (
    Mutant(
        "place-of-an-earlier-start",
        "kvstore/server/tenant.py",
        '        first_generation=1 + int.from_bytes(world.random.bytes(7), "little"),\n',
        "        first_generation=1,\n",
        "after a restart a chunk is copied while it leaves, for another chunk's generation is watched",
        (f"{TEST}::test_places_of_an_earlier_start_are_not_believed",),
    ),
    Mutant(
        "place-is-believed",
        PLACED,
        "    if prefix.token_count != held.token_count:\n        return None\n",
        "",
        "a chunk that left is copied, and the ticket is not asked again",
        (f"{TEST}::test_another_chunk_at_the_place_is_not_taken",),
    ),
    Mutant(
        "place-of-another-number",
        PLACED,
        "    if any(entry.index != number or entry.part",
        "    if any(entry.part",
        "a chunk is put at another chunk's tokens",
        (f"{TEST}::test_another_chunk_at_the_place_is_not_taken",),
    ),
    Mutant(
        "places-of-some",
        PLACED,
        "    if len(places) != len(held.digests) or len(held.ticket)",
        "    if len(held.ticket)",
        "a part of the chain is taken for all of it",
        (f"{TEST}::test_another_chunk_at_the_place_is_not_taken",),
    ),
    Mutant(
        "place-is-not-redeemed",
        PLACED,
        "        if on_closed is not None:\n            on_closed()\n",
        "        pass\n",
        "the chunks of every ticket stay in memory until it is too old",
        (f"{TEST}::test_it_needs_no_call_and_counts_as_a_fetch",),
    ),
    Mutant(
        "copied-counts-for-nothing",
        FETCH,
        "            self._account(spaces, [ticket.rows], {}, self._tickets.byte_count(ticket.rows))\n",
        "            pass\n",
        "what workers fetch by tickets all the time is evicted as unused",
        (f"{TEST}::test_it_needs_no_call_and_counts_as_a_fetch",),
    ),
    Mutant(
        "places-of-a-device",
        FETCH,
        "not self._movement.memory.have_all(ticket.rows)",
        "False",
        "a lookup fails where a chunk is not in memory",
        ("tests/e2e/test_transfers.py::test_two_ranks_redeem_what_a_scheduler_holds[local-device]",),
    ),
    Mutant(
        "place-of-a-part",
        PLACED,
        "    if not all(map(_lies_whole, chunks)):\n        return None\n",
        "",
        "the second half of a chunk that lies in two regions is copied from where an altered ticket says",
        (f"{TEST}::test_whatever_byte_of_a_ticket_changes_its_places_are_right_or_not_taken",),
    ),
    Mutant(
        "slots-with-the-same-generations",
        "kvstore/arena/arena.py",
        "first_generation + np.arange(slot_count, dtype=np.uint64) * SLOT_GENERATIONS",
        "first_generation",
        "another chunk's slot is watched where an altered ticket says so, and a chunk that leaves is copied",
        (f"{TEST}::test_whatever_byte_of_a_ticket_changes_its_places_are_right_or_not_taken",),
    ),
    Mutant(
        "redeemed-is-said-once",
        "clients/kvstore_client/planes/shared_memory/session.py",
        "    if not say():\n        returns.soon(partial(_said, say))\n",
        "    say()\n",
        "a sidecar that stalls under many loads keeps their chunks until the tickets are too old",
        (f"{TEST}::test_a_sidecar_that_takes_no_packets_hears_later_that_a_ticket_is_redeemed",),
    ),
    Mutant(
        "heads-of-another-layer",
        "clients/kvstore_client/fetch/target.py",
        "wanted.head_start + wanted.heads_of(layers[0]))\n",
        "wanted.head_start + wanted.heads_of(wanted.layers[0]))\n",
        "where a model's layers differ, some heads of layers that are copied together are never written",
        ("tests/e2e/test_layer_jobs.py::test_layers_of_every_size_of_job",),
    ),
)
