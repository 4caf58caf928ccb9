"""No wait is for ever, what is dropped is given back, and what must come first does on every processor."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

AIO = "clients/kvstore_client/aio.py"
CALLS = "clients/kvstore_client/planes/session.py"
CONTEXT = "clients/kvstore_client/context.py"
CONNECTION = "clients/kvstore_client/connection.py"
FEED = "clients/kvstore_client/lookup/feed.py"
PRESENCE = "kvstore/presence.py"
RETURNS = "clients/kvstore_client/planes/returns.py"
SESSION = "clients/kvstore_client/planes/shared_memory/mapped.py"
STORING = "clients/kvstore_client/store/store.py"
COPYING = "clients/kvstore_client/copying.py"
TRANSFER = "clients/kvstore_client/fetch/transfer.py"
WATCHING = "clients/kvstore_client/lookup/watch.py"
INCOMING = "clients/kvstore_client/planes/incoming.py"
LOOKUPS = "clients/kvstore_client/engines/vllm/lookups.py"
T_AHEAD = "tests/engines/vllm/test_ahead.py"
WRITER = "clients/kvstore_client/store/writer.py"
T_ASYNC = "tests/e2e/test_async.py"
T_BACK = "tests/e2e/test_given_back.py"
T_DEADLINES = "tests/e2e/test_deadlines.py"
T_FENCE = "tests/seams/test_fence.py"
DROPPED = f"{T_BACK}::test_what_is_dropped_gives_back_what_it_held"
LATER = f"{T_BACK}::test_what_is_dropped_while_the_sidecar_stands_still_is_given_back_later"
NO_WATCH = f"{T_DEADLINES}::test_a_sidecar_that_stands_still_is_no_watch"

MUTANTS = [
    Mutant(
        "what-others-overtook-is-computed",
        LOOKUPS,
        "                each.is_alone = each is asked and is_alone\n",
        "                pass\n",
        "a stored prompt is computed, because those behind it were looked up faster",
        (f"{T_AHEAD}::test_one_that_was_asked_for_first_waits_for_what_came_before_it_all_the_same",),
    ),
    Mutant(
        "what-is-let-go-of-is-free-at-once",
        LOOKUPS,
        " and all(each.done() for each in self._releases)\n",
        "\n",
        "a stored prompt is computed, because what was let go of for it is not free yet",
        (f"{T_AHEAD}::test_what_is_being_let_go_of_is_waited_for",),
    ),
    Mutant(
        "copies-left-at-a-second-interrupt",
        COPYING,
        "            interrupt = error\n",
        "            raise\n",
        "a copy writes into tensors, or staging, that its caller has back",
        ("tests/e2e/test_copying.py::test_who_is_interrupted_twice_waits_for_the_helper",),
    ),
    Mutant(
        "watch-without-a-deadline",
        WATCHING,
        "            first: pb.WatchResponse = asked.result(self.timeout_s)\n",
        "            first: pb.WatchResponse = asked.result()\n",
        "to watch a sidecar that stands still is never to return",
        (NO_WATCH,),
    ),
    Mutant(
        "events-without-a-deadline",
        WATCHING,
        "            if not wait([self.pending()], self.timeout_s).done and not self._is_closed:\n",
        "            if not wait([self.pending()]).done and not self._is_closed:\n",
        "who iterates the events of a sidecar that stands still is never told",
        (NO_WATCH,),
    ),
    Mutant(
        "connections-one-after-the-other",
        CONNECTION,
        "                self._retry_at_s = self._clock.monotonic() + RECONNECT_INTERVAL_S\n                raise\n",
        "                raise\n",
        "the fortieth thread waits forty times as long as a call may take",
        (f"{T_DEADLINES}::test_those_who_wait_for_a_connection_wait_once",),
    ),
    Mutant(
        "hand-off-that-takes-nothing",
        SESSION,
        "        self._bound_sends()\n",
        "        self._socket.settimeout(None)\n",
        "a question to a sidecar whose queue is full is never sent, and never given up",
        (f"{T_DEADLINES}::test_a_hand_off_whose_queue_is_full_is_not_waited_for",),
    ),
    Mutant(
        "close-waits-for-every-commit",
        CONTEXT,
        "        self.connection.close()  # what still waits for the sidecar ends now\n",
        "        pass\n",
        "an engine that stops waits for each of its stores in turn",
        (f"{T_BACK}::test_a_client_is_closed_in_time_whatever_it_has_to_commit[local]",),
    ),
    Mutant(
        "close-without-a-thread",
        CONTEXT,
        "            self.connection.close()\n            self._finish()\n",
        "            self._finish()\n            self.connection.close()\n",
        "an engine that can have no thread waits for each of its stores in turn",
        ("tests/e2e/test_closing_handlers.py::test_a_close_ends_where_no_thread_can_be_had[local]",),
    ),
    Mutant(
        "waits-that-take-threads",
        AIO,
        '        awaited = _AWAITED.get(getattr(function, "__func__", None))\n',
        "        awaited = None\n",
        "eight who wait keep those whom they wait for from a thread",
        (f"{T_ASYNC}::test_waits_leave_the_threads_to_those_they_wait_for[local]",),
    ),
    Mutant(
        "ticket-of-a-cancelled-lookup",
        AIO,
        "            future.add_done_callback(lambda ended: self._drop(ended, late))\n",
        "",
        "chunks are held for a ticket that nobody has",
        (f"{T_ASYNC}::test_a_lookup_that_was_cancelled_holds_nothing[local]",),
    ),
    Mutant(
        "a-close-waits-for-no-call",
        AIO,
        "        wait(list(self._late), LATE_S_MAX)\n",
        "",
        "the ticket that a cancelled call brings after the close is held until it expires",
        (f"{T_ASYNC}::test_a_close_waits_for_what_a_cancelled_call_brings[local]",),
    ),
    Mutant(
        "stream-that-is-dropped",
        INCOMING,
        "    __del__ = end_soon\n",
        "",
        "the lease of a stream that nobody iterates lasts as long as the session",
        (f"{DROPPED}[local-not_iterated]",),
    ),
    Mutant(
        "writer-that-is-dropped",
        WRITER,
        "            self._session.returns.soon(dropping(*end))\n",
        "            del end\n",
        "the reservation and the staging of a writer that is dropped are not given back",
        (f"{DROPPED}[local-writer_with_pieces]",),
    ),
    Mutant(
        "staging-of-a-dropped-store",
        STORING,
        "        for run in runs:\n            pool.give_back(run)\n\n    return drop\n",
        "\n    return drop\n",
        "staging shrinks with every store that was given up",
        (f"{DROPPED}[local-writer_with_pieces]",),
    ),
    Mutant(
        "watch-that-is-dropped",
        FEED,
        "        self._stream.cancel_soon()\n",
        "        pass\n",
        "a watch that is dropped goes on in the sidecar, and its thread here",
        (f"{DROPPED}[local-watch]",),
    ),
    Mutant(
        "transfer-that-is-dropped",
        TRANSFER,
        "            stream.abandon()\n",
        "            pass\n",
        "a transfer that is dropped waits for its writer for 90 s",
        (f"{T_BACK}::test_a_transfer_that_is_dropped_waits_for_no_writer[local]",),
    ),
    Mutant(
        "client-that-is-dropped",
        CALLS,
        "            self.returns.soon(self._ending())\n",
        "            pass\n",
        "a client that is dropped keeps its session until the process ends",
        (f"{T_BACK}::test_a_client_that_is_dropped_ends_its_session[local]",),
    ),
    Mutant(
        "lease-that-the-sidecar-did-not-hear-of",
        RETURNS,
        "            ended.wait(RETRY_S)\n            continue\n",
        "            return\n",
        "what is given back while the sidecar stands still is held on",
        (f"{LATER}[local]",),
    ),
    Mutant(
        "abort-that-the-sidecar-did-not-hear-of",
        CALLS,
        "            self.returns.soon(call)\n",
        "",
        "a store that is aborted while the sidecar stands still keeps its staging",
        (f"{LATER}[local]",),
    ),
    Mutant(
        "flags-without-a-fence",
        PRESENCE,
        "    fence()\n    flags: int = words[0]",
        "    flags: int = words[0]",
        "on ARM a table is believed that was retired before its words were read",
        (f"{T_FENCE}::test_a_tables_flags_are_read_after_its_words",),
    ),
    Mutant(
        "retired-without-a-fence",
        PRESENCE,
        "        fence()\n        retired[0] = RETIRED\n",
        "        retired[0] = RETIRED\n",
        "on ARM a table is retired before the next one is whole",
        (f"{T_FENCE}::test_a_tables_words_are_written_before_its_flags",),
    ),
    Mutant(
        "stream-that-nobody-ends",
        INCOMING,
        '    while hasattr(call, "_consume_next_event") and call._state.due:\n',
        "    while False:\n",
        "each fetch by a call leaves 18 KB behind in the engine's process",
        ("tests/e2e/test_streams.py::test_fetches_read_to_their_end",),
    ),
]
