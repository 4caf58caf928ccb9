"""Shared tiers: what comes from beyond the node, and what goes there."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SHARED = "kvstore/movement/shared.py"
SOURCES = "kvstore/movement/sources.py"
LOADS = "kvstore/movement/loads.py"
TESTS = "tests/tiers/test_shared.py"

MUTANTS = [
    Mutant(
        "values-that-may-be-replaced-are-shared",
        SHARED,
        "    return not space.may_be_replaced\n",
        "    return True\n",
        "another node finds a value that was replaced",
        (f"{TESTS}::test_values_that_may_be_replaced_stay_on_their_node",),
    ),
    Mutant(
        "loaded-beside-a-store-in-flight",
        SOURCES,
        "    return known_mark is None and not is_pending and (parent < 0 or catalog.is_visible(parent))\n",
        "    return known_mark is None and (parent < 0 or catalog.is_visible(parent))\n",
        "a load publishes a chunk that a store is about to publish",
        (f"{TESTS}::test_a_load_that_ends_while_a_store_is_in_flight_leaves_it_alone",),
    ),
    Mutant(
        "entered-without-what-it-hangs-on",
        SOURCES,
        "    return known_mark is None and not is_pending and (parent < 0 or catalog.is_visible(parent))\n",
        "    return known_mark is None and not is_pending\n",
        "memory fills with chunks that no prefix reaches",
        (f"{TESTS}::test_a_chunk_that_the_chain_lost_meanwhile_is_not_entered_alone",),
    ),
    Mutant(
        "loaded-over-what-was-stored-meanwhile",
        SOURCES,
        "        return known_mark == mark == table.write_marks[row]\n",
        "        return True\n",
        "what a shared tier had takes the place of what the node has",
        (f"{TESTS}::test_what_the_node_stored_meanwhile_is_not_taken_for_what_was_read",),
    ),
    Mutant(
        "a-stalled-tier-is-asked-on",
        SHARED,
        "        return not self.breaker.is_open and self.tier.stalled_s() <= STALL_S\n",
        "        return not self.breaker.is_open\n",
        "every reader waits for an engine that answers nobody",
        (f"{TESTS}::test_an_engine_that_stalls_is_not_asked_on",),
    ),
    Mutant(
        "a-tier-that-fails-is-asked-on",
        SHARED,
        "        return not self.breaker.is_open and self.tier.stalled_s() <= STALL_S\n",
        "        return self.tier.stalled_s() <= STALL_S\n",
        "every lookup waits for a tier that is away",
        (f"{TESTS}::test_an_outage_is_gone_without_and_ends_by_itself",),
    ),
    Mutant(
        "readers-wait-as-long-as-a-tier-stalls",
        LOADS,
        "        if patience_s is None:\n",
        "        if True:\n",
        "a fetch takes its whole deadline when an engine stalls",
        (f"{TESTS}::test_nobody_waits_for_an_engine_that_stalls",),
    ),
    Mutant(
        "departures-shown-as-misses",
        "kvstore/catalog/spaces.py",
        "        reason = None if self.presence.is_partial else space.departures.get(digest)\n",
        "        reason = space.departures.get(digest)\n",
        "clients take for gone what a shared tier has",
        (f"{TESTS}::test_clients_see_that_what_is_not_here_may_be_elsewhere",),
    ),
    Mutant(
        "a-row-that-keeps-anothers-hints",
        "kvstore/catalog/table.py",
        "        self.shared[row] = 0\n",
        "",
        "a chunk is never written to a shared tier, for the row's last chunk was",
        (f"{TESTS}::test_a_row_that_is_used_again_has_no_hints",),
    ),
    Mutant(
        "nowhere-although-it-was-written",
        SHARED,
        "        self._beyond.written(row)\n",
        "        pass\n",
        "a chunk that was stored and left within seconds is a miss",
        (f"{TESTS}::test_what_was_nowhere_a_moment_ago_comes_back_once_it_was_stored",),
    ),
    Mutant(
        "a-hung-load-hides-what-memory-has",
        LOADS,
        "            loading = None if row in self._memory else self._loading.get(row)\n",
        "            loading = self._loading.get(row)\n",
        "a tier that stalls keeps readers from a chunk in memory",
        (f"{TESTS}::test_a_load_that_hangs_keeps_nobody_from_what_is_here_by_now",),
    ),
    Mutant(
        "a-hung-load-hides-what-other-tiers-have",
        LOADS,
        "                if source is None or (loading is not None and source.name == loading.source.name):\n",
        "                if source is None or loading is not None:\n",
        "a tier that stalls keeps readers from the next one",
        (f"{TESTS}::test_a_load_that_hangs_keeps_nobody_from_a_slower_tier",),
    ),
    Mutant(
        "shared-tiers-take-all-the-time-there-is",
        SHARED,
        "        await self._ask_all(unheard, self._clock.monotonic() + timeout_s / 2)\n",
        "        await self._ask_all(unheard, self._clock.monotonic() + timeout_s)\n",
        "a caller in a hurry goes before it is told what the node has",
        (f"{TESTS}::test_a_caller_in_a_hurry_is_told_what_the_node_has",),
    ),
]
