"""Sessions: calls, and their failures as typed errors; and the interface of a plane."""

from __future__ import annotations

import os
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import grpc

from kvstore import __version__
from kvstore.errors import UNREGISTERED, InvalidRequest, KVStoreError, Unavailable, from_status
from kvstore.seams.scheduler import start_thread
from kvstore.spec import ModelSpec
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1 import cache_pb2_grpc
from kvstore.v1alpha import admin_pb2 as admin_pb
from kvstore.v1alpha import admin_pb2_grpc, prefill_pb2_grpc
from kvstore.wire import METADATA_ERROR, spec_to_message, unpack_fields
from kvstore_client.copying import Copier
from kvstore_client.fetch.ticket import TicketFields
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.forks import in_children
from kvstore_client.lookup.presence import ChainName, LookupAnswer, Presence
from kvstore_client.planes.prefix import Prefix, nothing
from kvstore_client.planes.returns import UNANSWERED, Returns
from kvstore_client.planes.store import StagingMemory, StagingRun, StoreSource, Upload
from kvstore_client.tracing import trace_headers

Reply = TypeVar("Reply")
Call = TypeVar("Call")
UNANSWERED_BY = types.MappingProxyType(
    {"UNAVAILABLE": "the sidecar is gone", "DEADLINE_EXCEEDED": "the sidecar did not answer in time"}
)
"""By its status, the words for a call that no sidecar answered: gRPC's own name no sidecar."""
MODELS_MAX = 1024
"""Models that a session remembers as registered; up to twice as many while it can register them again."""
_calls: weakref.WeakSet[object] = weakref.WeakSet()
_inherited: list[object] = []


class PendingCall(Protocol):
    """A call of gRPC's that can be taken back."""

    def cancel(self) -> object: ...


def noted(call: Call) -> Call:
    """Return a stream or a pending call as it is, and note it: a forked child must keep it alive."""
    _calls.add(call)
    return call


def cancel(call: PendingCall) -> None:
    """Cancel a call. A forked child leaves its parent's alone: a thread that is not here may hold the call's lock."""
    if not any(each is call for each in _inherited):
        call.cancel()


os.register_at_fork(after_in_child=lambda: _inherited.extend(_calls))
"""Keeps gRPC's objects alive in a child: their destructors take locks, whose holders are not there."""


class Plane(Protocol):
    """A way for a session's bytes."""

    staging: StagingMemory
    """The memory where strips are gathered, as long as the session lives."""
    maps_chunks: bool = False
    """True when the session copies chunks from where they lie."""

    def open_prefix(self, wanted: Wanted, request: pb.FetchRequest, digests: list[bytes], timeout_s: float) -> Prefix:
        """Ask for the resident prefix of a chain. Raises the typed error of a failed call."""

    def open_warm(self, wanted: Wanted, name: ChainName, digests: Sequence[bytes], seen: LookupAnswer) -> Prefix | None:
        """Open the prefix that a lookup has just shown (``seen``), without a call and without a lease. None where only
        a call will do."""
        return None

    def open_placed(self, wanted: Wanted, held: TicketFields) -> Prefix | None:
        """Open the prefix of a ticket that names the places of its chunks, without a call. None where only a call will
        do."""
        return None

    def upload(self, source: StoreSource, copier: Copier, timeout_s: float) -> Upload:
        """Return the way for a store's bytes."""

    def fill(self, reservation_id: int, fills: Sequence[pb.Fill], runs: Sequence[StagingRun], timeout_s: float) -> None:
        """Hand over the strips gathered in ``runs``. Returns when the runs are not needed any more. Raises the typed
        error of a failed step."""

    def close(self) -> None:
        """End the session. Idempotent."""


