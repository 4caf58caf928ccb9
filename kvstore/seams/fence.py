"""A memory fence, from Python.

Shared memory is read without locks here: bytes, then the number that says whether they still were what they should be.
x86 does two loads, and two stores, of one thread in their order. ARM and POWER do not, and then a new number may be
missed beside new bytes.
"""

from __future__ import annotations

import os
import threading


class _Own(threading.local):
    """A lock for each thread, held at all times but for an instant: nobody ever waits for it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()


_own = _Own()


def fence() -> None:
    """What this thread loaded and stored before is done before anything that it loads or stores afterwards.

    A lock is given up and taken again, in this order. A release waits for what is before it, an acquire holds up what
    is behind it, and a release and an acquire behind it stay in order (ARM's model: ``po; [L]``, ``[L]; po; [A]`` and
    ``[A]; po`` are all *barrier-ordered-before*). The other way round, an acquire and then a release, orders nothing:
    what is before may sink into the locked part, what is behind may rise into it, and there they pass each other.
    Python has no fence of its own, and the C libraries that it can call export none.

    Cost: less than taking a lock, 0.1 us.
    """
    lock = _own.lock
    try:
        lock.release()
    except RuntimeError:  # an interrupt came between the two, the last time
        lock.acquire()
        lock.release()
    lock.acquire()


def _after_fork_in_child() -> None:
    global _own
    _own = _Own()  # the thread that forked may have been between the two


os.register_at_fork(after_in_child=_after_fork_in_child)
