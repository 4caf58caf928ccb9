"""The synchronous client: validation, misses instead of failures, reconnection. The asyncio client wraps it."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from kvstore.errors import DataLoss, DeadlineExceeded, Exhausted, InvalidRequest, Unauthenticated, Unavailable
from kvstore.keys import Extra, Tokens, chain_digests, fingerprint, token_array
from kvstore.seams import Clock, FaultPoints, SystemClock, WorkerThreads
from kvstore.spec import ChunkState, Durability, Encoding, Exactness, MissReason, ModelSpec, Tier
from kvstore.v1alpha import admin_pb2
from kvstore.v1alpha import cache_pb2 as pb
from kvstore.wire import spec_to_message
from kvstore_client.arrays import presented
from kvstore_client.copying import Copier
from kvstore_client.fetching import FetchedKV, LayerStream, Prefix, Target, Wanted, copy_all, open_prefix
from kvstore_client.match import ChunkMatch, Match, matching_tail, unavailable
from kvstore_client.session import Session
from kvstore_client.staging import StagingPool
from kvstore_client.storing import Receipt, Source, Store

DEFAULT_TIMEOUT_S = 10.0
RECONNECT_INTERVAL_S = 0.5
_EXACTNESS = {Exactness.EXACT: 1, Exactness.DERIVED: 2}
_GONE = (Unavailable, Unauthenticated, DeadlineExceeded)
_log = logging.getLogger("kvstore.client")
Result = TypeVar("Result")


def default_socket() -> Path:
    """$KVSTORE_SOCKET, else the sidecar's default for this user."""
    named = os.environ.get("KVSTORE_SOCKET")
    if named:
        return Path(named.removeprefix("unix://"))
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "kvstore" / "kvstore.sock"
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "kvstore" / "run" / "kvstore.sock"


def connect(address: str | None = None, *, required: bool = True, timeout_s: float = DEFAULT_TIMEOUT_S) -> Client:
    """A client of the sidecar at ``address`` (``unix:///path/kvstore.sock``; default: the user's own).

    ``required=False``: an engine that must start without its sidecar gets a client that misses until it appears.
    Raises: Unavailable naming the socket when nobody answers; InvalidRequest for another kind of address.
    """
    if address is not None and not address.startswith("unix://"):
        raise InvalidRequest(f"address {address!r}: this release speaks to unix:///path/to/kvstore.sock only")
    path = default_socket() if address is None else Path(address.removeprefix("unix://"))
    client = Client(path, timeout_s=timeout_s)
    if required:
        try:
            client.connect_now()
        except BaseException:
            client.close()
            raise
    return client


