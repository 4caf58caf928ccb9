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
"""Errors when this process, or the machine, may open no more files, or this user has too many in transit."""
MORE_DESCRIPTORS = "raise the limit on open files (ulimit -n), or lower what arena.*, tiers.* and limits.* ask for"


class Workers(Protocol):
    """A bounded set of byte movers."""

    def submit(self, function: Callable[..., Result], /, *args: object) -> Future[Result]: ...

    def close(self) -> None:
        """Stop taking jobs, finish those taken, then return. Idempotent."""


class Lender(Protocol):
    """Gives byte movers in other processes the files and the memory that their jobs name."""

    def lend(self, descriptor: int) -> int:
        """Pass an open file to the movers, and return the number by which jobs name it: its descriptor here. Movers
        keep it open, and its lock held, until it is taken back. Raises Unavailable."""

    def take_back(self, descriptor: int) -> None:
        """Let the movers close a file. Call it before the descriptor is closed, when no job names it any more."""

    def lend_memory(self, descriptor: int, memory: Bytes, *, writable: bool) -> int:
        """Have the movers map a shared mapping of ours. Returns the number for ``take_back_memory``. Raises
        Unavailable."""

    def take_back_memory(self, number: int) -> None:
        """Let the movers unmap memory. Call it when no job names it any more."""


class OwnThreads:
    """The lender for movers that are threads of this process: they have its files and memory already."""

    def lend(self, descriptor: int) -> int:
        return descriptor

    def take_back(self, descriptor: int) -> None:
        return None

    def lend_memory(self, descriptor: int, memory: Bytes, *, writable: bool) -> int:
        return 0

    def take_back_memory(self, number: int) -> None:
        return None


MOVER_NICE = 10
"""Niceness of byte movers: they yield to the thread that answers, and to the engine. On two full cores a lookup waits
half as long as with 5, and as much is moved. On a machine with every core busy, each mover still gets a tenth of a
core."""


def lower_priority(nice: int) -> None:
    """Lower the priority of this thread. 0 leaves it as it is."""
    if nice:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


class WorkerThreads:
    """Pool threads; at most ``count`` calls run at once. ``nice`` lowers their priority: an engine on the same machine
    must not wait for background work. A call runs in its caller's context, so that its logs name the caller.

    A refused call never runs. The pool queues a call before it starts a thread for it, and refuses the call when no
    thread can be started. Without the cancellation here, another thread would run the queued call later, on memory that
    the caller has freed by then."""

    def __init__(self, count: int, name: str, *, nice: int = 0) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name, initializer=lower_priority, initargs=(nice,))

    def submit(self, function: Callable[..., Result], /, *args: object) -> Future[Result]:
        """Queue a call. Raises RuntimeError after ``close``, and when no thread can be started."""
        future: Future[Result] = Future()
        context = copy_context()
        try:
            self._pool.submit(_run_taken, [future, context.run, function, *args])
        except BaseException:
            if future.cancel():
                raise
        return future  # a call that was refused, but has begun already, counts as taken

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=False)


def run_for(future: Future[Result], function: Callable[..., Result], *args: object) -> None:
    """Call the function and put its outcome into the future, unless the future was cancelled."""
    _run_taken([future, function, *args])


def _run_taken(call: list[Any]) -> None:
    """Call ``call[1]`` with the rest of the list, and put the outcome into the future ``call[0]``. The list is emptied
    for two reasons. When the future ends, nothing here may still hold the memory that the call used. And an error keeps
    the pool's frame: through the list, that frame would keep the future, which keeps the error."""
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
        del function, args  # the future keeps the error, and the error keeps this frame with its names
    try:
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
    finally:
        del future, error


def start_thread(target: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread for a loop that blocks in the kernel for its whole life (a socket watcher). Raises
    Unavailable when no thread can be started."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise Unavailable(
            f"{error}: allow this process more threads (ulimit -u, TasksMax= of systemd, a container's limit on pids), "
            "or memory for them (ulimit -v)"
        ) from error
    return thread
