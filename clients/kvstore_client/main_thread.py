"""Work that takes locks of Python code, done on another thread than the main one.

Python runs signal handlers on the main thread, between any two steps of its code. One that raises (Ctrl-C, an alarm, an
engine's SIGTERM) may come in gRPC's own code, or in that of ``threading.Condition``, just when a lock was taken. The
lock then stays taken for ever: every later call of the channel waits for it, from any thread, before its time limit
begins. Other threads run no handlers. So the main thread hands such work to one of them, and waits in compiled code,
which either has the outcome or not.

Work whose caller was interrupted goes on to its own time limit, and its outcome is dropped: what it holds must give
itself back when it is dropped. Cost: about 20 us on the main thread; nothing on others.
"""

from __future__ import annotations

import _thread
import sys
import threading
import weakref
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from kvstore_client.forks import in_children

Result = TypeVar("Result")


class _StandIn:
    """A thread that does the main thread's work. It ends when this object is dropped and its work is done: that takes
    only compiled code, for an interrupt may drop it anywhere."""

    def __init__(self) -> None:
        self.work: SimpleQueue[Any] = SimpleQueue()
        """Pairs of a call, and the queue for its outcome; at last the reference to this object, which is dead then."""
        # Not ``threading.Thread``: its start waits in Python code, where an interrupt leaves the new thread waiting.
        _thread.start_new_thread(_serve, (self.work, weakref.ref(self, self.work.put)))


def _serve(queue: SimpleQueue[Any], dropped: object) -> None:
    while (work := queue.get()) is not dropped:
        work = [*work]
        work.pop().put(_outcome(work.pop))  # while the thread waits it keeps nothing of the work alive


def _outcome(take: Callable[[], Callable[[], object]]) -> tuple[object, BaseException | None]:
    try:
        return take()(), None
    except BaseException as error:  # noqa: BLE001 - the caller gets it
        return None, error


class _MainThread:
    """The stand-in of this process, while it is free."""

    def __init__(self) -> None:
        self._renew()
        in_children(self._renew)

    def _renew(self) -> None:
        """Begin anew: a forked child has no such thread."""
        self._free: _StandIn | None = None

    def relieve(self, call: Callable[[], Result]) -> Result:
        """See ``off_main_thread``."""
        stand_in, self._free = self._free, None  # a signal handler that calls meanwhile gets another one
        try:
            stand_in = stand_in or _StandIn()
        except RuntimeError:  # no thread is to be had
            return call()
        outcome: SimpleQueue[tuple[Result, BaseException | None]] = SimpleQueue()
        stand_in.work.put((partial(copy_context().run, call), outcome))
        result, error = outcome.get()
        self._free = stand_in
        if error is not None:
            try:
                raise error
            finally:
                del error  # an error keeps the frames it passes, and they would keep the error
        return result


_main = _MainThread()


def off_main_thread(call: Callable[[], Result]) -> Result:
    """Make a call on another thread where this is the main one, else here. Returns or raises as the call does. Where no
    thread is to be had it is made here, too; and at the interpreter's end, when destructors run and no other thread
    does."""
    if threading.get_ident() != threading.main_thread().ident or sys.is_finalizing():
        return call()
    return _main.relieve(call)
