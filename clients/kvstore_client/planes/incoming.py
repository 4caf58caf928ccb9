"""A stream of messages from the sidecar, and its end."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import grpc

from kvstore.errors import Unavailable
from kvstore_client.planes.returns import Returns
from kvstore_client.planes.session import ClientSession, cancel, noted, translated


class Incoming:
    """A stream that the sidecar answers a call with. One thread at a time reads it; any thread may end it.

    End every stream, read to its end or not. gRPC keeps 18 KB of a stream until all is read that there is to tell of
    it, its status included, or its channel closes: an engine would lose that much with every fetch.
    """

    def __init__(self, call: Any, returns: Returns) -> None:
        self._call = noted(call)
        self._returns = returns
        self._reading = threading.Lock()

    def read(self) -> Any:
        """Return the next message, None at the end. Raises grpc.RpcError; ValueError after the channel's end."""
        with self._reading:
            return next(self._call, None)

    def cancel(self) -> None:
        """Have ``read`` fail soon, whichever thread is in it."""
        cancel(self._call)

    def cancel_soon(self) -> None:
        """Cancel from a destructor: another thread makes the call that this takes."""
        self._returns.soon(self._call.cancel)

    def end_soon(self) -> None:
        """End the stream, on another thread. From destructors, too. Nothing is read from it afterwards."""
        self._returns.soon(partial(_end, self._call, self._reading))


def opened(session: ClientSession, method: Any, request: object, timeout_s: float) -> tuple[Incoming, Any]:
    """Make a call, and return its stream and the first message. Raises the typed error of a failed call."""
    try:
        stream = Incoming(method(request, timeout=timeout_s, metadata=session.carried), session.returns)
    except ValueError as error:
        raise Unavailable("the sidecar is gone") from error
    try:
        first = stream.read()
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


def _end(call: Any, reading: threading.Lock) -> None:
    """Cancel a call, and take what gRPC has to tell of it. gRPC has no public way: a cancelled stream cannot be read
    on. Streams of other kinds, which gRPC's own threads read, lack ``_consume_next_event`` and need none of this."""
    call.cancel()
    with reading:  # a thread in ``read`` leaves it, for the call is cancelled
        while hasattr(call, "_consume_next_event") and call._state.due:
            call._consume_next_event()
