"""What is promised: holds, limits, parents, durability, and what comes back after a crash."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CHANGES = "kvstore/controller/operators/changes.py"
CLEARING = "kvstore/movement/clearing.py"
T_CHANGES = "tests/e2e/test_changes.py"
T_OPERATORS = "tests/controller/test_operators.py"
T_MEANWHILE = "tests/controller/test_changes.py"
CATALOG = "kvstore/catalog/catalog.py"
PUBLISH = "kvstore/controller/stores/publish.py"
CONTROLLER = "kvstore/controller/controller.py"
LEASES = "kvstore/controller/sessions/leases.py"
REPLACEMENT = "kvstore/controller/stores/replacement.py"
RESERVATIONS = "kvstore/controller/stores/reservations.py"
REMOVAL = "kvstore/movement/removal.py"
CHECKS = "kvstore/movement/checks.py"
WRITES = "kvstore/movement/writes.py"
SPACES = "kvstore/catalog/spaces.py"
TABLE = "kvstore/catalog/table.py"
T_REPLACING = "tests/controller/test_replacing.py"
T_NEWEST = "tests/tiers/nvme/test_newest.py"
T_CONTROLLER = "tests/controller/test_controller.py"
T_RECOVERED = "tests/tiers/nvme/test_recovered.py"
T_DIRECTORY = "tests/tiers/nvme/test_directory.py"
T_ERRORS = "tests/tiers/nvme/test_errors.py"

MUTANTS = [
    Mutant(
        "an-operator-takes-what-is-held",
        CLEARING,
        "        if table.is_held(row):\n            return Fate.HELD, False\n",
        "",
        "an operator's word gives up what a client copies under its copy",
        (f"{T_OPERATORS}::test_what_is_held_after_the_plan_was_made_stays_with_its_chain",),
    ),
    Mutant(
        "an-operator-leaves-orphans",
        CLEARING,
        "        if table.child_counts[row]:\n            return Fate.KEPT, False\n",
        "",
        "chunks stay that nothing can find",
        (f"{T_OPERATORS}::test_a_chunk_that_came_under_one_after_the_plan_keeps_it",),
    ),
    Mutant(
        "an-operator-removes-another-chunk",
        CLEARING,
        "        is_it = table.identity(row) == identity\n",
        "        is_it = True\n",
        "a row that was reused loses its chunk",
        (f"{T_OPERATORS}::test_a_row_that_is_another_chunks_by_now_is_left_alone",),
    ),
    Mutant(
        "a-word-about-one-tier-means-all",
        CLEARING,
        "        if fate is Fate.COPY_REMOVED or (fate is Fate.REMOVED and self._is_elsewhere(plan, row)):\n",
        "        if fate is Fate.COPY_REMOVED:\n",
        "what the device acknowledged goes because memory was to be emptied",
        (f"{T_MEANWHILE}::test_a_word_about_memory_takes_nothing_that_the_device_acknowledged_meanwhile",),
    ),
    Mutant(
        "children-go-though-their-parent-stays",
        CLEARING,
        "        if fate is Fate.WITH_PARENT and self._is_elsewhere(plan, int(plan.causes[place])):\n",
        "        if False:\n",
        "a chunk that nobody named goes with one that stays",
        (f"{T_MEANWHILE}::test_what_hangs_on_a_chunk_that_another_tier_has_by_now_stays",),
    ),
    Mutant(
        "what-was-picked-is-whatever-lies-there",
        CLEARING,
        "        found[rows[np.array(is_it, np.bool_) & (spaces[rows] == wanted.spaces[part])]] = True\n",
        "        found[rows] = True\n",
        "a chunk that came into a row while others were picked goes unnamed",
        (f"{T_MEANWHILE}::test_a_row_that_becomes_another_chunks_while_others_are_picked_is_not_meant",),
    ),
    Mutant(
        "evicted-until-the-next-crash",
        CLEARING,
        "        self._removal.remove(row, MissReason.EVICTED, erase=True)\n",
        "        pass\n",
        "what an operator evicted is there still",
        (f"{T_CHANGES}::test_a_model_is_evicted_whole_and_stays_gone",),
    ),
    Mutant(
        "given-up-before-it-is-there",
        CHANGES,
        "        if not dry_run and not relocation.is_there(step):\n",
        "        if False:\n",
        "a tier that takes nothing costs the node its only copies",
        (f"{T_CHANGES}::test_what_a_tier_does_not_take_is_given_up_nowhere",),
    ),
    Mutant(
        "a-drained-tier-takes-more",
        WRITES,
        "        return not self.is_draining and self.target.admits(row)\n",
        "        return self.target.admits(row)\n",
        "a disk that is to be taken out fills again",
        (f"{T_CHANGES}::test_a_drained_tier_is_emptied_and_takes_no_more_until_that_is_ended",),
    ),
    Mutant(
        "pins-without-a-limit",
        "kvstore/controller/pins.py",
        "        if self.byte_count + more_bytes > self._limits.pin_bytes_max:\n",
        "        if False:\n",
        "pins take all of memory from everybody else",
        (f"{T_CHANGES}::test_pins_past_the_limit_pin_nothing",),
    ),
    Mutant(
        "scripts-need-no-yes",
        "ops/kvstore_ops/operators/changing.py",
        "    if is_dangerous and not dry_run and not yes:\n",
        "    if False:\n",
        "a command that was tried out of curiosity empties the cache",
        (f"{T_CHANGES}::test_a_script_that_does_not_say_yes_changes_nothing",),
    ),
    Mutant(
        "leases-without-a-limit",
        LEASES,
        "        if held.byte_count + byte_count > self._limits.leased_bytes_max:\n",
        "        if False:\n",
        "one client's leases hold all of memory",
        (f"{T_CONTROLLER}::test_limits_name_their_setting",),
    ),
    Mutant(
        "old-leases-are-never-revoked",
        LEASES,
        "        return bool(stale)\n",
        "        return False\n",
        "a client that hangs keeps others from storing",
        (f"{T_CONTROLLER}::test_old_leases_are_revoked_under_pressure_and_counted",),
    ),
    Mutant(
        "session-ends-and-its-leases-stay",
        CONTROLLER,
        "        self.parts.leases.release(session, self.parts.leases.of(session))\n",
        "",
        "clients that come and go fill memory with what nobody reads",
        (f"{T_CONTROLLER}::test_what_a_session_had_ends_with_it",),
    ),
    Mutant(
        "reservation-without-an-end",
        RESERVATIONS,
        "            if reservation.born_s <= born_before and not reservation.busy and not reservation.has_ended:\n",
        "            if False:\n",
        "a writer that hangs keeps its chunks from everybody",
        (f"{T_CONTROLLER}::test_old_reservations_expire",),
    ),
    Mutant(
        "request-without-a-limit",
        CONTROLLER,
        "        if token_count > self.token_count_max:\n",
        "        if False:\n",
        "one message holds up everybody's",
        (
            f"{T_CONTROLLER}::test_limits_name_their_setting",
            "tests/security/test_fuzz.py::test_a_chain_past_the_limit_names_the_setting",
        ),
    ),
    Mutant(
        "draining-takes-new-stores",
        CONTROLLER,
        '                raise Unavailable("the service is stopping")\n            self._check(request.query)\n',
        "                pass\n            self._check(request.query)\n",
        "a store is taken that the stop then drops",
        (f"{T_CONTROLLER}::test_draining_takes_no_new_stores_and_finishes_the_old",),
    ),
    Mutant(
        "chunk-without-its-parent",
        PUBLISH,
        "        if not filling.filled.all() or (entry.parent != ROOT_DIGEST and entry.parent not in space.index):\n",
        "        if not filling.filled.all():\n",
        "chunks are kept that no walk can reach",
        (
            f"{T_CONTROLLER}::test_when_the_first_writer_aborts_the_second_keeps_nothing_unreachable",
            "tests/controller/test_at_once.py::test_what_failed_is_never_visible_and_nothing_behind_it",
        ),
    ),
    Mutant(
        "all-that-waited-published-in-one-turn",
        PUBLISH,
        "[reservation.published : reservation.published + TURN_COUNT]",
        "[reservation.published :]",
        "the last chunk of one store to land holds up everybody's calls",
        ("tests/controller/test_at_once.py::test_others_have_their_turn_while_many_chunks_are_published",),
    ),
    Mutant(
        "shards-published-one-by-one",
        "kvstore/controller/stores/fill.py",
        "        if at_once and reservation.shard_count > 1:\n",
        "        if False:\n",
        "a store is visible though one of its writers gave up",
        ("tests/controller/test_at_once.py::test_a_store_of_several_shards_is_published_by_its_commits",),
    ),
    Mutant(
        "cache-without-its-hidden-states",
        CATALOG,
        "                hits = len(rows)\n            chains.append(rows)\n",
        "                hits = hits if chains else len(rows)\n            chains.append(rows)\n",
        "a chunk counts as there whose hidden states are not",
        ("tests/catalog/test_catalog.py::test_a_chunk_hits_where_every_part_of_it_is",),
    ),
    Mutant(
        "weights-of-two-geometries",
        "kvstore/catalog/models.py",
        "    if replace(known, **free) == spec:\n",
        "    if True:\n",
        "one of two models with the same name of weights is wrong, and nobody says so",
        ("tests/server/test_rpc.py::test_a_conflicting_spec_is_refused_by_name",),
    ),
    Mutant(
        "store-of-another-model-joined",
        RESERVATIONS,
        "        if fingerprint != reservation.fingerprint:\n",
        "        if False:\n",
        "a rank of another model fills a part of the chunks",
        ("tests/e2e/writers/test_ranks.py::test_ranks_that_disagree_are_told",),
    ),
    Mutant(
        "prefix-chunks-replaced",
        REPLACEMENT,
        "        if space.kind is not CacheKind.OPAQUE:\n            raise",
        "        if False:\n            raise",
        "a digest that has one meaning for ever is given another",
        ("tests/e2e/test_bytes.py::test_routers_and_attention_caches_do_not_meet_opaque_values",),
    ),
    Mutant(
        "two-values-of-one-key",
        REPLACEMENT,
        "        self._replacing |= names  #",
        "        #",
        "of two puts both stay, and the older one is read once the other was evicted",
        (f"{T_REPLACING}::test_of_two_values_that_wait_for_room_under_the_names_of_one_key_one_is_taken",),
    ),
    Mutant(
        "replaced-value-is-not-erased",
        REMOVAL,
        "erase=erase or self._catalog.space_of(row).may_be_replaced)\n",
        "erase=erase)\n",
        "after a crash an old value comes back where a newer one was acknowledged",
        (
            "tests/e2e/test_bytes.py::test_an_old_value_that_the_device_evicted_does_not_come_back_after_a_crash",
            "tests/e2e/test_bytes.py::test_values_outlive_the_sidecar_and_what_was_overwritten_does_not",
        ),
    ),
    Mutant(
        "any-write-of-a-chunk",
        "kvstore/movement/names.py",
        "space.layout(table.token_counts[row]), table.write_marks[row]\n",
        "space.layout(table.token_counts[row]), None\n",
        "an older write that lies in the slot is taken for the one that was acknowledged",
        ("tests/tiers/nvme/test_strangers.py::test_an_earlier_write_of_the_chunk_in_the_slot_is_not_the_chunk",),
    ),
    Mutant(
        "recovered-and-believed",
        "kvstore/movement/recovery.py",
        "        copies.put(row, residency, is_proven=is_proven)\n",
        "        copies.put(row, residency)\n",
        "LOCAL is promised on copies that a crash may have torn",
        (f"{T_RECOVERED}::test_a_torn_chunk_is_stored_again_and_not_promised_before",),
    ),
    Mutant(
        "doubt-ends-with-a-clean-stop",
        "kvstore/movement/recovery.py",
        "table.write_marks[row], copies.is_proven(row)) for row in copies.order()]\n",
        "table.write_marks[row], True) for row in copies.order()]\n",
        "a copy that nobody proved is believed after the next clean stop",
        (f"{T_RECOVERED}::test_doubt_outlives_a_clean_stop",),
    ),
    Mutant(
        "proven-without-being-renewed",
        CHECKS,
        "            is_renewed = await copies.tier.renew(residency)\n",
        "            is_renewed = True\n",
        "a copy whose sync had failed is promised, and goes with the next crash",
        (f"{T_RECOVERED}::test_what_a_failed_sync_left_is_synced_before_it_is_promised",),
    ),
    Mutant(
        "late-proof-not-waited-for",
        "kvstore/movement/levels.py",
        "        is_proven = await self._proofs_end(writes.target.name, chunks, timeout_s)\n",
        "        is_proven = True\n",
        "a store that waits for LOCAL hears MEMORY while a busy device still proves what a crash left",
        (f"{T_RECOVERED}::test_a_store_that_waits_hears_of_a_proof_that_a_slow_device_gives_late",),
    ),
    Mutant(
        "slot-given-up-twice",
        REMOVAL,
        "        if copies.residency(row) != residency:\n            return False",
        "        if False:\n            return False",
        "two readers of a bad copy free its slot twice, and two chunks get it",
        (f"{T_DIRECTORY}::test_two_readers_meet_the_same_bad_copy",),
    ),
    Mutant(
        "promised-while-it-is-in-memory",
        WRITES,
        "            if not self.target.is_proven(row):\n",
        "            if False:\n",
        "LOCAL is promised on what the device does not have",
        (f"{T_ERRORS}::test_a_device_of_which_every_sync_fails",),
    ),
    Mutant(
        "rot-of-another-chunk",
        CHECKS,
        " and self._table.identity(row) == identity:\n",
        ":\n",
        "a chunk is written everywhere because the one before it in its row was rotten",
        ("tests/controller/test_scrub.py::test_what_a_check_finds_is_no_news_of_the_chunk_that_has_the_row_by_then",),
    ),
    Mutant(
        "rot-in-memory-found-and-kept",
        CHECKS,
        "            if await self._removal.quarantine(copies, row, residency) and failures:\n",
        "            if failures:\n",
        "the scrub finds rotten bytes and leaves them to be fetched",
        ("tests/controller/test_scrub.py::test_rot_in_memory_is_found_and_goes",),
    ),
    Mutant(
        "older-value-after-a-newer-one",
        REPLACEMENT,
        "        await self._parts.movement.supersede(writes, deadline.left_s)\n",
        "        pass\n",
        "a write whose sync failed comes back where a newer one was acknowledged",
        (f"{T_NEWEST}::test_an_older_value_never_comes_back",),
    ),
    Mutant(
        "namespaces-without-a-limit",
        SPACES,
        "        if self.count >= self._count_max:\n            raise Exhausted(\n",
        "        if False:\n            raise Exhausted(\n",
        "one client's namespaces take every number that rows have",
        ("tests/controller/test_namespaces.py::test_past_the_limit_a_store_is_refused_by_name_and_the_others_go_on",),
    ),
    Mutant(
        "looking-makes-a-namespace",
        SPACES,
        "        return found or self._empty(layer, provenance, exactness)\n",
        "        return found or self._ours(self.spaces.make(self._name(layer), provenance, exactness), layer)\n",
        "lookups of anything take every number that rows have",
        ("tests/controller/test_namespaces.py::test_only_a_store_makes_a_namespace",),
    ),
    Mutant(
        "columns-that-shift",
        TABLE,
        "            if len(column) > row:\n                del column[row:]\n",
        "",
        "after one growth that failed every later chunk has another's place and parent",
        ("tests/catalog/test_catalog.py::test_columns_never_shift_against_each_other",),
    ),
    Mutant(
        "promised-for-the-chunk-before",
        "kvstore/catalog/catalog.py",
        "        return self.table.identity(row) == identity and self.is_visible(row)\n",
        "        return self.is_visible(row)\n",
        "LOCAL is said of a chunk that went, because its row has another by now",
        (
            "tests/tiers/nvme/test_meanwhile.py::test_a_row_that_became_another_chunks_promises_nothing_for_the_one_before",
        ),
    ),
    Mutant(
        "promoted-over-a-newer-one",
        "kvstore/movement/loads.py",
        "        if row in self._memory:\n            return\n        if not loading.source.is_current(header) or",
        "        if",
        "a read that ends late puts an older value in a newer one's place",
        ("tests/tiers/nvme/test_meanwhile.py::test_a_value_that_was_being_read_does_not_come_in_over_a_newer_one",),
    ),
]
