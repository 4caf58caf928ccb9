"""Sessions: calls, and their failures as typed errors; and what differs by the plane that the bytes take."""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import grpc

from kvstore.errors import KVStoreError, Unavailable, from_status
from kvstore.spec import Exactness
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1 import cache_pb2_grpc
from kvstore.v1alpha import admin_pb2_grpc, prefill_pb2_grpc
from kvstore.wire import METADATA_ERROR
from kvstore_client.copying import Copier
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.lookup.presence import Answer, ChainName, Presence
from kvstore_client.planes.prefix import Prefix
from kvstore_client.planes.returns import UNANSWERED, Returns
from kvstore_client.planes.store import Staging, StagingRun, StoreSource, Upload
from kvstore_client.tracing import trace_headers

_calls: weakref.WeakSet[Any] = weakref.WeakSet()
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
_inherited: list[Any] = []


def noted(call: Any) -> Any:
    """A stream, or a call whose answer is waited for elsewhere: as it is, and a forked child keeps it."""
    _calls.add(call)
    return call


def _after_fork_in_child() -> None:
    """Keep what gRPC has given: its destructors take locks, and the threads that held them are not here."""
    _inherited.extend(_calls)
    _inherited.extend(session.channel for session in _sessions)


os.register_at_fork(after_in_child=_after_fork_in_child)


class Plane(Protocol):
    """A way for a session's bytes."""

    staging: Staging
    """Where strips are gathered, as long as the session lives."""

    def open_prefix(
        self, wanted: Wanted, request: pb.FetchRequest, digests: list[bytes], timeout_s: float, exactness: Exactness
    ) -> Prefix:
        """Ask for the resident prefix of a chain. Raises the typed error of a failed call."""

    def open_warm(
        self, wanted: Wanted, name: ChainName, digests: Sequence[bytes], seen: Answer, exactness: Exactness
    ) -> Prefix | None:
        """What a lookup has just shown (``seen``), without a call and without a lease. None where only a call will
        do."""
        return None

    def upload(self, source: StoreSource, copier: Copier, timeout_s: float) -> Upload:
        """How a store's bytes go."""

    def fill(self, reservation_id: int, fills: Sequence[pb.Fill], runs: Sequence[StagingRun], timeout_s: float) -> None:
        """Hand over what was gathered in ``runs``. Returns when nothing of them is needed any more. Raises the typed
        error of what failed."""

    def close(self) -> None:
        """End the session. Idempotent."""


class Session(Plane):
    """Stubs, what every call carries, and what the session's end gives back. Each plane has its own."""

    cache: cache_pb2_grpc.CacheServiceStub
    admin: admin_pb2_grpc.AdminServiceStub
    prefills: prefill_pb2_grpc.PrefillServiceStub
    has_prefills = True
    """Until the sidecar says that it is of a release that knows no partial prefills."""
    channel: grpc.Channel
    staging: Staging
    metadata: tuple[tuple[str, str | bytes], ...]
    session_id: int
    server_pid: int
    _is_begun = False
    presence: Presence | None = None
    """Where lookups need no call."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.ended = threading.Event()
        self.models: set[bytes] = set()
        self.returns = Returns(self.ended)

    def _ending(self) -> Callable[[], object]:
        """The call that ends the session. It must not keep the session alive."""
        raise NotImplementedError

    def __del__(self) -> None:
        """A session that nobody has any more, neither a client nor what one gave, is ended."""
        if self._is_begun and self.is_usable:
            self.returns.soon(self._ending())

    def _start_returns(self, timeout_s: float) -> None:
        """Once the session is there."""
        self._is_begun = True
        _sessions.add(self)
        self.returns.start(partial(_release, self.cache.Release, self.metadata, timeout_s))

    @property
    def is_usable(self) -> bool:
        return not self.ended.is_set() and self.pid == os.getpid()

    @property
    def carried(self) -> tuple[tuple[str, str | bytes], ...]:
        """What a request's call carries: whose it is, and the trace that it is part of."""
        return (*self.metadata, *trace_headers())

    def _check_process(self) -> None:
        """A forked child has none of gRPC's threads: a call there would wait for ever, whatever its deadline."""
        if self.pid != os.getpid():
            raise Unavailable("this session is of the process that this one is a fork of: begin anew with the client")

    def call(self, method: Any, request: Any, timeout_s: float) -> Any:
        """A unary call. Raises the typed error its status means."""
        self._check_process()
        return _called(method, request, timeout_s, self.carried)

    def give_back(self, call: Callable[[], object]) -> None:
        """Make a call that gives something back. One that is not answered is made again beside the caller until it is.
        Raises what the first one raised."""
        try:
            call()
        except UNANSWERED:
            self.returns.soon(call)
            raise

    def begin(self, method: Any, request: Any, timeout_s: float) -> Any:
        """A unary call whose answer is waited for elsewhere: gRPC's future of it. Raises Unavailable."""
        self._check_process()
        try:
            return noted(method.future(request, timeout=timeout_s, metadata=self.carried))
        except ValueError as error:
            raise Unavailable("the sidecar is gone") from error

    def answer(self, begun: Any) -> Any:
        """Of a call that is done. Raises the typed error its status means."""
        try:
            return begun.result()
        except grpc.RpcError as error:
            raise translated(error) from error
        except grpc.FutureCancelledError as error:
            raise Unavailable("the sidecar is gone") from error


def translated(error: grpc.RpcError) -> KVStoreError:
    """What a failed call means. A stream is its own error: without the frames it passed, or they and all they hold
    would hold each other."""
    error.__traceback__ = None
    fields: dict[str, Any] = {}
    for key, value in error.trailing_metadata() or ():
        if key == METADATA_ERROR:
            fields = json.loads(value)
    return from_status(error.code().name, error.details() or "", **{str(k): v for k, v in fields.items()})


def _called(method: Any, request: Any, timeout_s: float, metadata: Any) -> Any:
    try:
        return method(request, timeout=timeout_s, metadata=metadata)
    except grpc.RpcError as error:
        raise translated(error) from error
    except ValueError as error:
        raise Unavailable("the sidecar is gone") from error  # the channel was closed under the call


def _release(method: Any, metadata: Any, timeout_s: float, lease_ids: list[int]) -> None:
    _called(method, pb.ReleaseRequest(lease_ids=lease_ids), timeout_s, metadata)
