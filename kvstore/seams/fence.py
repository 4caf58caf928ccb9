"""A memory fence, from Python.

Shared memory is read without locks: first the bytes, then a number that tells whether the bytes were still valid.
x86 keeps the order of two loads, and of two stores, of one thread. ARM and POWER do not: there a reader may see new
bytes together with the old number.
"""

from __future__ import annotations

import os
import threading


class _Own(threading.local):
    """A lock for each thread, which always holds its own: no thread ever waits for it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()


_own = _Own()


def fence() -> None:
    """Complete all loads and stores that this thread did before, before any that it does afterwards.

    The thread releases a lock and acquires it again, in this order. A release waits for accesses before it, an acquire
    holds back accesses behind it, and a release stays before a later acquire (ARM's model: ``po; [L]``,
    ``[L]; po; [A]`` and ``[A]; po`` are all *barrier-ordered-before*). The reverse, an acquire and then a release,
    orders nothing: earlier accesses may sink into the locked part, later ones may rise into it, and pass each other
    there. Python has no fence of its own, and the C libraries that it can call export none.

    Cost: less than taking a lock, 0.1 us.
    """
    lock = _own.lock
    try:
        lock.release()
    except RuntimeError:  # an interrupt came between release and acquire, the last time
        lock.acquire()
        lock.release()
    lock.acquire()


def _after_fork_in_child() -> None:
    global _own
    _own = _Own()  # the thread that forked may have been between release and acquire


os.register_at_fork(after_in_child=_after_fork_in_child)
