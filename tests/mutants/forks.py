"""Forks and cancelled tasks: a child has nothing of its parent's, and what nobody takes any more is given back."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

AIO = "clients/kvstore_client/aio.py"
CALLS = "clients/kvstore_client/planes/session.py"
CLIENT = "clients/kvstore_client/client.py"
CONNECTION = "clients/kvstore_client/connection.py"
KNOWN = "clients/kvstore_client/segments/known.py"
RECEIPT = "clients/kvstore_client/store/receipt.py"
SESSION = "clients/kvstore_client/planes/shared_memory/mapped.py"
WRITER = "clients/kvstore_client/store/writer.py"
GATE = "clients/kvstore_client/gate/gate.py"
USES = "tests/e2e/test_given_back.py::test_a_fork_that_uses_what_is_its_parents_is_told_so[local]"
KEEPS = "tests/e2e/test_forks.py::test_a_child_destroys_no_call_of_its_parents"
CONNECTS = "tests/e2e/test_failures.py::test_a_forked_child_connects_by_itself[local]"
CLOSES = "tests/e2e/test_forks.py::test_a_child_that_closes_everything_closes_nothing_of_its_parents[local]"
FETCHES = "tests/e2e/test_forks.py::test_a_child_is_told_that_a_fetch_is_its_parents[local]"
LOCKED = "tests/e2e/test_forks.py::test_a_child_does_not_wait_for_a_lock_that_its_parent_holds"
T_ASYNC = "tests/e2e/test_async.py"

MUTANTS = [
    Mutant(
        "call-of-the-parents-session",
        CALLS,
        "        if self.pid != os.getpid():\n",
        "        if False:\n",
        "a call in a forked child waits for ever",
        (USES,),
    ),
    Mutant(
        "calls-destroyed-in-a-fork",
        CALLS,
        "os.register_at_fork(after_in_child=lambda: _inherited.extend(_calls))\n",
        "",
        "a forked child waits for a lock that nobody holds any more",
        (KEEPS,),
    ),
    Mutant(
        "session-of-the-parent",
        CONNECTION,
        "        self._begin_in_child()\n        with self._lock:\n            if self._is_closed:\n",
        "        with self._lock:\n            if self._is_closed:\n",
        "a forked child waits for a lock that a thread of its parent held",
        (f"{LOCKED}[local-ask]",),
    ),
    Mutant(
        "connection-closed-in-a-fork",
        CONNECTION,
        "        self._begin_in_child()\n        with self._lock:\n            self._is_closed = True\n",
        "        with self._lock:\n            self._is_closed = True\n",
        "a forked child ends its parent's session",
        (f"{LOCKED}[local-close]",),
    ),
    Mutant(
        "lock-of-the-parent-met-by-a-second-thread",
        CONNECTION,
        "                    self._lock, self._session = threading.RLock(), None\n"
        "                    self._pid = os.getpid()  # last: who sees it takes the lock\n",
        "                    self._pid = os.getpid()\n"
        "                    self._lock, self._session = threading.RLock(), None\n",
        "of two threads of a forked child one waits for a lock that nobody gives back",
        ("tests/e2e/test_forks.py::test_threads_of_a_child_that_ask_at_once_wait_for_no_lock_of_the_parents",),
    ),
    Mutant(
        "threads-of-the-parent",
        CLIENT,
        "        in_children(self._start_threads)\n",
        "",
        "a forked child waits for threads that it does not have",
        (CONNECTS, "tests/e2e/test_forks.py::test_whatever_a_child_asks_first_is_done[local-store]"),
    ),
    Mutant(
        "remote-session-ended-by-a-fork",
        "clients/kvstore_client/planes/stream/session.py",
        "        if self.ended.is_set() or self.pid != os.getpid():\n",
        "        if self.ended.is_set():\n",
        "a forked child ends its parent's session",
        (CLOSES.replace("local", "remote"),),
    ),
    Mutant(
        "cancels-its-parents-call",
        CALLS,
        "    if not any(each is call for each in _inherited):\n",
        "    if True:\n",
        "a forked child waits for ever for a lock whose holder it does not have",
        ("tests/e2e/test_forks.py::test_a_child_that_leaves_a_prefill_leaves_it_to_its_parent[local]",),
    ),
    Mutant(
        "sockets-of-the-parent",
        SESSION,
        "            os.close(self._socket.detach())\n",
        "            pass\n",
        "a session goes on as long as some fork of its process lives",
        ("tests/e2e/test_forks.py::test_a_session_ends_with_its_process_whatever_forks_live_on",),
    ),
    Mutant(
        "table-of-the-parent",
        SESSION,
        "            self.presence.close()\n        with suppress(OSError):\n",
        "            pass\n        with suppress(OSError):\n",
        "a forked child looks into memory that it does not have",
        (CONNECTS,),
    ),
    Mutant(
        "store-of-the-parent",
        WRITER,
        "        if self._session is None or self._session.pid == os.getpid():\n",
        "        if True:\n",
        "a forked child writes into a store of its parent's, or waits for threads that it does not have",
        (USES,),
    ),
    Mutant(
        "receipt-of-the-parent",
        RECEIPT,
        "        return self._pid != os.getpid() and not self._future.done()\n",
        "        return False\n",
        "a forked child waits for ever for what its parent stores",
        (CLOSES,),
    ),
    Mutant(
        "transfer-of-the-parent",
        "clients/kvstore_client/fetch/transfer.py",
        "        in_children(self._end_in_child)\n",
        "",
        "a forked child waits for ever for what its parent fetches",
        (FETCHES,),
    ),
    Mutant(
        "layers-of-the-parent",
        "clients/kvstore_client/fetch/stream.py",
        "        if self._pid != os.getpid():\n",
        "        if False:\n",
        "a forked child reads memory that it does not have, and ends",
        (FETCHES,),
    ),
    Mutant(
        "copies-of-the-parent",
        "clients/kvstore_client/fetch/stream.py",
        "            if self._pid == os.getpid():  # none of its copies ends in a forked child\n",
        "            if True:\n",
        "a forked child waits for a copy that its parent makes",
        (FETCHES,),
    ),
    Mutant(
        "rates-of-the-parent",
        "clients/kvstore_client/loading/planner.py",
        "        in_children(self._renew_lock)\n",
        "",
        "a forked child waits for a lock that a thread of its parent held",
        (FETCHES,),
    ),
    Mutant(
        "documents-of-the-parent",
        KNOWN,
        "        in_children(self._begin)\n",
        "",
        "a forked child waits for a lock that a thread of its parent held",
        ("tests/segments/test_known.py::test_a_forked_child_begins_anew",),
    ),
    Mutant(
        "gate-of-the-parent",
        GATE,
        "        if self._pid != os.getpid():\n",
        "        if False:\n",
        "a forked child waits for a lock that a thread of its parent held",
        ("tests/recompute/test_gate.py::test_a_forked_child_goes_on_by_itself",),
    ),
    Mutant(
        "release-that-is-cancelled",
        AIO,
        "        await asyncio.shield(asyncio.wrap_future(begun(self._threads, self.client.release_ticket, ticket)))\n",
        "        await self.call(self.client.release_ticket, ticket)\n",
        "a task that is cancelled while it releases its ticket leaves it held",
        (f"{T_ASYNC}::test_a_release_that_is_cancelled_is_done_all_the_same",),
    ),
    Mutant(
        "fetch-of-a-cancelled-task",
        AIO,
        "            found.stop()\n",
        "            pass\n",
        "a fetch goes on, and holds its lease, for a task that is gone",
        (f"{T_ASYNC}::test_what_comes_for_a_task_that_is_gone_is_given_back_at_once",),
    ),
    Mutant(
        "store-of-a-cancelled-task",
        AIO,
        "            begun(self._threads, found.abort).add_done_callback(given_back)\n",
        "            given_back()\n",
        "a store holds its chunks for a task that is gone",
        (f"{T_ASYNC}::test_what_comes_for_a_task_that_is_gone_is_given_back_at_once",),
    ),
    Mutant(
        "layers-of-a-cancelled-task",
        AIO,
        "        elif isinstance(found, Watch | LayerStream):\n",
        "        elif isinstance(found, Watch):\n",
        "chunks stay leased for a task that is gone",
        (f"{T_ASYNC}::test_what_comes_for_a_task_that_is_gone_is_given_back_at_once",),
    ),
    Mutant(
        "connect-that-is-cancelled",
        AIO,
        "        asyncio.get_running_loop().run_in_executor(None, _end, threads, future)\n",
        "        _end(threads, future)\n",
        "an event loop stands still for a sidecar that does not answer",
        (f"{T_ASYNC}::test_a_cancelled_connect_holds_up_nobody_and_leaves_no_session",),
    ),
    Mutant(
        "watch-of-a-cancelled-task",
        AIO,
        "            begun(self._threads, found.close).add_done_callback(given_back)\n",
        "            given_back()\n",
        "a watch takes a place for a task that is gone",
        (f"{T_ASYNC}::test_what_comes_for_a_task_that_is_gone_is_given_back_at_once",),
    ),
    Mutant(
        "lock-of-its-own-thread",
        CONNECTION,
        "        self._lock = threading.RLock()\n        self._counting",
        "        self._lock = threading.Lock()\n        self._counting",
        "an engine whose handler for SIGTERM closes its client never ends",
        ("tests/e2e/test_closing_handlers.py::test_it_may_close_a_client_that_has_a_lock",),
    ),
    Mutant(
        "connects-after-the-close",
        CONNECTION,
        "            if self._is_closed:  # by a signal handler, meanwhile\n",
        "            if False:\n",
        "a client that was closed while it connected keeps a session open",
        ("tests/e2e/test_closing_handlers.py::test_what_connects_is_closed_with_its_client",),
    ),
]