class ClientSession(Plane):
    """Stubs, the metadata of every call, and the returns at the session's end. Each plane has its own subclass."""

    cache: cache_pb2_grpc.CacheServiceStub
    admin: admin_pb2_grpc.AdminServiceStub
    prefills: prefill_pb2_grpc.PrefillServiceStub
    has_prefills = True
    """False once the sidecar has shown that its release has no partial prefills."""
    channel: grpc.Channel
    staging: StagingMemory
    metadata: tuple[tuple[str, str | bytes], ...]
    session_id: int
    server_pid: int
    _is_begun = False
    presence: Presence | None = None
    """The presence table, for lookups without a call; None where there is none."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.ended = threading.Event()
        self.models: dict[bytes, ModelSpec] = {}
        """The registered models. The sidecar may have forgotten some of them: see ``registers_again``."""
        self._earlier_models: dict[bytes, ModelSpec] = {}
        """Those before ``models`` was full. They are registered again when they are used next."""
        self.profiles: set[str] = set()
        """Digests of the profiles that were told in this session."""
        self.returns = Returns(self.ended)

    def _ending(self) -> Callable[[], object]:
        """Return the call that ends the session. It must not keep the session alive."""
        raise NotImplementedError

    def __del__(self) -> None:
        """End a session that nothing refers to any more, neither a client nor a result of one."""
        if self._is_begun and self.is_usable:
            self.returns.soon(self._ending())

    def _use(self, channel: grpc.Channel) -> None:
        """Make the session's calls by a channel."""
        self.channel = channel
        self.cache = cache_pb2_grpc.CacheServiceStub(channel)  # type: ignore[no-untyped-call]  # generated
        self.admin = admin_pb2_grpc.AdminServiceStub(channel)  # type: ignore[no-untyped-call]  # generated
        self.prefills = prefill_pb2_grpc.PrefillServiceStub(channel)  # type: ignore[no-untyped-call]  # generated

    def _leave_to_parent(self) -> None:
        """Keep the channel alive in a forked child, as the calls that are noted."""
        _inherited.append(self.channel)

    def _start_returns(self, timeout_s: float) -> None:
        """Begin to give leases back. Call it once the session is open."""
        self._is_begun = True
        in_children(self._leave_to_parent)
        self.returns.start(partial(_release, self.cache.Release, self.metadata, timeout_s))

    @property
    def is_usable(self) -> bool:
        return not self.ended.is_set() and self.pid == os.getpid()

    @property
    def carried(self) -> tuple[tuple[str, str | bytes], ...]:
        """The metadata of a request's call: the session, and the trace that the request is part of."""
        return (*self.metadata, *trace_headers())

    def _check_process(self) -> None:
        """Raise Unavailable in a forked child. It has none of gRPC's threads: a call there would wait for ever,
        whatever its deadline."""
        if self.pid != os.getpid():
            raise Unavailable("this session is of the process that this one is a fork of: begin anew with the client")

    def call(self, method: Callable[..., Reply], request: object, timeout_s: float) -> Reply:
        """Make a unary call. Raises the typed error of its status."""
        self._check_process()
        try:
            return self.with_model(lambda: typed_call(method, request, timeout_s, self.carried), timeout_s)
        except KVStoreError as error:
            if isinstance(error.__cause__, grpc.RpcError) and error.__cause__.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise self._unknown(request, timeout_s) from error
            raise

    def register(self, spec: ModelSpec, name: bytes, timeout_s: float) -> None:
        """Register a model. ``name``: its fingerprint. Raises the typed error of a failed call; InvalidRequest where
        the sidecar names the model differently."""
        reply = self.call(self.cache.RegisterModel, pb.RegisterModelRequest(spec=spec_to_message(spec)), timeout_s)
        if reply.fingerprint != name:
            raise InvalidRequest("client and sidecar name this model differently: use the same release of both")
        if len(self.models) >= MODELS_MAX:
            self._earlier_models, self.models = self.models, {}
        self.models[name] = spec

    def with_model(self, call: Callable[[], Reply], timeout_s: float) -> Reply:
        """Return what a call returns, which is made once more where the sidecar had forgotten its model. Raises the
        call's error."""
        try:
            return call()
        except KVStoreError as error:
            if not self.registers_again(error, timeout_s):
                raise
        return call()

    def registers_again(self, error: KVStoreError, timeout_s: float) -> bool:
        """Register the model again which the sidecar does not know (any more), as this error of a call says: True, and
        the call is to be repeated, once. False for any other error. Raises as ``register``."""
        told = error.fields.get(UNREGISTERED)
        if not isinstance(told, str):
            return False
        try:
            name = bytes.fromhex(told)
        except ValueError:
            return False
        spec = self.models.get(name) or self._earlier_models.get(name)
        if spec is None:
            return False
        self.register(spec, name, timeout_s)
        return True

    def _unknown(self, request: object, timeout_s: float) -> InvalidRequest:
        """Return the error for a call that the sidecar's release does not have. It names both releases."""
        try:
            status = typed_call(self.admin.Stats, admin_pb.StatsRequest(), timeout_s, self.carried)
            release = f"of release {status.version}"
        except KVStoreError:
            release = "of a release that it does not tell"
        return InvalidRequest(
            f"the sidecar, {release}, does not know {type(request).__name__}, which this client, of release "
            f"{__version__}, sends: run a sidecar of the client's release"
        )

    def give_back(self, call: Callable[[], object]) -> None:
        """Make a call that gives something back. A call without an answer is repeated beside the caller until it has
        one.
        Raises the error of the first attempt."""
        try:
            call()
        except UNANSWERED:
            self.returns.soon(call)
            raise

    def begin(self, method: Any, request: object, timeout_s: float) -> Any:
        """Begin a unary call whose answer is awaited elsewhere; return gRPC's future of it. Raises Unavailable."""
        return self.begun(lambda: method.future(request, timeout=timeout_s, metadata=self.carried))

    def begun(self, begin: Callable[[], Call]) -> Call:
        """Begin a call that threads of gRPC's serve, and note it. Raises Unavailable, also where no thread can be
        had."""
        self._check_process()
        check_threads()
        try:
            return noted(begin())
        except ValueError as error:
            raise Unavailable("the sidecar is gone") from error

    def answer(self, begun: Any) -> Any:
        """Return the answer of a call that is done. Raises the typed error of its status."""
        try:
            return begun.result()
        except grpc.RpcError as error:
            raise translated(error) from error
        except grpc.FutureCancelledError as error:
            raise Unavailable("the sidecar is gone") from error


