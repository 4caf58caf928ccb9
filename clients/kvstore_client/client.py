"""The synchronous client: checks first, misses instead of failures. The asyncio client wraps it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from kvstore.errors import Exhausted
from kvstore.keys import Extra
from kvstore.seams import Clock, FaultPoints, SystemClock, WorkerThreads
from kvstore.spec import Durability, Exactness, MissReason, ModelSpec, Tier
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1alpha import admin_pb2
from kvstore_client.connection import Connection
from kvstore_client.copying import Copier, is_drained
from kvstore_client.fetching import AnyPrefix, FetchedKV, LayerStream, Wanted, copy_all
from kvstore_client.forks import in_children
from kvstore_client.match import Match, chunk_matches, missed_chunks
from kvstore_client.opaque import OpaqueCalls
from kvstore_client.paged import Paged
from kvstore_client.partial import DRIFT_COUNTERS, PartialPrefillCalls
from kvstore_client.prefix import AnySession
from kvstore_client.presence import Answer
from kvstore_client.prompt import Prompt, check_count
from kvstore_client.receipt import Receipt
from kvstore_client.remote.place import TLS, Place, place_of
from kvstore_client.segments.calls import SegmentCalls
from kvstore_client.segments.known import KnownSegments
from kvstore_client.starting import Means
from kvstore_client.tails import first_held, longest_tail, open_longest, peeked_tail
from kvstore_client.target import Places, given_places, target_of
from kvstore_client.transfer import pack_ticket
from kvstore_client.transferring import TransferCalls
from kvstore_client.watching import Watching
from kvstore_client.writer import StoreWriter

DEFAULT_TIMEOUT_S = 10.0
_COUNTERS = ("sessions", "unavailable", "stores_refused", "fetched_bytes", *DRIFT_COUNTERS)


def connect(
    address: str | None = None, *, token: str | None = None, tls: TLS | bool | None = None, required: bool = True,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Client:  # fmt: skip
    """A client of the sidecar at ``address``: ``unix:///path/kvstore.sock`` (default: the user's own), whose bytes go
    through shared memory, or ``HOST:PORT``, whose bytes travel with the calls; that needs a ``token`` (default:
    $KVSTORE_TOKEN), and ``tls`` unless it is this host (True: signed by whom the system trusts). ``client.plane``
    says which.

    ``required=False``: an engine that must start without its sidecar gets a client that misses until it appears.
    Raises: Unavailable naming the address when nobody answers; Unauthenticated for a wrong token; InvalidRequest for
    another kind of address.
    """
    client = Client(place_of(address, token, tls), timeout_s=timeout_s)
    if required:
        try:
            client.connect_now()
        except BaseException:
            client.close()
            raise
    return client


class Client(Watching, OpaqueCalls, SegmentCalls, TransferCalls, PartialPrefillCalls):
    """Stores and fetches caches. Safe to share between threads; a forked child connects by itself."""

    def __init__(self, place: Place, *, timeout_s: float = DEFAULT_TIMEOUT_S, clock: Clock | None = None) -> None:
        self._timeout_s = timeout_s
        self._clock = clock or SystemClock()
        self._connection = Connection(place, self._clock, timeout_s)
        self._is_closed = False
        self._known = KnownSegments()
        self.faults = FaultPoints()
        self._start_threads()
        in_children(self._start_threads)

    def _start_threads(self) -> None:
        """Also in a forked child, which does not have its parent's."""
        self._copier = Copier()
        self._committer = WorkerThreads(1, "kvstore-commit")

    @property
    def plane(self) -> str:
        """How bytes come: "local", through shared memory, or "remote", with the calls."""
        return self._connection.place.plane

    def connect_now(self) -> Any:
        """The live session, connecting if there is none. Raises Unavailable, at once while backing off."""
        return self._connection.session()

    def _ready(self, spec: ModelSpec) -> tuple[AnySession, bytes]:
        return self._connection.ready(spec)

    # ------------------------------------------------------------ lookup

    def lookup(
        self,
        spec: ModelSpec,
        tokens: Any,
        *,
        segments: Sequence[range | tuple[int, int]] | None = None,
        hold: bool = False,
        readers: int = 1,
        extras: Sequence[Extra] = (),
        exactness: Exactness = Exactness.EXACT,
    ) -> Match:
        """How much of a prompt's cache is stored, chunk by chunk. Moves nothing, and holds nothing unless asked to:
        with ``hold`` the match has a ticket, and what hit stays for ``readers`` fetches by it, from any process of
        the user, until the ticket expires (limits.ticket_age_s_max). ``tokens``: here and elsewhere also PageHashes.
        ``segments``: the runs (start, stop) of the prompt that are documents; the match tells what is stored of each.
        Raises: InvalidRequest, Exhausted."""
        prompt = Prompt.of(spec, tokens, extras, exactness)
        check_count(readers, "readers")
        cut = self._cut(prompt, segments, exactness)
        if not prompt.digests:
            return Match(0, ())

        def missed(_: str) -> Match:
            chunks = missed_chunks(spec.chunk_tokens, 0, prompt.token_count, MissReason.UNAVAILABLE)
            return Match(0, chunks, segments=self._matched(cut, (), 0))

        return self._connection.or_gone(lambda: self._lookup(prompt, readers if hold else 0, cut), missed)

    def peek(
        self, spec: ModelSpec, tokens: Any, *, hold: bool = False, extras: Sequence[Extra] = (),
        exactness: Exactness = Exactness.EXACT,
    ) -> Match | None:  # fmt: skip
        """As ``lookup``, at once: what shows in shared memory. None where only a call can tell, or hold what hits: for
        a caller that waits for nobody. Raises: InvalidRequest."""
        prompt = Prompt.of(spec, tokens, extras, exactness)
        if not prompt.digests:
            return Match(0, ())
        session, name = self._connection.at_hand(prompt.spec) or (None, b"")
        if session is None or session.presence is None:
            return None
        seen = session.presence.answer([prompt.chain(name, prompt.digests)], int(hold))
        if seen is None:
            return None
        step, count = spec.chunk_tokens, prompt.token_count
        prefix = min(seen.hit_count * step, count)
        tail = peeked_tail(session.presence, name, prompt, prefix, seen)
        if tail is None or (tail and hold):
            return None
        return Match(prefix + tail, chunk_matches(seen.runs, step, 0, count))

    def _lookup(self, prompt: Prompt, readers: int, cut: Sequence[tuple[range, Prompt]]) -> Match:
        step, count = prompt.spec.chunk_tokens, prompt.token_count
        reply = self._ask(prompt, prompt.digests, readers, [each for _, each in cut])
        chunks = chunk_matches(reply.runs, step, 0, count)
        hits, ticket = reply.hit_count, reply.ticket
        prefix = min(hits * step, count)
        digests, longer = prompt.digests[:hits], None
        try:
            tail = longest_tail(
                prompt, prefix, hits, reply,
                lambda names: first_held(*self._ready(prompt.spec), prompt, (), self._timeout_s, names),
            )  # fmt: skip
            longer = self._ask(prompt, [*digests, tail[1]], readers) if tail and readers else None
        except BaseException as error:
            if not ticket or not isinstance(error, Exhausted):
                self.release_ticket(ticket)  # nobody else knows of it
                raise
            tail = None  # there is room for one ticket, and not for two at a time: the whole chunks are held
        if tail and longer:
            if longer.hit_count > hits:
                self.release_ticket(ticket)
                ticket, digests = longer.ticket, [*digests, tail[1]]
            else:
                self.release_ticket(longer.ticket)
                tail = None
        prefix += tail[0] if tail else 0
        held = pack_ticket(ticket, prompt.spec, digests, prompt.exactness, prefix) if ticket else None
        return Match(prefix, chunks, held, self._matched(cut, reply.segments, prefix))

    def _ask(
        self, prompt: Prompt, digests: Sequence[bytes], readers: int, segments: Sequence[Prompt] = ()
    ) -> pb.LookupResponse | Answer:
        session, name = self._ready(prompt.spec)
        if session.presence is not None:
            chains = [each.chain(name, each.digests) for each in segments]
            chains.insert(0, prompt.chain(name, digests))
            seen = session.presence.answer(chains, readers)
            if seen is not None:
                return seen
        query = prompt.query(name, digests)
        queries = [each.query(name, each.digests) for each in segments]
        request = pb.LookupRequest(query=query, hold=readers > 0, readers=readers, segments=queries)
        reply: pb.LookupResponse = session.call(session.cache.Lookup, request, self._timeout_s)
        return reply

    # ------------------------------------------------------------ fetch

    def fetch(
        self,
        spec: ModelSpec,
        tokens: Any,
        *,
        layers: Sequence[int] | None = None,
        heads: range | tuple[int, int] | None = None,
        hidden_layers: Sequence[int] = (),
        into: Sequence[Any] | Paged | None = None,
        extras: Sequence[Extra] = (),
        exactness: Exactness = Exactness.EXACT,
        verify: bool = False,
    ) -> FetchedKV:
        """The cache of the longest stored prefix, in owned memory or ``into`` the caller's tensors.

        Shapes: per layer (K, V), each [kv_heads, token_count, head_dim], or E (see ``FetchedKV``); ``into`` has room
        for the whole prompt; ``Paged`` pages get it where their slots say, and the list has their views.
        ``heads``: a range of kv heads. ``verify``: hash every strip on the way. Raises: InvalidRequest, Exhausted;
        Internal where a copy hangs that may still write to ``into``.
        """
        prompt = Prompt.of(spec, tokens, extras, exactness)
        return self._get(prompt, Wanted.of(prompt.spec, layers, heads, hidden_layers, verify), into)

    def _get(self, prompt: Prompt, wanted: Wanted, into: Any) -> FetchedKV:
        given = given_places(wanted, into)
        if not prompt.digests:
            return self._gather(wanted, None, MissReason.NONE, given)
        return self._connection.or_gone(
            lambda: self._fetch(wanted, prompt, given),
            lambda _: self._gather(wanted, None, MissReason.UNAVAILABLE, given),
        )

    def _fetch(self, wanted: Wanted, prompt: Prompt, given: Places) -> FetchedKV:
        prefix = self._open(wanted, prompt)
        if isinstance(prefix, MissReason):
            return self._gather(wanted, None, prefix, given)
        try:
            return self._gather(wanted, prefix, prefix.reason, given)
        finally:
            prefix.close()

    def _open(self, wanted: Wanted, prompt: Prompt) -> AnyPrefix | MissReason:
        """The resident chunks, or, where it shows without a call that there are none, why. When a limit on leases is
        in the way, once more after ours are given back."""
        session, name = self._ready(wanted.spec)
        if session.presence is not None:
            seen = session.presence.look_up([prompt.chain(name, prompt.digests)])
            if seen is not None and not seen[0].hit_count and not seen[0].has_tails:
                session.presence.count(fetch_calls=1, fetch_miss_chunks=len(prompt.digests))
                return MissReason(seen[0].runs[0].reason or MissReason.COLD)
        try:
            return open_longest(session, name, wanted, prompt, self._timeout_s)
        except Exhausted:
            session.returns.settle(self._timeout_s)
            return open_longest(session, name, wanted, prompt, self._timeout_s)

    def _gather(self, wanted: Wanted, prefix: AnyPrefix | None, reason: MissReason, given: Places) -> FetchedKV:
        count = prefix.token_count if prefix else 0
        target = target_of(wanted, count, given)
        good = 0
        if prefix is not None and count:
            good = copy_all(prefix, target, self._copier, self.faults, self._timeout_s)
            reason = prefix.reason
        result = FetchedKV(target.layer(position, good) for position in range(len(wanted.layers)))
        result.token_count, result.exactness = good, prefix.exactness if prefix else Exactness.EXACT
        result.tier = prefix.tier if prefix and good else Tier.NONE
        result.reason = reason
        result.byte_count = wanted.byte_count(good)
        result.hidden = {layer: target.rows(layer, good) for layer in wanted.hidden_layers}
        self._connection.counters["fetched_bytes"] += result.byte_count
        return result

    def fetch_layers(
        self,
        spec: ModelSpec,
        tokens: Any,
        *,
        layers: Sequence[int] | None = None,
        heads: range | tuple[int, int] | None = None,
        into: Sequence[Any] | Paged | None = None,
        extras: Sequence[Extra] = (),
        exactness: Exactness = Exactness.EXACT,
        verify: bool = False,
    ) -> LayerStream:
        """Like ``fetch``, layer by layer: (layer, (K, V)) as each lands while the next are copied."""
        prompt = Prompt.of(spec, tokens, extras, exactness)
        return self._stream(prompt, Wanted.of(prompt.spec, layers, heads, (), verify), into)

    def _stream(self, prompt: Prompt, wanted: Wanted, into: Any) -> LayerStream:
        given = given_places(wanted, into)
        if not prompt.digests:
            return self._no_layers(MissReason.NONE)
        return self._connection.or_gone(
            lambda: self._layers_of(self._open(wanted, prompt), wanted, given),
            lambda _: self._no_layers(MissReason.UNAVAILABLE),
        )

    def _no_layers(self, reason: MissReason) -> LayerStream:
        return LayerStream(None, None, self._copier, self.faults, self._clock, reason, self._timeout_s)

    def _layers_of(self, prefix: AnyPrefix | MissReason, wanted: Wanted, given: Places) -> LayerStream:
        if isinstance(prefix, MissReason):
            return self._no_layers(prefix)
        if not prefix.token_count:
            prefix.close()
            return self._no_layers(prefix.reason)
        try:
            target = target_of(wanted, prefix.token_count, given)
        except BaseException:
            prefix.close()
            raise
        return LayerStream(prefix, target, self._copier, self.faults, self._clock, prefix.reason, self._timeout_s)

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
        exactness: Exactness | None = None,
    ) -> Receipt:
        """Keep a context's cache. Returns as soon as the tensors may be reused; the receipt tells what was kept.

        Shapes: ``kv`` per layer (K, V), each [kv_heads, tokens, head_dim] in the spec's dtype, or E,
        [tokens, hidden_size], where the spec keeps that; ``hidden`` {layer: [tokens, hidden_size]}. ``durability``:
        what the receipt's ``wait`` waits for; None: the highest level the sidecar has. ``exactness`` None: exact, and
        refused for what is known to be derived. Raises: InvalidRequest.
        """
        return self._keep(Prompt.of(spec, tokens, extras, exactness), kv, hidden, durability)

    def _keep(
        self, prompt: Prompt, kv: Sequence[Any], hidden: Mapping[int, Any] | None, durability: Durability | None
    ) -> Receipt:
        return self._means().keep(prompt, kv, hidden, durability, self.faults)

    def start_store(
        self,
        spec: ModelSpec,
        tokens: Any,
        *,
        shards: int = 1,
        hidden_layers: Sequence[int] = (),
        durability: Durability | None = None,
        extras: Sequence[Extra] = (),
        exactness: Exactness | None = None,
    ) -> StoreWriter:
        """A store that is written as the engine goes: ``put_layer``, again and again, then ``commit``. ``tokens``: all
        of the prompt. ``shards``: how many writers there are, each with its heads or layers; the last one's commit
        publishes, and one that goes aborts all. The others ``join_store`` by the writer's ticket. Raises:
        InvalidRequest."""
        prompt = Prompt.of(spec, tokens, extras, exactness)
        return self._means().start(prompt, hidden_layers, shards, durability)

    def join_store(
        self, ticket: bytes, shard: int, *, durability: Durability | None = None, exactness: Exactness | None = None
    ) -> StoreWriter:  # fmt: skip
        """Write shard 1, 2, ... of a store that another process started. ``exactness``: the store's, said again.
        Raises: InvalidRequest, also for a store that ended."""
        return self._means().join(ticket, shard, durability, exactness)

    def _means(self) -> Means:
        return Means(self._connection, self._ready, self._copier, self._committer, self._timeout_s)

    # ------------------------------------------------------------ the rest

    def stats(self) -> admin_pb2.StatsResponse:
        """What the sidecar holds and has done. Raises Unavailable when it is gone."""
        session = self.connect_now()
        reply: admin_pb2.StatsResponse = session.call(session.admin.Stats, admin_pb2.StatsRequest(), self._timeout_s)
        return reply

    def statistics(self) -> dict[str, int]:
        """This client's own counters: sessions, unavailable, stores_refused, fetched_bytes, and the gate's."""
        return {name: self._connection.counters[name] for name in _COUNTERS}

    def close(self) -> None:
        """Finish what is being committed, as long as a call may take, and end the session. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if not is_drained(self._committer, self._timeout_s):
            self._connection.close()  # what still waits for the sidecar ends now
        self._committer.close()
        self._copier.close()
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
