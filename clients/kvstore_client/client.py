"""The synchronous client: checks arguments first; a lost sidecar is a miss. The asyncio client wraps it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from kvstore.keys import Extra
from kvstore.planning import Recompute
from kvstore.planning.loading import LoadPlan, Way
from kvstore.seams import Clock, SystemClock
from kvstore.spec import Durability, Exactness, ModelSpec
from kvstore.v1alpha import admin_pb2
from kvstore_client.arrays import Buffer, Layer, Tensor
from kvstore_client.context import Context
from kvstore_client.fetch import calls as fetches
from kvstore_client.fetch import held as tickets
from kvstore_client.fetch.fetched import FetchedKV
from kvstore_client.fetch.paged import Paged
from kvstore_client.fetch.stream import LayerStream
from kvstore_client.fetch.target import Into
from kvstore_client.fetch.transfer import Transfer
from kvstore_client.fetch.wanted import Heads, Wanted
from kvstore_client.forks import in_children
from kvstore_client.gate import DRIFT_COUNTERS, Gate, connected
from kvstore_client.loading import GIVEN_UP, Planner
from kvstore_client.lookup import calls as lookups
from kvstore_client.lookup.locate import Location, locate
from kvstore_client.lookup.match import Match
from kvstore_client.lookup.watch import Watch
from kvstore_client.opaque import calls as opaque
from kvstore_client.opaque.encoder import encoder_namespace, packed, unpacked
from kvstore_client.planes.place import Place
from kvstore_client.planes.session import ClientSession
from kvstore_client.prompt import GivenTokens, Prompt, check_count, preamble_tokens
from kvstore_client.segments.known import KnownSegments
from kvstore_client.segments.runs import GivenRun, named_segments
from kvstore_client.store import calls as stores
from kvstore_client.store.receipt import Receipt
from kvstore_client.store.writer import StoreWriter

if TYPE_CHECKING:
    from kvstore_client.recompute import ModelRunner, PartialPrefill

DEFAULT_TIMEOUT_S = 10.0
_COUNTERS = ("sessions", "unavailable", "stores_refused", "fetched_bytes", GIVEN_UP, *DRIFT_COUNTERS)


class Client:
    """Stores and fetches caches. Safe to share between threads; a forked child connects by itself (docs/remote.md)."""

    def __init__(self, place: Place, *, timeout_s: float = DEFAULT_TIMEOUT_S, clock: Clock | None = None) -> None:
        self._context = Context.begin(place, clock or SystemClock(), timeout_s)
        self.faults = self._context.faults
        self._is_closed = False
        self._known = KnownSegments()
        self.planner = Planner(self._context)
        in_children(self._start_threads)

    def _start_threads(self) -> None:
        """Start new threads in a forked child, which has none of its parent's."""
        self._context = self._context.with_threads()

    @property
    def plane(self) -> str:
        """The path of the bytes: "local" (shared memory) or "remote" (sent with the calls)."""
        return self._context.connection.place.plane

    def connect_now(self) -> ClientSession:
        """Return the live session; connect if there is none. Raises Unavailable, at once while backing off."""
        return self._context.connection.session()

    # ------------------------------------------------------------ lookup
    def lookup(
        self, spec: ModelSpec, tokens: GivenTokens, *, segments: Sequence[GivenRun] | None = None,
        preamble: GivenTokens = (), hold: bool = False, readers: int = 1, extras: Sequence[Extra] = (),
        exactness: Exactness = Exactness.EXACT,
    ) -> Match:  # fmt: skip
        """Return how much of a prompt's cache is stored, chunk by chunk. Moves no bytes, and holds nothing by default:
        with ``hold`` the match has a ticket, which keeps the stored chunks in memory for ``readers`` fetches by any
        process of the user, until it expires (limits.ticket_age_s_max). ``tokens``: here and elsewhere also PageHashes.
        ``segments``: the prompt's runs (start, stop) that are documents; the match tells what is stored of each,
        computed behind the ``preamble`` that begins the prompt, or alone. Raises: InvalidRequest, Exhausted."""
        prompt = Prompt.of(spec, tokens, extras, exactness)
        check_count(readers, "readers")
        found = named_segments(prompt, segments, exactness, preamble)
        return lookups.look_up(self._context, prompt, readers if hold else 0, found, self._known)

    def peek(
        self, spec: ModelSpec, tokens: GivenTokens, *, hold: bool = False, extras: Sequence[Extra] = (),
        exactness: Exactness = Exactness.EXACT,
    ) -> Match | None:  # fmt: skip
        """Look up in shared memory only, so without waiting. Returns None where an answer, or a hold on the chunks,
        takes a call. Raises: InvalidRequest."""
        return lookups.peek(self._context, Prompt.of(spec, tokens, extras, exactness), hold=hold)

    def plan(
        self, spec: ModelSpec, tokens: GivenTokens, *, step_tokens: int = 0, extras: Sequence[Extra] = (),
        exactness: Exactness = Exactness.EXACT,
    ) -> LoadPlan:  # fmt: skip
        """Return the plan with the soonest first token: every candidate, the winner and why. It uses the measured rates
        of tiers and of this client's engines. ``step_tokens``: rows of one forward pass, 0: all. Loads nothing. Raises
        as ``lookup``."""
        count = Prompt.of(spec, tokens, extras, exactness).token_count
        match = self.lookup(spec, tokens, extras=extras, exactness=exactness)
        return self.planner.plan(spec, match, count, count - 1, step_tokens, frozenset(Way))

    def locate(
        self, spec: ModelSpec, tokens: GivenTokens, *, extras: Sequence[Extra] = (),
        exactness: Exactness = Exactness.EXACT,
    ) -> Location:  # fmt: skip
        """Return the nodes and tiers that have a context's prefix. Moves and holds nothing. ``tokens`` may be
        PageHashes, to look for an engine's own block hashes. Raises: InvalidRequest."""
        return locate(self._context, [Prompt.of(spec, tokens, extras, exactness)])[0]

    def locate_each(
        self, spec: ModelSpec, contexts: Sequence[GivenTokens], *, exactness: Exactness = Exactness.EXACT
    ) -> list[Location]:
        """Call ``locate`` for all contexts in one request. Raises: InvalidRequest, also for more than 16,384 chunks."""
        return locate(self._context, [Prompt.of(spec, tokens, (), exactness) for tokens in contexts])

    def watch(self, *, tenant: str = "") -> Watch:
        """Watch which chunks become visible, go and move from now on. ``tenant``: empty, or the session's own. Raises:
        Unavailable when the sidecar is gone, DeadlineExceeded when it does not answer, PermissionDenied for another
        tenant, Exhausted past limits.watcher_count_max."""
        return Watch(self.connect_now(), tenant, self._context.timeout_s)

    # ------------------------------------------------------------ fetch
    def fetch(
        self, spec: ModelSpec, tokens: GivenTokens, *, layers: Sequence[int] | None = None, heads: Heads | None = None,
        hidden_layers: Sequence[int] = (), into: Into = None, extras: Sequence[Extra] = (),
        exactness: Exactness = Exactness.EXACT, verify: bool = False,
    ) -> FetchedKV:  # fmt: skip
        """Fetch the cache of the longest stored prefix, into owned memory or ``into`` the caller's tensors.

        Shapes: per layer (K, V), each [kv_heads, token_count, head_dim], or E (see ``FetchedKV``). ``into`` has room
        for the whole prompt; with ``Paged``, the slots say where tokens go, and the list has views of the pages.
        ``heads``: a range of kv heads. ``verify``: hash every strip on the way. Raises: InvalidRequest, Exhausted;
        Internal where a copy hangs that may still write to ``into``.
        """
        prompt = Prompt.of(spec, tokens, extras, exactness)
        return fetches.fetch(self._context, prompt, Wanted.of(prompt.spec, layers, heads, hidden_layers, verify), into)

    def fetch_layers(
        self, spec: ModelSpec, tokens: GivenTokens, *, layers: Sequence[int] | None = None, heads: Heads | None = None,
        into: Into = None, extras: Sequence[Extra] = (), exactness: Exactness = Exactness.EXACT, verify: bool = False,
    ) -> LayerStream:  # fmt: skip
        """Like ``fetch``, layer by layer: yield (layer, (K, V)) as each lands, while the next layers are copied."""
        prompt = Prompt.of(spec, tokens, extras, exactness)
        return fetches.stream(self._context, prompt, Wanted.of(prompt.spec, layers, heads, (), verify), into)

    def start_fetch(
        self, ticket: bytes, *, into: Into = None, layers: Sequence[int] | None = None, heads: Heads | None = None,
        verify: bool = False,
    ) -> Transfer:  # fmt: skip
        """Begin to fetch what a ticket holds, and return at once; failures show in the transfer. A ticket that has
        ended may still serve, while its chunks lie where it says. A writer's ticket joins its store: layers come as
        they are put, and count once ``wait`` returns, after the commit. Raises: InvalidRequest."""
        return fetches.redeem(self._context, ticket, into, layers, heads, verify)

    def start_fetch_prefix(
        self, spec: ModelSpec, tokens: GivenTokens, *, into: Into = None, layers: Sequence[int] | None = None,
        heads: Heads | None = None, hidden_layers: Sequence[int] = (), extras: Sequence[Extra] = (),
        exactness: Exactness = Exactness.EXACT, verify: bool = False,
    ) -> Transfer:  # fmt: skip
        """Begin to fetch the longest stored prefix, as ``fetch`` does. Returns once the sidecar has said what is
        stored: the transfer's ``token_count``, 0 for a miss, and ``reason``. ``hidden_layers``: their E comes after the
        layers, and only tokens that have it count. Raises: InvalidRequest, Exhausted."""
        prompt = Prompt.of(spec, tokens, extras, exactness)
        wanted = Wanted.of(prompt.spec, layers, heads, hidden_layers, verify)
        return fetches.start_fetch(self._context, prompt, wanted, into)

    def release_ticket(self, ticket: bytes | None) -> None:
        """Release what a match's ticket holds, when nobody will redeem it. From then on its chunks may leave, also
        under a fetch by it. None and unknown tickets are ignored."""
        tickets.release(self._context, ticket)

    # ------------------------------------------------------------ store
    def store(
        self, spec: ModelSpec, tokens: GivenTokens, kv: Sequence[Layer] | Paged, *, extras: Sequence[Extra] = (),
        hidden: Mapping[int, Tensor] | None = None, durability: Durability | None = None,
        exactness: Exactness | None = None,
    ) -> Receipt:  # fmt: skip
        """Keep a context's cache. Returns as soon as the tensors may be reused; the receipt tells what was kept.

        Shapes: ``kv`` per layer (K, V), each [kv_heads, tokens, head_dim] in the spec's dtype, or E, [tokens,
        hidden_size], where the spec keeps that, or all in ``Paged``; ``hidden`` {layer: [tokens, hidden_size]}.
        ``durability``: the level that the receipt's ``wait`` waits for, None: LOCAL; one that is named may come sooner.
        ``exactness`` None: exact, and refused for a cache known to be derived. Raises: InvalidRequest."""
        return stores.keep(self._context, Prompt.of(spec, tokens, extras, exactness), kv, hidden, durability)

    def start_store(
        self, spec: ModelSpec, tokens: GivenTokens, *, shards: int = 1, hidden_layers: Sequence[int] = (),
        durability: Durability | None = None, extras: Sequence[Extra] = (), exactness: Exactness | None = None,
    ) -> StoreWriter:  # fmt: skip
        """Begin a store that the engine writes layer by layer: ``put_layer``, again and again, then ``commit``.
        ``tokens``: the whole prompt. ``shards``: the number of writers, each with its heads or layers. The others
        ``join_store`` by the writer's ticket. The last commit publishes; a writer that is lost aborts all. Raises:
        InvalidRequest."""
        prompt = Prompt.of(spec, tokens, extras, exactness)
        return stores.start_store(self._context, prompt, hidden_layers, shards, durability)

    def join_store(
        self, ticket: bytes, shard: int, *, durability: Durability | None = None, exactness: Exactness | None = None
    ) -> StoreWriter:  # fmt: skip
        """Write shard 1, 2, ... of a store that another process started. ``exactness``: the same as that store's.
        Raises: InvalidRequest, also for a store that ended."""
        return stores.join(self._context, ticket, shard, durability, exactness)

    def store_segment(
        self, spec: ModelSpec, tokens: GivenTokens, kv: Sequence[Layer] | Paged, *,
        hidden: Mapping[int, Tensor] | None = None, preamble: GivenTokens = (), durability: Durability | None = None,
        extras: Sequence[Extra] = (), exactness: Exactness | None = None,
    ) -> Receipt:  # fmt: skip
        """Keep a document's cache that was computed alone, or behind a ``preamble`` (a chat template's beginning, say):
        K rotated from 0, or from the preamble's end. A lookup finds it by its tokens and the preamble's, at any place
        in a prompt, never as a prompt's prefix. Shapes as in ``store``, of the document's tokens; positions of
        ``extras`` count from its first token. Raises: InvalidRequest."""
        prompt = Prompt.segment(spec, tokens, extras, exactness, preamble)
        receipt = stores.keep(self._context, prompt, kv, hidden, durability)
        self._known.learn(prompt)
        return receipt

    def fetch_segment(
        self, spec: ModelSpec, tokens: GivenTokens, *, layers: Sequence[int] | None = None, heads: Heads | None = None,
        hidden_layers: Sequence[int] = (), into: Into = None, preamble: GivenTokens = (), extras: Sequence[Extra] = (),
        exactness: Exactness = Exactness.EXACT, verify: bool = False,
    ) -> FetchedKV:  # fmt: skip
        """Fetch a document's cache as it was computed, alone or behind the ``preamble``: K is rotated for its positions
        there. Brings as much of the document's beginning as is stored; everything else as in ``fetch``."""
        prompt = Prompt.segment(spec, tokens, extras, exactness, preamble)
        wanted = Wanted.of(prompt.spec, layers, heads, hidden_layers, verify)
        return self._known.seen(prompt, fetches.fetch(self._context, prompt, wanted, into))

    def fetch_segment_layers(
        self, spec: ModelSpec, tokens: GivenTokens, *, layers: Sequence[int] | None = None, heads: Heads | None = None,
        into: Into = None, preamble: GivenTokens = (), extras: Sequence[Extra] = (),
        exactness: Exactness = Exactness.EXACT, verify: bool = False,
    ) -> LayerStream:  # fmt: skip
        """Like ``fetch_segment``, layer by layer; ``token_count`` says at once how much of the document is stored."""
        prompt = Prompt.segment(spec, tokens, extras, exactness, preamble)
        wanted = Wanted.of(prompt.spec, layers, heads, (), verify)
        return self._known.seen(prompt, fetches.stream(self._context, prompt, wanted, into))

    def start_fetch_segment(
        self, spec: ModelSpec, tokens: GivenTokens, *, into: Into = None, layers: Sequence[int] | None = None,
        heads: Heads | None = None, hidden_layers: Sequence[int] = (), preamble: GivenTokens = (),
        extras: Sequence[Extra] = (), exactness: Exactness = Exactness.EXACT, verify: bool = False,
    ) -> Transfer:  # fmt: skip
        """Begin to fetch a document's cache: ``start_fetch_prefix`` with the document of ``fetch_segment``."""
        prompt = Prompt.segment(spec, tokens, extras, exactness, preamble)
        wanted = Wanted.of(prompt.spec, layers, heads, hidden_layers, verify)
        return self._known.seen(prompt, fetches.start_fetch(self._context, prompt, wanted, into))

    def find_segments(self, spec: ModelSpec, tokens: GivenTokens, *, preamble: GivenTokens = ()) -> list[range]:
        """Return the places in a text of documents that this client stored, fetched or looked up, alone or behind this
        ``preamble``, confirmed by the digest of all their tokens. Documents of fewer than 32 tokens, or with extras,
        are not found. Makes no call. Raises: InvalidRequest."""
        return self._known.find_in(Prompt.of(spec, tokens, (), Exactness.EXACT), preamble_tokens(preamble, spec))

    def put_bytes(
        self, namespace: str, key: str | bytes, data: Buffer, *, durability: Durability | None = None
    ) -> Receipt:  # fmt: skip
        """Keep a value under a key, in place of the key's old value. Returns as soon as ``data`` may be reused; the
        receipt tells what was kept: all or nothing. Of two puts of one key at a time, one stays, whole. Values stay on
        their node, since another would find replaced ones: ``durability`` is LOCAL at most. ``data``: bytes, or a
        contiguous array or CPU tensor. Raises: InvalidRequest naming what is wrong."""
        return self.put_pieces(namespace, key, [data], durability=durability)

    def put_pieces(
        self, namespace: str, key: str | bytes, pieces: Sequence[Buffer], *, durability: Durability | None = None,
        replace: bool = True,
    ) -> Receipt:  # fmt: skip
        """As ``put_bytes``, with a value that lies in several buffers. ``replace=False`` keeps the key's old value and
        sends nothing then: for keys whose value never changes, of one chunk (4 MiB without 64 bytes)."""
        return opaque.put(self._context, namespace, key, pieces, durability, replace=replace)

    def get_bytes(
        self, namespace: str, key: str | bytes, *, into: Buffer | None = None, verify: bool = False
    ) -> NDArray[np.uint8] | None:  # fmt: skip
        """Return a key's value, whole, as an array of bytes: owned memory, or ``into``, which is as long as the value.
        None: there is none; ``into`` holds anything. ``verify``: hash each strip. Raises: InvalidRequest, Exhausted."""
        return opaque.get(self._context, namespace, key, into, verify=verify)

    def get_each(
        self, namespace: str, keys: Sequence[str | bytes], targets: Sequence[Buffer], *, verify: bool = False
    ) -> list[bool]:
        """Fetch values of known sizes, in one call, each into its target: a buffer, or a list of buffers that are one
        run. False: there is no value, it has another size, or it was replaced meanwhile; that target's bytes are then
        undefined. Raises: InvalidRequest, Exhausted."""
        return opaque.get_each(self._context, namespace, keys, targets, verify=verify)

    def put_each(
        self, namespace: str, keys: Sequence[str | bytes], values: Sequence[Buffer], *, timeout_s: float = 30.0
    ) -> list[bool]:
        """Keep values of keys whose value never changes: a stored value is not sent again. Each is a buffer, or a list
        of buffers that are one run. Returns when all are stored, after ``timeout_s``, or once a call was not answered
        in time: True for each that is stored. ``values`` may be reused then. Raises: InvalidRequest."""
        return opaque.put_each(self._context, namespace, keys, values, timeout_s)

    def exists(self, namespace: str, keys: str | bytes | Sequence[str | bytes]) -> Any:
        """Return True when a key has a value; for a sequence of keys, a list of such answers. Moves no bytes of a value
        of one chunk (4 MiB). Raises: InvalidRequest."""
        asked = [keys] if isinstance(keys, str | bytes) else keys
        found = opaque.exists(self._context, namespace, asked)
        return found if asked is keys else found[0]

    def count_leading(self, namespace: str, keys: Sequence[str | bytes]) -> int:
        """Return the number of leading keys that have a value."""
        return opaque.count_leading(self._context, namespace, keys)

    def put_encoder(
        self, spec: ModelSpec, key: str | bytes, embeddings: Tensor, *, dtype: str | None = None
    ) -> Receipt:
        """Keep an item's embeddings [tokens, hidden]. ``dtype``: the real one of unsigned integers (bfloat16, say)."""
        return self.put_bytes(encoder_namespace(spec), key, packed(embeddings, dtype))

    def get_encoder(self, spec: ModelSpec, key: str | bytes) -> Tensor | None:
        """Return an item's embeddings in owned memory, or None: a tensor when the process uses torch, else an array."""
        found = self.get_bytes(encoder_namespace(spec), key)
        return None if found is None else unpacked(found)

    def has_encoder(self, spec: ModelSpec, keys: str | bytes | Sequence[str | bytes]) -> Any:
        """Return True when an item's embeddings are stored; for a sequence of hashes, a list of such answers."""
        return self.exists(encoder_namespace(spec), keys)

    @property
    def gate(self) -> Gate:
        """The gate that allows lossy reuse when ``recompute`` is None, and checks its quality: a ``Gate`` over this
        user's profiles. Set another for another floor, directory or check interval."""
        # Threads that come here at once all get the gate of the first.
        found: Gate = vars(self).get("_gate") or vars(self).setdefault("_gate", connected(Gate(), self._context))
        return found

    @gate.setter
    def gate(self, gate: Gate) -> None:
        vars(self)["_gate"] = connected(gate, self._context)

    def fetch_projected(
        self, runner: ModelRunner, tokens: GivenTokens, *, step_tokens: int | None = None, extras: Sequence[Extra] = (),
        verify: bool = False,
    ) -> FetchedKV:  # fmt: skip
        """Fetch the longest stored prefix of a model whose spec keeps E in the place of KV: the runner projects each
        layer's K and V as its E lands, while later layers' E is on its way.

        Shapes as in ``fetch``, on the runner's device; ``byte_count``: bytes of E. ``step_tokens``: rows projected at a
        time (None: a chunk): same bits as a prefill in these steps, otherwise same within rounding. Lost E makes all of
        it a miss. Needs torch. Raises: InvalidRequest for a spec that keeps KV, and a runner without ``project_kv``.
        """
        from kvstore_client.recompute.projecting import fetch_projected

        return fetch_projected(self, runner, tokens, step_tokens, extras, verify)

    def partial_prefill(
        self, runner: ModelRunner, tokens: GivenTokens, *, segments: Sequence[GivenRun] | None = None,
        preamble: GivenTokens = (), senders: Sequence[ModelSpec] = (), recompute: Recompute | None = None,
        extras: Sequence[Extra] = (), logit_count: int = 1,
    ) -> PartialPrefill:  # fmt: skip
        """Return a prompt's cache and the logits of its last ``logit_count`` tokens, from stored caches and what the
        runner computes. Reuses the model's own exact prefix; behind it, as ``recompute`` says, ``segments`` (runs
        (start, stop) of the prompt) that ``store_segment`` kept, alone or behind the prompt's ``preamble``; elsewhere,
        a sibling model's cache of the same tokens, from the one of ``senders`` that has the most.

        ``recompute`` None: take the cheapest setting that a profile of these weights has at the ``gate``'s floor;
        without one, exact reuse or a plain prefill. Segments and a sibling's cache are then mixed when one profile's
        setting computes all that the other's does. Some of these requests are checked: a full prefill runs too, and is
        the answer. ``plan`` tells what was done, and why it is less than asked for; ``exactness``, how to store it.
        Needs torch. Computes all without a sidecar. Raises: InvalidRequest naming the argument, the setting, or what
        differs in a sender's model.
        """
        from kvstore_client.recompute.prefill import partial_prefill
        from kvstore_client.recompute.request import Request

        request = Request.of(runner, tokens, segments, senders, recompute, extras, logit_count, preamble)
        return partial_prefill(self, request, self._context.timeout_s, self._context.clock)

    def stats(self) -> admin_pb2.StatsResponse:
        """Return the sidecar's contents and counters. Raises Unavailable when it is gone."""
        session, timeout_s = self.connect_now(), self._context.timeout_s
        reply: admin_pb2.StatsResponse = session.call(session.admin.Stats, admin_pb2.StatsRequest(), timeout_s)
        return reply

    def statistics(self) -> dict[str, int]:
        """Return the counters: sessions, unavailable, stores_refused, fetched_bytes, loads_given_up, the gate's."""
        return {name: self._context.connection.counters[name] for name in _COUNTERS}

    def close(self) -> None:
        """Finish pending commits, for at most the timeout of a call, and end the session. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._context.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
