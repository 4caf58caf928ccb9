"""Gives back a session's leases, streams, tickets and a dropped writer's reservations, while nobody waits."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue

from kvstore.errors import DeadlineExceeded, Exhausted, KVStoreError, Unavailable
from kvstore.seams.scheduler import start_thread

RETRY_S = 0.5
AT_ONCE = 1024
UNANSWERED = (DeadlineExceeded, Exhausted, Unavailable)
"""Errors of calls that gave nothing back. Exhausted: the sidecar takes no more calls at once."""
_log = logging.getLogger("kvstore.client")
_Item = int | Callable[[], object] | None


class Returns:
    """One thread per session that makes these calls. It repeats a call until it is answered, or until the session has
    ended, which gives back all that the session had.

    Handing over takes no lock, so that a destructor may do it: the garbage collector runs destructors in any thread,
    and a gRPC call from there could wait for a lock that this very thread holds.
    """

    def __init__(self, ended: threading.Event) -> None:
        """``ended``: set before ``close``, when the session ends."""
        self._pid = os.getpid()
        self._ended = ended
        self._queue: SimpleQueue[_Item] = SimpleQueue()

    def start(self, release: Callable[[list[int]], object]) -> None:
        """Start the thread. ``release`` gives leases back, by a call. It must not keep the session alive, which ends
        when nobody refers to it any more."""
        start_thread(partial(_work, self._queue, release, self._ended), "kvstore-returns")

    def _put(self, item: _Item) -> None:
        if self._pid == os.getpid():  # a forked child has neither the thread nor the session
            self._queue.put(item)

    def lease(self, lease_id: int) -> None:
        """Give a lease back. The id 0 is no lease."""
        if lease_id:
            self._put(lease_id)

    def soon(self, call: Callable[[], object]) -> None:
        """Make a call that gives something back."""
        self._put(call)

    def settle(self, timeout_s: float) -> bool:
        """Wait until everything handed over so far was given back. Returns False when that takes longer."""
        done = threading.Event()
        self.soon(done.set)
        return done.wait(timeout_s)

    def close(self) -> None:
        """End the thread: the session has ended, and nothing is left to give back."""
        self._put(None)


def _work(queue: SimpleQueue[_Item], release: Callable[[list[int]], object], ended: threading.Event) -> None:
    while not ended.is_set() and (item := queue.get()) is not None:
        leases, others = _taken(item, queue)
        item = None
        if leases:
            _until_answered(partial(release, leases), ended)
        while others:
            _until_answered(others.pop(0), ended)  # after the call, this thread keeps nothing of it alive


def _taken(item: _Item, queue: SimpleQueue[_Item]) -> tuple[list[int], list[Callable[[], object]]]:
    """Return the item and those that wait behind it: leases, which go in one call, and other calls."""
    leases: list[int] = []
    others: list[Callable[[], object]] = []
    while item is not None:
        if isinstance(item, int):
            leases.append(item)
        else:
            others.append(item)
        if len(leases) + len(others) == AT_ONCE:
            break
        try:
            item = queue.get_nowait()
        except Empty:
            break
    return leases, others


def _until_answered(call: Callable[[], object], ended: threading.Event) -> None:
    while not ended.is_set():
        try:
            call()
        except UNANSWERED:
            ended.wait(RETRY_S)
            continue
        except KVStoreError:
            return  # the sidecar has given it back already
        except Exception:  # noqa: BLE001 - the boundary: a thread of ours must not die in silence
            _log.exception("what was to be given back was not")
            return
        return
