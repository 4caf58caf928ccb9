"""Threads that move bytes. Copies, checksums and pre-faulting run here, in code that releases the GIL,
never on the event loop. Simulation runs the same calls inline, or later in an order drawn from a seed."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, Protocol, TypeVar

from kvstore.errors import Unavailable
from kvstore.seams.mapping import Bytes

Result = TypeVar("Result")


OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS)
"""No open file more for this process, or this machine; none more on its way between this user's processes."""
MORE_DESCRIPTORS = "raise the limit on open files (ulimit -n), or lower what arena.*, tiers.* and limits.* ask for"


class Workers(Protocol):
    """A bounded set of byte movers."""

    def submit(self, function: Callable[..., Result], /, *args: object) -> Future[Result]: ...

    def close(self) -> None:
        """Stop taking work, finish what was taken, then return. Idempotent."""


class Lender(Protocol):
    """Lets byte movers use what their jobs name, where they are not threads of this process."""

    def lend(self, descriptor: int) -> int:
        """What jobs call an open file by, which is its descriptor here. Movers keep it open, and its lock held, until
        it is taken back. Raises Unavailable."""

    def take_back(self, descriptor: int) -> None:
        """Before the descriptor is closed: no job names it any more."""

    def lend_memory(self, descriptor: int, memory: Bytes, *, writable: bool) -> int:
        """Have a shared mapping of ours mapped by the movers, too. Returns a number to take it back by. Raises
        Unavailable."""

    def take_back_memory(self, number: int) -> None:
        """No job names it any more."""


class OwnThreads:
    """For movers that are threads of this process: they have what it has."""

    def lend(self, descriptor: int) -> int:
        return descriptor

    def take_back(self, descriptor: int) -> None:
        return None

    def lend_memory(self, descriptor: int, memory: Bytes, *, writable: bool) -> int:
        return 0

    def take_back_memory(self, number: int) -> None:
        return None


MOVER_NICE = 10
"""Byte movers yield to the thread that answers, and to the engine: where two cores are full a lookup waits half as
long as with 5, and as much is moved; on a machine that computes on every core they still get a tenth of one each."""


def lower_priority(nice: int) -> None:
    """This thread's, from now on. 0 leaves it as it is."""
    if nice:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


class WorkerThreads:
    """Pool threads; at most ``count`` calls run at once. ``nice`` lowers their priority: an engine beside us must
    not wait for work that nobody waits for. A call runs in its caller's context: its logs say whose it is.

    A call that is refused never runs. The pool queues a call before it starts the thread that may be missing for it,
    and says no when there is none to be had: without care another thread would run it later, on memory given up by
    then."""

    def __init__(self, count: int, name: str, *, nice: int = 0) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name, initializer=lower_priority, initargs=(nice,))

    def submit(self, function: Callable[..., Result], /, *args: object) -> Future[Result]:
        """Raises RuntimeError after ``close``, and where no thread can be had."""
        future: Future[Result] = Future()
        context = copy_context()
        try:
            self._pool.submit(_run_taken, [future, context.run, function, *args])
        except BaseException:
            if future.cancel():
                raise
        return future  # where it was refused, but has begun already, it was taken after all

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=False)


def run_for(future: Future[Result], function: Callable[..., Result], *args: object) -> None:
    """Do what the future stands for, unless it was cancelled."""
    _run_taken([future, function, *args])


def _run_taken(call: list[Any]) -> None:
    """Do what the future ``call[0]`` stands for: call ``call[1]`` with the others. The list is emptied: who is told
    that it has ended may count on it that nothing here holds the memory any more that it was about, and the pool's own
    frame, which an error keeps, has no way to the future, which keeps the error."""
    future: Future[Any]
    future, function, *args = call
    call.clear()
    error: BaseException | None = None
    try:
        if not future.set_running_or_notify_cancel():
            return
        result = function(*args)
    except BaseException as raised:  # noqa: BLE001 - a future carries whatever the call raised
        error = raised
    finally:
        del function, args  # the error keeps this frame, and the future the error
    try:
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
    finally:
        del future, error


def start_thread(target: Callable[[], None], name: str) -> threading.Thread:
    """A daemon thread for a loop that blocks in the kernel for its whole life (a socket watcher). Raises Unavailable
    where none can be had."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise Unavailable(f"{error}: allow this process more threads (ulimit -u), or memory for them") from error
    return thread
