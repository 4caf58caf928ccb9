"""A stream of messages from the sidecar, and its end."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

import grpc

from kvstore.errors import Unavailable
from kvstore.seams.scheduler import start_thread
from kvstore_client.forks import in_children
from kvstore_client.planes.prefix import nothing
from kvstore_client.planes.session import ClientSession, cancel, noted, translated, typed_call

_log = logging.getLogger("kvstore.client")


class Ends:
    """The thread of this process that ends streams, of all sessions: a stream may end after its session. To hand over
    takes no lock, so that a destructor may do it."""

    def __init__(self) -> None:
        self._renew()
        in_children(self._renew)

    def _renew(self) -> None:
        """Begin anew: a forked child has no thread yet."""
        self._starting = threading.Lock()
        self._queue: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._has_thread = False

    def start(self) -> None:
        """Start the thread, if it does not run. Raises Unavailable where no thread is to be had."""
        with self._starting:
            if not self._has_thread:
                start_thread(partial(_make, self._queue), "kvstore-ends")
                self._has_thread = True

    def put(self, end: Callable[[], object]) -> None:
        """Have the thread make a call."""
        self._queue.put(end)


def _make(queue: SimpleQueue[Callable[[], object]]) -> None:
    while True:
        end = queue.get()
        try:
            end()
        except Exception:  # noqa: BLE001 - the boundary: a thread of ours must not die in silence
            _log.exception("a stream was not ended")
        del end  # while the thread waits it keeps no stream alive


_ends = Ends()


class Incoming:
    """A stream that the sidecar answers a call with. One thread at a time reads it; any thread may end it.

    End every stream, read to its end or not. gRPC keeps 18 KB of a stream until all is read that there is to tell of
    it, its status included, or its channel closes: an engine would lose that much with every fetch. One that is dropped
    ends, too: an interrupt may come before anybody has it who would end it.
    """

    _has_ended = True
    """True once nothing is left to end: also before there is a call."""

    def __init__(self, call: Any) -> None:
        """Raises Unavailable where the thread that ends streams cannot be started."""
        self._pid = os.getpid()
        self._reading = threading.Lock()
        self.gives_back: Callable[[], object] = nothing
        """Called when the stream ends: gives back what the sidecar lent with it."""
        self._call = noted(call)
        self._has_ended = False
        try:
            _ends.start()
        except BaseException:
            call.cancel()
            raise

    def read(self) -> Any:
        """Return the next message, None at the end. Raises grpc.RpcError; ValueError after the channel's end."""
        with self._reading:
            return next(self._call, None)

    def cancel(self) -> None:
        """Have ``read`` fail soon, whichever thread is in it."""
        cancel(self._call)

    def cancel_soon(self) -> None:
        """Cancel from a destructor: another thread makes the call that this takes."""
        self._soon(self._call.cancel)

    def end_soon(self) -> None:
        """End the stream, on another thread. From destructors, too. Nothing is read from it afterwards. Idempotent."""
        if not self._has_ended:
            self._soon(partial(_end, self._call, self._reading))
            self.gives_back()
            self._has_ended = True  # last: an interrupt in between has this done twice, which is no harm

    __del__ = end_soon

    def _soon(self, end: Callable[[], object]) -> None:
        if self._pid == os.getpid():  # a forked child leaves its parent's streams alone
            _ends.put(end)


def opened(
    session: ClientSession, method: Any, request: object, timeout_s: float,
    lent: Callable[[Any], Callable[[], object]] | None = None,
) -> tuple[Incoming, Any]:  # fmt: skip
    """Make a call, and return its stream and the first message. ``lent``: returns a function that gives back what the
    first message lends; it is called when the stream ends. Raises the typed error of a failed call."""

    def begun() -> tuple[Incoming, Any]:
        stream = Incoming(typed_call(method, request, timeout_s, session.carried))
        try:
            first = stream.read()
            if first is not None and lent is not None:
                stream.gives_back = lent(first)
        except BaseException as error:
            stream.end_soon()
            if isinstance(error, grpc.RpcError):
                raise translated(error) from error
            if isinstance(error, ValueError):
                raise Unavailable("the sidecar is gone") from error
            raise
        if first is None:
            stream.end_soon()
            raise Unavailable("the sidecar is gone")
        return stream, first

    return session.with_model(begun, timeout_s)


def read_out(call: Any) -> None:
    """Take what gRPC has to tell of a cancelled call that nobody reads. There is no public way: a cancelled stream
    cannot be read on. Streams of other kinds, which gRPC's own threads read, lack ``_consume_next_event`` and need none
    of this."""
    while hasattr(call, "_consume_next_event") and call._state.due:
        call._consume_next_event()


def _end(call: Any, reading: threading.Lock) -> None:
    call.cancel()
    with reading:  # a thread in ``read`` leaves it, for the call is cancelled
        read_out(call)
