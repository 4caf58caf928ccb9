"""Doors: how much a message or a packet may carry, and how much of what all share one peer or one tenant may take."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

BOUNDS = "kvstore/wire/bounds.py"
LIMITS = "kvstore/wire/limits.py"
PACKETS = "kvstore/handoff/packets.py"
OUTBOX = "kvstore/server/outbox.py"
HANDOFF = "kvstore/server/handoff.py"
TENANT = "kvstore/server/tenant.py"
TIERS = "kvstore/server/tiers.py"
SESSIONS = "kvstore/controller/sessions/registry.py"
T_LIMITS = "tests/wire/test_limits.py"
T_PACKETS = "tests/handoff/test_packets.py"
T_OUTBOX = "tests/server/test_outbox.py"
T_HANDOFF = "tests/server/test_handoff.py"
T_DESCRIPTORS = "tests/server/test_descriptors.py"
T_TIERS = "tests/server/test_tiers.py"
T_SHARES = "tests/security/test_shares.py"

MUTANTS = [
    Mutant(
        "text-of-any-length",
        BOUNDS,
        "            if found > size:\n",
        "            if False:\n",
        "a name of megabytes is hashed, kept and logged",
        (f"{T_LIMITS}::test_one_more_than_the_limit_is_refused_by_name[RegisterModelRequest.spec.model_id]",),
    ),
    Mutant(
        "item-of-any-length",
        BOUNDS,
        "            if size and (longest := max(map(len, value))) > size:\n",
        "            if False:\n",
        "a list of few names is as large as its longest one",
        (f"{T_LIMITS}::test_one_long_item_of_a_list_is_refused_by_name",),
    ),
    Mutant(
        "lists-inside-lists",
        BOUNDS,
        "                for each in entries:\n                    _check(each, inner, byte_count)\n",
        "                pass\n",
        "what is inside of an item has no limit",
        (f"{T_LIMITS}::test_one_more_than_the_limit_is_refused_by_name[RegisterModelRequest.spec.rope.factors.name]",),
    ),
    Mutant(
        "lists-inside-messages",
        BOUNDS,
        "            _check(getattr(message, name), inner, byte_count)\n",
        "            pass\n",
        "what is inside of a field has no limit",
        (f"{T_LIMITS}::test_one_more_than_the_limit_is_refused_by_name[FetchRequest.query.digests]",),
    ),
    Mutant(
        "request-that-the-table-forgot",
        LIMITS,
        '    "kvstore.v1.SharedStore": 6 * MIB,\n',
        "",
        "what one process hands to another is read without a limit",
        (f"{T_LIMITS}::test_every_request_has_a_limit_of_its_own",),
    ),
    Mutant(
        "operation-that-is-none",
        PACKETS,
        "    if not isinstance(operation, str) or operation not in kinds:\n",
        "    if not isinstance(operation, str):\n",
        "a packet that says nothing known is a bug somewhere else",
        (f"{T_PACKETS}::test_an_operation_that_is_not_declared_is_refused",),
    ),
    Mutant(
        "packet-that-is-no-object",
        PACKETS,
        "    if not isinstance(said, dict):\n",
        "    if False:\n",
        "a packet that is a list is an error of ours",
        (f"{T_PACKETS}::test_a_packet_that_is_no_object_is_refused",),
    ),
    Mutant(
        "packet-that-hurts-its-parser",
        PACKETS,
        "    except (ValueError, RecursionError) as error:\n",
        "    except ValueError as error:\n",
        "a packet of brackets is an error of ours",
        (f"{T_PACKETS}::test_a_packet_that_is_no_object_is_refused",),
    ),
    Mutant(
        "answer-without-what-it-says",
        PACKETS,
        "        if value != place.default:\n",
        "        if value:\n",
        "a region of number 0, or a list of none, is not said",
        (f"{T_PACKETS}::test_an_answer_is_the_bytes_it_always_was",),
    ),
    Mutant(
        "answer-of-any-length",
        PACKETS,
        "        assert place.shape.allows(value), place.name\n",
        "",
        "the kernel cuts an answer off, with the descriptors in it",
        (f"{T_PACKETS}::test_a_long_answer_is_never_sent",),
    ),
    Mutant(
        "refusal-that-quotes-all",
        "kvstore/handoff/messages.py",
        "cls(error.status, error.message[:MESSAGE_CHARACTERS_MAX])",
        "cls(error.status, error.message)",
        "a long refusal is an error of ours, and its peer is cut off without a word",
        (f"{T_PACKETS}::test_a_refusal_is_cut_to_what_a_packet_may_say_and_is_the_error_again",),
    ),
    Mutant(
        "secret-of-any-kind",
        "kvstore/handoff/messages.py",
        "len(value) == digit_count and set(value)",
        "set(value)",
        "an answer that is none is taken for a session",
        (f"{T_PACKETS}::test_an_answer_that_no_server_gives_is_none",),
    ),
    Mutant(
        "files-that-come-with-nonsense",
        "kvstore/handoff/passing.py",
        "        _close(descriptors)\n        raise\n",
        "        raise\n",
        "each packet of another release leaves open files behind in the engine",
        ("tests/handoff/test_passing.py::test_files_that_come_with_nonsense_are_closed",),
    ),
    Mutant(
        "files-that-did-not-come",
        "kvstore/handoff/passing.py",
        "    if len(descriptors) != answer.descriptor_count:\n",
        "    if False:\n",
        "an engine that has no file more fails with an error of ours",
        ("tests/handoff/test_passing.py::test_a_client_without_a_file_more_says_so_and_keeps_no_staging",),
    ),
    Mutant(
        "more-for-who-has-some-unread",
        OUTBOX,
        "        if connection in self._sent and wanted:\n",
        "        if False:\n",
        "who does not read has another descriptor of all that the kernel lets travel, again and again",
        (f"{T_OUTBOX}::test_past_the_share_each_has_one_and_who_has_some_unread_none",),
    ),
    Mutant(
        "all-that-is-wanted",
        OUTBOX,
        "        return min(wanted, 1)\n",
        "        return wanted\n",
        "new sessions take more descriptors than the kernel lets travel",
        (f"{T_OUTBOX}::test_past_the_share_each_has_one_and_who_has_some_unread_none",),
    ),
    Mutant(
        "descriptors-that-were-read",
        OUTBOX,
        "        for each in [each for each in self._sent if not is_unread(each)]:\n            del self._sent[each]\n",
        "",
        "sessions are refused for what was read long ago",
        (f"{T_OUTBOX}::test_what_was_read_counts_no_more",),
    ),
    Mutant(
        "answers-that-were-read",
        OUTBOX,
        "        if sent is None or not is_unread(connection):\n",
        "        if sent is None:\n",
        "a client that reads every answer is let go after a few",
        (f"{T_OUTBOX}::test_who_reads_is_answered_for_ever",),
    ),
    Mutant(
        "gone-with-answers-unread",
        HANDOFF,
        "        while self._outbox.is_in_flight(connection):\n",
        "        while False:\n",
        "peers that come and go leave more descriptors on their way than the kernel lets travel",
        (f"{T_DESCRIPTORS}::test_a_peer_that_went_with_answers_unread_is_counted_until_they_are_gone",),
    ),
    Mutant(
        "connections-without-a-limit",
        HANDOFF,
        "            if self._connection_count >= self._connection_count_max:\n",
        "            if False:\n",
        "connections that say nothing take all open files",
        (f"{T_HANDOFF}::test_connections_past_the_limit_are_refused_until_one_goes",),
    ),
    Mutant(
        "file-of-a-larger-device",
        TIERS,
        "    files = max(2 * -(-nvme.capacity_bytes // nvme.region_bytes), there) + REGION_FILES_BESIDES\n",
        "    files = 2 * -(-nvme.capacity_bytes // nvme.region_bytes) + REGION_FILES_BESIDES\n",
        "a server starts that cannot open the files it has",
        (f"{T_DESCRIPTORS}::test_files_of_a_device_that_was_larger_are_counted",),
    ),
    Mutant(
        "needs-of-nvme-alone",
        TIERS,
        "for each in (*hbm, *self.local, *self.shared) for need",
        "for each in self.local[:1] for need",
        "a server starts that cannot open what its tiers open",
        (f"{T_DESCRIPTORS}::test_what_any_tier_needs_is_counted",),
    ),
    Mutant(
        "anothers-tier-is-left-out",
        TENANT,
        "except NotOurs:\n",
        "except ZeroDivisionError:\n",
        "a server starts without what another release or tenant wrote, and nobody asks why it is empty",
        (f"{T_TIERS}::test_what_another_tenant_wrote_ends_the_start",),
    ),
    Mutant(
        "first-problem-only",
        "kvstore/controller/controller.py",
        '"; ".join(parts.problems)',
        'next(iter(parts.problems), "")',
        "of two tiers that are off operators hear of one",
        (f"{T_TIERS}::test_any_number_of_tiers_is_taken_into_use_in_their_order",),
    ),
    Mutant(
        "descriptors-on-their-way-to-one-tenant",
        TENANT,
        "        share = int(self._world.descriptor_limit * IN_FLIGHT_SHARE) // len(self.settings.tenant_names)\n",
        "        share = int(self._world.descriptor_limit * IN_FLIGHT_SHARE)\n",
        "one tenant's unread answers keep the others from getting memory",
        (f"{T_SHARES}::test_answers_that_one_tenant_does_not_read_leave_the_others_theirs",),
    ),
    Mutant(
        "connections-of-one-tenant",
        TENANT,
        '        ("grpc.max_allowed_incoming_connections", limits.connection_count_max),\n',
        "",
        "one tenant's connections take all open files",
        (f"{T_SHARES}::test_idle_connections_of_one_tenant_lock_nobody_out[kvstore.sock]",),
    ),
    Mutant(
        "connections-that-nobody-uses",
        TENANT,
        '        ("grpc.max_connection_idle_ms", int(limits.connection_idle_s_max * 1000)),\n',
        "",
        "connections that nobody uses take the places of those that somebody would",
        (f"{T_SHARES}::test_a_connection_that_nobody_uses_is_let_go_and_its_client_comes_back",),
    ),
    Mutant(
        "calls-of-one-tenant",
        "kvstore/remote/boundary.py",
        "        if self._calls[node.tenant, lasts] >= self._call_count_max:\n",
        "        if False:\n",
        "one tenant's calls over the network keep the others waiting",
        (f"{T_SHARES}::test_calls_of_one_tenant_over_tcp_leave_the_others_theirs",),
    ),
    Mutant(
        "sessions-without-a-limit",
        SESSIONS,
        "        if len(self._by_secret) >= self._limits.session_count_max:\n",
        "        if False:\n",
        "one tenant's sessions take all open files",
        (f"{T_SHARES}::test_sessions_of_one_tenant_leave_the_others_theirs",),
    ),
    Mutant(
        "staging-in-any-number-of-pieces",
        SESSIONS,
        "        if len(session.stagings) >= limits.staging_count_max:\n",
        "        if False:\n",
        "one session's pieces of staging take all open files",
        (f"{T_SHARES}::test_many_small_pieces_of_staging_are_counted",),
    ),
    Mutant(
        "staging-of-all-sessions-in-any-number-of-pieces",
        SESSIONS,
        "        if self.staging_count >= limits.staging_count_total_max:\n",
        "        if False:\n",
        "one tenant's pieces of staging take all open files",
        (f"{T_SHARES}::test_many_small_pieces_of_staging_are_counted",),
    ),
    Mutant(
        "staging-of-any-size",
        SESSIONS,
        "        if session.staging_bytes + byte_count > limits.staging_bytes_max:\n",
        "        if False:\n",
        "one client's staging takes all memory",
        ("tests/controller/test_controller.py::test_limits_name_their_setting",),
    ),
    Mutant(
        "staging-of-all-sessions-of-any-size",
        SESSIONS,
        "        if self.staging_bytes + byte_count > limits.staging_bytes_total_max:\n",
        "        if False:\n",
        "many clients' staging takes all memory",
        ("tests/controller/test_controller.py::test_limits_name_their_setting",),
    ),
]
