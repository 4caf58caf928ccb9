"""What clients and routers are told of what is there: tables, lengths of partial chunks, events, which write is newest,
and which memory holds what is not exact."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

TAILS = "kvstore/catalog/tails.py"
PRESENCE = "kvstore/presence.py"
LOOKING = "clients/kvstore_client/lookup/presence.py"
LOOKUPS = "clients/kvstore_client/lookup/calls.py"
NEWEST = "kvstore/tiers/nvme/newest.py"
PUBLISHING = "kvstore/server/publishing.py"
DERIVED = "clients/kvstore_client/derived.py"
GATE = "clients/kvstore_client/gate/gate.py"
PERMIT = "kvstore/planning/permit.py"
PROFILE = "kvstore/planning/profile.py"
PROFILES = "clients/kvstore_client/gate/profiles.py"
RECEIVING = "kvstore/remote/receiving.py"
T_CATALOG = "tests/catalog/test_catalog.py"
T_LOOKUP = "tests/presence/test_lookup.py"
T_PLACED = "tests/e2e/test_placed.py"
T_NEWEST = "tests/tiers/nvme/test_newest.py"
T_PUBLISHING = "tests/server/test_publishing.py"
T_EXACTNESS = "tests/e2e/test_exactness.py"
T_GATE = "tests/recompute/test_gate.py"
T_PROFILE = "tests/recompute/test_profile.py"

REGISTERED = "kvstore/controller/profiles.py"
EXCHANGE = "clients/kvstore_client/gate/exchange.py"
SERVICE = "kvstore/server/prefills.py"
T_REGISTERED = "tests/e2e/test_registered_profiles.py"

MUTANTS = [
    Mutant(
        "slow-routers-take-all-memory",
        PUBLISHING,
        "        if len(payload) > self._message_bytes and len(blocks) > 1:\n",
        "        if False:\n",
        "a router that reads slowly has hundreds of MB queued",
        (f"{T_PUBLISHING}::test_what_is_queued_for_a_router_that_does_not_read_is_bounded_in_bytes",),
    ),
    Mutant(
        "numbers-begin-anew-with-each-start",
        PUBLISHING,
        "        self._sequence = int(clock.wall() * 1e6)",
        "        self._sequence = 0",
        "a router takes the batches of a new start for old ones, and asks a node for what it lost",
        (
            "tests/server/test_published_anew.py::test_a_router_that_listened_before_a_restart_sees_a_gap_and_begins_anew",
        ),
    ),
    Mutant(
        "an-old-profile-replaces-the-newer",
        REGISTERED,
        "        if known is not None and known.measured_at_s > profile.measured_at_s:\n            return False\n",
        "",
        "two hosts take turns in registering theirs, and settings change with every session",
        (f"{T_REGISTERED}::test_the_newer_one_stays",),
    ),
    Mutant(
        "a-profile-of-the-future",
        REGISTERED,
        "        if profile.measured_at_s > self._clock.wall() + AHEAD_S_MAX:\n",
        "        if False:\n",
        "no profile that is measured later replaces one whose host had a wrong clock",
        (f"{T_REGISTERED}::test_what_is_no_profile_is_refused_by_name",),
    ),
    Mutant(
        "profiles-without-a-bound",
        REGISTERED,
        "            del self._kept[next(iter(self._kept))]\n",
        "            break\n",
        "a client fills the service's memory with profiles of models that nobody has",
        (f"{T_REGISTERED}::test_they_are_bounded_and_the_one_that_nobody_asks_for_goes",),
    ),
    Mutant(
        "a-profile-that-grows",
        REGISTERED,
        "        if len(text) > PROFILE_SENT_BYTES_MAX:\n",
        "        if False:\n",
        "a profile is kept that no reply can carry",
        (f"{T_REGISTERED}::test_a_profile_that_grows_when_it_is_written_out_is_refused",),
    ),
    Mutant(
        "a-service-that-stands-still-is-asked-for-each-pair",
        EXCHANGE,
        " or now - self._unanswered_s < SILENT_S:\n",
        ":\n",
        "a sidecar that stands still costs a second for each pair of models that a prompt may reuse",
        (f"{T_REGISTERED}::test_a_sidecar_that_stands_still_is_waited_for_once_however_many_pairs_a_prompt_has",),
    ),
    Mutant(
        "the-services-profile-is-of-anything",
        EXCHANGE,
        "        if Pair.of_profile(profile) != pair:\n",
        "        if False:\n",
        "a profile of other weights allows what theirs cannot do",
        (f"{T_REGISTERED}::test_a_service_that_lies_is_not_believed",),
    ),
    Mutant(
        "a-profile-without-a-session",
        SERVICE,
        "        session_of(self._controller, context)\n        return prefill_pb2.RegisterProfileResponse",
        "        return prefill_pb2.RegisterProfileResponse",
        "whoever reaches the door decides how a tenant's documents are mended",
        (f"{T_REGISTERED}::test_without_a_session_nobody_asks_or_registers",),
    ),
    Mutant(
        "length-of-a-tail-that-went",
        TAILS,
        "            self.bits &= ~(1 << token_count)\n",
        "            pass\n",
        "clients look for ever for partial chunks that went",
        (f"{T_CATALOG}::test_a_parent_keeps_any_number_of_tails",),
    ),
    Mutant(
        "lengths-of-the-named-are-forgotten",
        TAILS,
        "            for each in named:\n                lengths.add(token_counts[each])\n",
        "",
        "a partial chunk that is stored is said not to be there",
        (f"{T_CATALOG}::test_the_eldest_tail_is_known_by_its_length_when_the_named_are_gone",),
    ),
    Mutant(
        "parent-forgotten-before-its-last-tail",
        TAILS,
        "        if named or parent in self._lengths:\n",
        "        if named:\n",
        "a parent's partial chunks are found no more while some are there",
        (f"{T_CATALOG}::test_the_eldest_tail_is_known_by_its_length_when_the_named_are_gone",),
    ),
    Mutant(
        "every-tail-is-kept",
        TAILS,
        "        if len(named) == NAMED_MAX:\n            del named[0]\n",
        "",
        "the root of short prompts holds a row of each, and a lookup walks them all",
        (f"{T_CATALOG}::test_what_tells_tails_does_not_grow_with_them",),
    ),
    Mutant(
        "lengths-under-one-tag",
        PRESENCE,
        "    return tag_of(salt ^ (group + 1) * _SPREAD & _ALL_BITS, parent)\n",
        "    return tag_of(salt, parent)\n",
        "lengths are read as what is known of the parent, and the other way round",
        (f"{T_LOOKUP}::test_ragged_tails_are_found",),
    ),
    Mutant(
        "lengths-of-larger-chunks",
        LOOKING,
        "        if words is None or chain.chunk_tokens > self._tail_tokens_max:\n",
        "        if words is None:\n",
        "an earlier release's table is asked for lengths that it does not have",
        (f"{T_LOOKUP}::test_ragged_tails_are_found",),
    ),
    Mutant(
        "held-without-a-ticket",
        LOOKUPS,
        "    if hits and readers and not ticket:\n",
        "    if False:\n",
        "who asks to hold what is there is given nothing that holds it",
        (f"{T_PLACED}::test_whole_chunks_are_held_without_the_partial_one",),
    ),
    Mutant(
        "what-is-behind-the-hits-is-not-counted",
        LOOKUPS,
        "lookup_hit_chunks=hits, lookup_miss_chunks=chunks - hits)",
        "lookup_hit_chunks=hits)",
        "the rate of hits is told too high",
        (f"{T_PLACED}::test_what_is_not_stored_behind_a_held_partial_chunk_is_counted",),
    ),
    Mutant(
        "peeked-without-a-ticket",
        LOOKUPS,
        "    if tail is None or (hold and prefix + tail[0]):\n",
        "    if tail is None or (hold and tail[0]):\n",
        "who asks to hold what is there is given nothing that holds it, where a partial chunk follows",
        (f"{T_PLACED}::test_who_peeks_to_hold_is_told_to_call",),
    ),
    Mutant(
        "free-without-being-erased",
        "kvstore/tiers/nvme/erasures.py",
        "            if slot in erased:\n",
        "            if True:\n",
        "what the device refused to erase among many lies in a free slot, and comes back",
        ("tests/tiers/nvme/test_many_erasures.py::test_one_place_that_cannot_be_erased_keeps_no_other_out_of_use",),
    ),
    Mutant(
        "newest-before-the-format-says-so",
        NEWEST,
        "            self._directory.require(NEWEST)  # first: there is no moment at which an earlier release could be"
        " misled\n",
        "",
        "an earlier release opens the directory and serves the older value",
        (f"{T_NEWEST}::test_a_release_that_does_not_know_which_is_the_newest_does_not_open_the_directory",),
    ),
    Mutant(
        "feature-that-stays",
        NEWEST,
        "            self._directory.remove(NEWEST_FILE)\n            self._directory.features.discard(NEWEST)\n",
        "            self._directory.remove(NEWEST_FILE)\n",
        "an earlier release can never open the directory again",
        (f"{T_NEWEST}::test_a_release_that_does_not_know_which_is_the_newest_does_not_open_the_directory[clean stop]",),
    ),
    Mutant(
        "derived-told-as-exact",
        PUBLISHING,
        "    is_prefix = space.exactness is Exactness.EXACT and space.provenance is Provenance.IN_CONTEXT\n",
        "    is_prefix = space.provenance is Provenance.IN_CONTEXT\n",
        "routers send prompts to caches that can be had as derived only",
        (f"{T_PUBLISHING}::test_what_is_no_prefix_of_a_prompt_is_no_block_of_a_router",),
    ),
    Mutant(
        "router-that-says-megabytes",
        PUBLISHING,
        "            socket.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)\n",
        "            pass\n",
        "whoever reaches the replay endpoint fills the server's memory",
        (f"{T_PUBLISHING}::test_who_says_too_much_to_the_publisher_is_disconnected",),
    ),
    Mutant(
        "replay-without-a-pause",
        PUBLISHING,
        '                await self._replay.send_multipart((frames[0], b"", self._topic, number, payload))\n'
        "                await pauses.between()\n",
        '                await self._replay.send_multipart((frames[0], b"", self._topic, number, payload))\n',
        "one router's replays hold up every client",
        (f"{T_PUBLISHING}::test_a_replay_holds_up_nobody",),
    ),
    Mutant(
        "events-that-were-lost-are-not-told",
        PUBLISHING,
        "                if news.lost_count:\n",
        "                if False:\n",
        "routers believe in blocks that went",
        (f"{T_PUBLISHING}::test_a_publisher_that_was_too_slow_begins_a_new_account",),
    ),
    Mutant(
        "exact-over-what-was-merged-since",
        DERIVED,
        "each for each in _known() if since is None or each[0] <= since)",
        "each for each in _known())",
        "a fetch that ends late makes a merged cache exact",
        (f"{T_EXACTNESS}::test_what_is_marked_while_something_exact_comes_stays_marked",),
    ),
    Mutant(
        "marked-by-a-view-that-goes",
        DERIVED,
        "        if owner is not None and mark.owner != owner:\n            continue\n",
        "",
        "a derived cache is stored as exact, because a view of it is gone",
        (f"{T_EXACTNESS}::test_marks_of_memory_that_is_filled_again_do_not_add_up",),
    ),
    Mutant(
        "exact-in-part-and-whole",
        DERIVED,
        "            return None if all(a <= b for a, b in zip(ours.shape, theirs.shape, strict=True)) else self\n",
        "            return None\n",
        "some exact tokens in front make a derived cache exact",
        (f"{T_EXACTNESS}::test_the_callers_own_tensors_are_known_until_something_exact_is_there",),
    ),
    Mutant(
        "pages-seen-in-another-way",
        DERIVED,
        "        if self.slots is None or slots is None or not alike:\n            return True\n",
        "        if self.slots is None or slots is None or not alike:\n            return False\n",
        "derived pages are stored as exact through another view of them",
        (f"{T_EXACTNESS}::test_pages_are_known_by_their_slots",),
    ),
    Mutant(
        "memory-that-was-freed-is-derived",
        DERIVED,
        "        return int(owned._cdata), lambda: not storage.expired()\n",
        "        return int(owned._cdata), lambda: True\n",
        "a cache is refused for what lay in its memory before",
        (f"{T_EXACTNESS}::test_memory_that_is_used_again_is_nobodys",),
    ),
    Mutant(
        "profile-of-another-reuse",
        PERMIT,
        "        if (profile.reuse, profile.provenance) != (pair.reuse, pair.provenance):\n",
        "        if False:\n",
        "what was measured of one kind of reuse lets another through",
        (f"{T_GATE}::test_a_profile_of_another_reuse_under_this_name_is_refused",),
    ),
    Mutant(
        "check-of-another-profile",
        GATE,
        "            if state is None or watched is None or state.digest != permit.profile:\n",
        "            if state is None or watched is None:\n",
        "a new profile is switched off for what was answered by the old one",
        (f"{T_GATE}::test_wrong_answers_of_an_old_profile_say_nothing_of_a_new_one",),
    ),
    Mutant(
        "refused-for-ever",
        GATE,
        "_State(() if isinstance(error, Unavailable) else stamp, ",
        "_State(stamp, ",
        "a process that had no descriptor for a moment refuses a good profile until it ends",
        (f"{T_GATE}::test_a_profile_that_cannot_be_read_for_a_moment_is_read_again",),
    ),
    Mutant(
        "note-that-cannot-be-read",
        PROFILES,
        '            return f"{note} cannot be read: {AGAIN}"\n',
        '            return ""\n',
        "what was switched off goes on in processes that cannot read why",
        (f"{T_GATE}::test_a_note_that_cannot_be_kept_or_read_still_counts",),
    ),
    Mutant(
        "profile-by-another-rule",
        PROFILE,
        '        if found.get("rule") != RULE:\n',
        "        if False:\n",
        "a floor is held against figures that mean something else",
        (f"{T_PROFILE}::test_what_is_no_profile_is_refused_by_name",),
    ),
    Mutant(
        "points-in-any-order",
        PROFILE,
        "    if any(a.share >= b.share or a.assured >= b.assured for a, b in pairwise(points)):\n",
        "    if False:\n",
        "a setting is taken that costs more and keeps less",
        (f"{T_PROFILE}::test_what_is_no_profile_is_refused_by_name",),
    ),
    Mutant(
        "run-shorter-than-its-strips",
        RECEIVING,
        "        if not run.strip_count or run.byte_count < least:\n",
        "        if False:\n",
        "strips are filled from what lies behind a message's bytes",
        ("tests/server/test_receiving.py::test_runs_that_are_not_a_messages_bytes_are_refused",),
    ),
    Mutant(
        "all-is-there-where-a-partial-chunk-ends-it",
        "clients/kvstore_client/fetch/open.py",
        "    prefix.reason = prefix.reason or reason or MissReason.COLD\n",
        "",
        "a caller believes that the sidecar has all of a prompt of which it has a part",
        (
            "tests/e2e/test_tails.py"
            "::test_a_prefix_that_ends_with_a_partial_chunk_says_why_the_rest_is_missing[local-0-and hidden states]",
            "tests/e2e/test_tails.py::test_a_prefix_that_ends_with_a_partial_chunk_says_why_the_rest_is_missing[local-16-kv]",
        ),
    ),
    Mutant(
        "a-log-level-for-one-process-of-two",
        "kvstore/server/reloading.py",
        "        self._heeding.append(set_level)\n",
        "",
        "an operator who asked for more of the log hears nothing of clients over TCP",
        ("tests/server/test_reloading.py::test_the_remote_planes_process_logs_at_the_new_level_too",),
    ),
    Mutant(
        "the-old-log-level-at-the-next-start",
        "kvstore/server/remote.py",
        '        self._orders["log_level"] = level\n',
        "",
        "the remote plane's process is silent again after it died once",
        ("tests/server/test_reloading.py::test_the_remote_planes_process_logs_at_the_new_level_too",),
    ),
]