def check_threads() -> None:
    """Raise Unavailable where no thread can be had. Call it before a call that gRPC starts threads for: it counts on a
    thread that it could not start, and later calls of its channel, and the channel's end, wait for that for ever."""
    start_thread(nothing, "kvstore-check")


def translated(error: grpc.RpcError) -> KVStoreError:
    """Return the typed error of a failed call. A stream is its own error: drop the frames it passed, or they and all
    they hold would hold each other."""
    error.__traceback__ = None
    status, said, metadata = error.code().name, error.details() or "", tuple(error.trailing_metadata() or ())
    if all(key != METADATA_ERROR for key, _ in metadata) and status in UNANSWERED_BY:
        said = f"{UNANSWERED_BY[status]} ({said})"  # these are the words of gRPC, not of a sidecar
    return from_status(status, said, **unpack_fields(metadata))


def typed_call(method: Callable[..., Reply], request: object, timeout_s: float, metadata: object) -> Reply:
    """Make a call of gRPC's. Its failure is a typed error."""
    try:
        return method(request, timeout=timeout_s, metadata=metadata)
    except grpc.RpcError as error:
        raise translated(error) from error
    except ValueError as error:
        raise Unavailable("the sidecar is gone") from error  # the channel was closed under the call


def _release(method: Callable[..., object], metadata: object, timeout_s: float, lease_ids: list[int]) -> None:
    typed_call(method, pb.ReleaseRequest(lease_ids=lease_ids), timeout_s, metadata)