class Client:
    """Stores and fetches caches. Safe to share between threads; a forked child connects by itself."""

    def __init__(self, socket_path: Path, *, timeout_s: float = DEFAULT_TIMEOUT_S, clock: Clock | None = None) -> None:
        self._path = socket_path
        self._timeout_s = timeout_s
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._retry_at_s = 0.0
        self._has_warned = False
        self._is_closed = False
        self._counters: Counter[str] = Counter()
        self.faults = FaultPoints()
        self._start_threads()

    def _start_threads(self) -> None:
        self._pid = os.getpid()
        self._copier = Copier()
        self._committer = WorkerThreads(1, "kvstore-commit")

    # ------------------------------------------------------------ session

    def connect_now(self) -> Session:
        """The live session, connecting if there is none. Raises Unavailable, at once while backing off."""
        if self._pid != os.getpid():
            self._lock = threading.Lock()
            self._session = None
            self._start_threads()
        with self._lock:
            if self._is_closed:
                raise Unavailable("this client is closed")
            if self._session is not None and self._session.is_usable:
                return self._session
            now = self._clock.monotonic()
            if now < self._retry_at_s:
                raise Unavailable(f"the sidecar at {self._path} is gone; trying again soon")
            self._retry_at_s = now + RECONNECT_INTERVAL_S
            self._session = Session(self._path)
            self._session.staging = StagingPool(self._session)
            self._retry_at_s = 0.0
            self._counters["sessions"] += 1
            self._has_warned = False
            return self._session

    def _ready(self, spec: ModelSpec) -> tuple[Session, bytes]:
        """A session that knows the model, and the model's name there."""
        session = self.connect_now()
        name = fingerprint(spec, spec.kind)
        if name not in session.models:
            request = pb.RegisterModelRequest(spec=spec_to_message(spec))
            reply = session.call(session.cache.RegisterModel, request, self._timeout_s)
            if reply.fingerprint != name:
                raise InvalidRequest("client and sidecar name this model differently: use the same release of both")
            session.models.add(name)
        return session, name

    def _or_gone(self, call: Callable[[], Result], otherwise: Callable[[str], Result]) -> Result:
        """``call``, or ``otherwise`` when the sidecar is gone: one warning, a counter, and the engine goes on."""
        try:
            return call()
        except _GONE as error:
            self._counters["unavailable"] += 1
            if isinstance(error, Unauthenticated) and self._session is not None:
                self._session.close()
            if not self._has_warned:
                self._has_warned = True
                _log.warning("kvstore: %s; going on without it", error.message)
            return otherwise(error.message)

    # ------------------------------------------------------------ lookup

    def lookup(
        self,
        spec: ModelSpec,
        tokens: Any,
        *,
        extras: Sequence[Extra] = (),
        exactness: Exactness = Exactness.EXACT,
    ) -> Match:
        """How much of a prompt's cache is stored, chunk by chunk. Moves nothing, holds nothing."""
        array = token_array(tokens, spec.vocab_size)
        digests = chain_digests(array, spec.chunk_tokens, extras)
        return self._or_gone(
            lambda: self._lookup(spec, array, digests, extras, exactness),
            lambda _: unavailable(spec, array.size),
        )

    def _lookup(
        self,
        spec: ModelSpec,
        tokens: Tokens,
        digests: list[bytes],
        extras: Sequence[Extra],
        exactness: Exactness,
    ) -> Match:
        if not digests:
            return Match(0, ())
        session, name = self._ready(spec)
        query = pb.ChainQuery(fingerprint=name, digests=b"".join(digests), exactness=_EXACTNESS[exactness])  # type: ignore[arg-type]
        reply = session.call(session.cache.Lookup, pb.LookupRequest(query=query), self._timeout_s)
        chunks: list[ChunkMatch] = []
        for run in reply.runs:
            states = ChunkState(run.state), Tier(run.tier), Encoding(run.encoding), MissReason(run.reason)
            for _ in range(run.count):
                start = len(chunks) * spec.chunk_tokens
                chunks.append(ChunkMatch(start, min(start + spec.chunk_tokens, tokens.size), *states))
        prefix = min(reply.hit_count * spec.chunk_tokens, tokens.size)
        tail = matching_tail(tokens, prefix, digests, reply.hit_count, reply.tails, extras)
        return Match(prefix + (tail[0] if tail else 0), tuple(chunks))

    # ------------------------------------------------------------ fetch

    def fetch(
        self,
        spec: ModelSpec,
        tokens: Any,
        *,
        layers: Sequence[int] | None = None,
        heads: range | tuple[int, int] | None = None,
        hidden_layers: Sequence[int] = (),
        into: Sequence[tuple[Any, Any]] | None = None,
        extras: Sequence[Extra] = (),
        exactness: Exactness = Exactness.EXACT,
        verify: bool = False,
    ) -> FetchedKV:
        """The cache of the longest stored prefix, in owned memory or ``into`` the caller's tensors.

        Shapes: per layer (K, V), each [kv_heads, token_count, head_dim]; ``into`` has room for the whole prompt.
        ``heads``: a range of kv heads. ``verify``: hash every strip on the way. Raises: InvalidRequest, Exhausted.
        """
        array = token_array(tokens, spec.vocab_size)
        wanted = Wanted.of(spec, layers, heads, hidden_layers, verify)
        digests = chain_digests(array, spec.chunk_tokens, extras)

        def missed(_: str) -> FetchedKV:
            return self._gather(wanted, None, MissReason.UNAVAILABLE, into)

        return self._or_gone(lambda: self._fetch(wanted, array, digests, extras, exactness, into), missed)

    def _fetch(
        self, wanted: Wanted, tokens: Tokens, digests: list[bytes], extras: Sequence[Extra], exactness: Exactness,
        into: Sequence[tuple[Any, Any]] | None,
    ) -> FetchedKV:  # fmt: skip
        if not digests:
            return self._gather(wanted, None, MissReason.NONE, into)
        try:
            prefix = self._open(wanted, tokens, digests, extras, exactness)
        except DataLoss as error:
            _log.error("kvstore: %s: treated as a miss", error.message)
            return self._gather(wanted, None, MissReason.CORRUPT, into)
        try:
            return self._gather(wanted, prefix, prefix.reason, into)
        finally:
            self._copier.submit(prefix.close)  # making the call costs more than the caller should wait for

    def _open(
        self,
        wanted: Wanted,
        tokens: Tokens,
        digests: list[bytes],
        extras: Sequence[Extra],
        exactness: Exactness,
    ) -> Prefix:
        """The resident chunks, and the partial tail after them when one matches."""
        session, name = self._ready(wanted.spec)
        prefix = open_prefix(session, wanted, name, digests, _EXACTNESS[exactness], self._timeout_s)
        hits = -(-prefix.token_count // wanted.spec.chunk_tokens)
        tail = matching_tail(tokens, prefix.token_count, digests, hits, prefix.tails, extras)
        if tail is None:
            return prefix
        # The tail's digest stands for its whole prefix; ask for the chain with it in the next chunk's place.
        prefix.close()
        chain = [*digests[:hits], tail[1]]
        return open_prefix(session, wanted, name, chain, _EXACTNESS[exactness], self._timeout_s)

    def _gather(
        self, wanted: Wanted, prefix: Prefix | None, reason: MissReason,
        into: Sequence[tuple[Any, Any]] | None,
    ) -> FetchedKV:  # fmt: skip
        count = prefix.token_count if prefix else 0
        target = Target(wanted, count, into)
        good = 0
        if prefix is not None and count:
            good = copy_all(prefix, target, self._copier, self.faults, self._timeout_s)
        dtype, hidden_dtype = wanted.spec.cache_dtype, wanted.spec.hidden_dtype
        planes = target.planes if into is not None else [presented(each, dtype)[:, :good] for each in target.planes]
        result = FetchedKV(zip(planes[::2], planes[1::2], strict=True))
        result.token_count = good
        result.tier = prefix.tier if prefix and good else Tier.NONE
        result.reason = reason if good == count else MissReason.STALE
        result.byte_count = sum(chunk.layout.payload_bytes for chunk in prefix.chunks) if prefix and good else 0
        result.hidden = {layer: presented(each, hidden_dtype)[0, :good] for layer, each in target.hidden.items()}
        self._counters["fetched_bytes"] += result.byte_count
        return result

    def fetch_layers(
        self,
        spec: ModelSpec,
        tokens: Any,
        *,
        layers: Sequence[int] | None = None,
        heads: range | tuple[int, int] | None = None,
        into: Sequence[tuple[Any, Any]] | None = None,
        extras: Sequence[Extra] = (),
        exactness: Exactness = Exactness.EXACT,
        verify: bool = False,
    ) -> LayerStream:
        """Like ``fetch``, layer by layer: (layer, (K, V)) as each lands while the next are copied."""
        array = token_array(tokens, spec.vocab_size)
        wanted = Wanted.of(spec, layers, heads, (), verify)
        digests = chain_digests(array, spec.chunk_tokens, extras)

        def stream(prefix: Prefix | None, reason: MissReason) -> LayerStream:
            target = Target(wanted, prefix.token_count, into) if prefix and prefix.token_count else None
            return LayerStream(prefix, target, self._copier, self.faults, self._clock, reason, self._timeout_s)

        def opened() -> LayerStream:
            if not digests:
                return stream(None, MissReason.NONE)
            try:
                prefix = self._open(wanted, array, digests, extras, exactness)
            except DataLoss as error:
                _log.error("kvstore: %s: treated as a miss", error.message)
                return stream(None, MissReason.CORRUPT)
            return stream(prefix, prefix.reason)

        return self._or_gone(opened, lambda _: stream(None, MissReason.UNAVAILABLE))

    # ------------------------------------------------------------ store

    def store(
        self,
        spec: ModelSpec,
        tokens: Any,
        kv: Sequence[Any],
        *,
        hidden: Mapping[int, Any] | None = None,
        durability: Durability | None = None,
        extras: Sequence[Extra] = (),
        exactness: Exactness = Exactness.EXACT,
    ) -> Receipt:
        """Keep a context's cache. Returns as soon as the tensors may be reused; the receipt tells what was kept.

        Shapes: ``kv`` per layer (K, V), each [kv_heads, tokens, head_dim] in the spec's dtype; ``hidden``
        {layer: [tokens, hidden_size]}. Raises: InvalidRequest naming the argument that is wrong.
        """
        if durability not in (None, Durability.MEMORY):
            raise InvalidRequest(
                f"durability {durability!r}: this sidecar has memory only; no lower tier is configured"
            )
        array = token_array(tokens, spec.vocab_size)
        if not array.size:
            raise InvalidRequest("tokens is empty: there is nothing to store")
        source = Source.of(spec, int(array.size), kv, hidden)
        digests = chain_digests(array, spec.chunk_tokens, extras)

        def run() -> Receipt:
            session, name = self._ready(spec)
            store = Store(session, session.staging, source, self._copier, self.faults, self._timeout_s)
            store.stage(name, array, digests, _EXACTNESS[exactness])
            return Receipt(self._committer.submit(store.commit))

        try:
            return self._or_gone(run, Receipt.nothing)
        except Exhausted as error:
            self._counters["stores_refused"] += 1
            return Receipt.nothing(error.message)

    # ------------------------------------------------------------ the rest

    def stats(self) -> admin_pb2.StatsResponse:
        """What the sidecar holds and has done. Raises Unavailable when it is gone."""
        session = self.connect_now()
        reply: admin_pb2.StatsResponse = session.call(session.admin.Stats, admin_pb2.StatsRequest(), self._timeout_s)
        return reply

    def statistics(self) -> dict[str, int]:
        """This client's own counters: sessions, unavailable, stores_refused, fetched_bytes."""
        return {name: self._counters[name] for name in ("sessions", "unavailable", "stores_refused", "fetched_bytes")}

    def close(self) -> None:
        """Finish what is being committed, end the session. Idempotent."""
        if self._is_closed:
            return
        if self._pid == os.getpid():
            self._committer.close()
            self._copier.close()
        with self._lock:
            self._is_closed = True
            if self._session is not None:
                self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
