"""A stream of messages that can be read with a time limit."""

from __future__ import annotations

from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import grpc

from kvstore.errors import KVStoreError, Unavailable
from kvstore.seams.scheduler import start_thread
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.planes.incoming import Incoming
from kvstore_client.planes.session import translated

GONE = "the sidecar is stopping, or the session ended: watch again"
_Asked = SimpleQueue[Future[pb.WatchResponse] | None]


class Feed:
    """Reads a stream on a thread of its own, one message for each ``ask``: messages not asked for stay with the
    sidecar. The thread does not keep the feed alive: a feed that is dropped ends its stream."""

    def __init__(self, stream: Incoming, gone: str = GONE) -> None:
        """``gone``: what a reader is told whose stream ended before its time."""
        self._stream = stream
        self._gone = gone
        self._is_closed = False
        self._asked: _Asked = SimpleQueue()
        asked = self._asked
        try:
            start_thread(lambda: _read(stream, asked, gone), "kvstore-feed")
        except BaseException:
            stream.end_soon()
            raise

    def ask(self) -> Future[pb.WatchResponse]:
        """Return a future of the next message. Its failure is a typed error."""
        future: Future[pb.WatchResponse] = Future()
        self._asked.put(future)
        if self._is_closed:
            with suppress(InvalidStateError):  # the thread has not ended yet
                future.set_exception(Unavailable(self._gone))
        return future

    def close(self) -> None:
        """End the stream and the thread; pending messages fail. Idempotent. A forked child leaves the stream to its
        parent."""
        self._is_closed = True
        self._asked.put(None)
        self._stream.cancel()

    def __del__(self) -> None:
        self._asked.put(None)
        self._stream.cancel_soon()


def _read(stream: Incoming, asked: _Asked, gone: str) -> None:
    error: KVStoreError | None = None
    while (future := asked.get()) is not None:
        message: Any = None
        if error is None:
            try:
                message = stream.read()
            except grpc.RpcError as failure:
                was_ended_here = failure.code() is grpc.StatusCode.CANCELLED
                error = Unavailable(gone) if was_ended_here else translated(failure)
            except ValueError:
                error = Unavailable(gone)
            if message is None:
                error = error or Unavailable(gone)
        with suppress(InvalidStateError):  # the feed was closed, and has failed it
            if error is None:
                future.set_result(message)
            else:
                future.set_exception(error)
        del future, message
    stream.end_soon()
