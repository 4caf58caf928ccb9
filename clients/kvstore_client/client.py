"""The synchronous client: checks first, misses instead of failures. The asyncio client wraps it."""

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
from kvstore_client.fetch import ticket as tickets
from kvstore_client.fetch.fetched import FetchedKV
from kvstore_client.fetch.stream import LayerStream
from kvstore_client.fetch.target import Into
from kvstore_client.fetch.transfer import Transfer
from kvstore_client.fetch.wanted import Heads, Wanted
from kvstore_client.forks import in_children
from kvstore_client.gate import DRIFT_COUNTERS, Gate
from kvstore_client.loading import GIVEN_UP, Planner
from kvstore_client.lookup import calls as lookups
from kvstore_client.lookup.locate import Location, locate
from kvstore_client.lookup.match import Match
from kvstore_client.lookup.watch import Watch
from kvstore_client.opaque import calls as opaque
from kvstore_client.opaque.encoder import namespace_of, packed, unpacked
from kvstore_client.planes.place import Place
from kvstore_client.planes.session import Session
from kvstore_client.prompt import GivenTokens, Prompt, check_count, preamble_tokens
from kvstore_client.segments.known import KnownSegments
from kvstore_client.segments.runs import cut
from kvstore_client.store import calls as stores
from kvstore_client.store.receipt import Receipt
from kvstore_client.store.writer import StoreWriter

if TYPE_CHECKING:
    from kvstore_client.recompute import ModelRunner, PartialPrefill

DEFAULT_TIMEOUT_S = 10.0
_COUNTERS = ("sessions", "unavailable", "stores_refused", "fetched_bytes", GIVEN_UP, *DRIFT_COUNTERS)


class Client:
    """Stores and fetches caches. Safe to share between threads; a forked child connects by itself."""

    def __init__(self, place: Place, *, timeout_s: float = DEFAULT_TIMEOUT_S, clock: Clock | None = None) -> None:
        self._context = Context.begin(place, clock or SystemClock(), timeout_s)
        self.faults = self._context.faults
        self._is_closed = False
        self._known = KnownSegments()
        self.planner = Planner(self._context)
        in_children(self._start_threads)

    def _start_threads(self) -> None:
        """In a forked child, which does not have its parent's."""
        self._context = self._context.with_threads()

    @property
    def plane(self) -> str:
        """How bytes come: "local", through shared memory, or "remote", with the calls."""
        return self._context.connection.place.plane

    def connect_now(self) -> Session:
        """The live session, connecting if there is none. Raises Unavailable, at once while backing off."""
        return self._context.connection.session()

    # ------------------------------------------------------------ lookup
    def lookup(
        self, spec: ModelSpec, tokens: GivenTokens, *, segments: Sequence[range | tuple[int, int]] | None = None,
        preamble: GivenTokens = (), hold: bool = False, readers: int = 1, extras: Sequence[Extra] = (),
        exactness: Exactness = Exactness.EXACT,
    ) -> Match:  # fmt: skip
        """How much of a prompt's cache is stored, chunk by chunk. Moves nothing, and holds nothing unless asked to:
        with ``hold`` the match has a ticket, and what hit stays for ``readers`` fetches by it, from any process of
        the user, until the ticket expires (limits.ticket_age_s_max). ``tokens``: here and elsewhere also PageHashes.
        ``segments``: the runs (start, stop) of the prompt that are documents; the match tells what is stored of each,
        behind the ``preamble`` that the prompt begins with, or alone. Raises: InvalidRequest, Exhausted."""
        prompt = Prompt.of(spec, tokens, extras, exactness)
        check_count(readers, "readers")
        found = cut(prompt, segments, exactness, preamble)
        return lookups.look_up(self._context, prompt, readers if hold else 0, found, self._known)

    def peek(
        self, spec: ModelSpec, tokens: GivenTokens, *, hold: bool = False, extras: Sequence[Extra] = (),
        exactness: Exactness = Exactness.EXACT,
    ) -> Match | None:  # fmt: skip
        """As ``lookup``, at once: what shows in shared memory. None where only a call can tell, or hold what hits: for
        a caller that waits for nobody. Raises: InvalidRequest."""
        return lookups.peek(self._context, Prompt.of(spec, tokens, extras, exactness), hold=hold)

    def plan(
        self, spec: ModelSpec, tokens: GivenTokens, *, step_tokens: int = 0, extras: Sequence[Extra] = (),
        exactness: Exactness = Exactness.EXACT,
    ) -> LoadPlan:  # fmt: skip
        """How the prompt's first token comes soonest, by what was measured of tiers and of this client's engines: every
        candidate, the winner and why. ``step_tokens``: rows of one forward pass, 0: all. Loads nothing. Raises as
        ``lookup``."""
        count = Prompt.of(spec, tokens, extras, exactness).token_count
        match = self.lookup(spec, tokens, extras=extras, exactness=exactness)
        return self.planner.plan(spec, match, count, count - 1, step_tokens, frozenset(Way))

    def locate(
        self, spec: ModelSpec, tokens: GivenTokens, *, extras: Sequence[Extra] = (),
        exactness: Exactness = Exactness.EXACT,
    ) -> Location:  # fmt: skip
        """On which nodes and in which tiers a context's prefix is. Moves and holds nothing. ``tokens``: also
        PageHashes, by which an engine's own block hashes are looked for. Raises: InvalidRequest."""
        return locate(self._context, [Prompt.of(spec, tokens, extras, exactness)])[0]

    def locate_each(
        self, spec: ModelSpec, contexts: Sequence[GivenTokens], *, exactness: Exactness = Exactness.EXACT
    ) -> list[Location]:
        """``locate`` of each context, in one call. Raises: InvalidRequest, also for more than 16,384 chunks."""
        return locate(self._context, [Prompt.of(spec, tokens, (), exactness) for tokens in contexts])

    def watch(self, *, tenant: str = "") -> Watch:
        """What becomes visible, goes and moves from now on. ``tenant``: empty, or the session's own.
        Raises: Unavailable when the sidecar is gone, DeadlineExceeded when it does not answer, PermissionDenied for
        another tenant, Exhausted past limits.watcher_count_max."""
        return Watch(self.connect_now(), tenant, self._context.timeout_s)

    # ------------------------------------------------------------ fetch
    def fetch(
        self, spec: ModelSpec, tokens: GivenTokens, *, layers: Sequence[int] | None = None, heads: Heads | None = None,
        hidden_layers: Sequence[int] = (), into: Into = None, extras: Sequence[Extra] = (),
        exactness: Exactness = Exactness.EXACT, verify: bool = False,
    ) -> FetchedKV:  # fmt: skip
        """The cache of the longest stored prefix, in owned memory or ``into`` the caller's tensors.

        Shapes: per layer (K, V), each [kv_heads, token_count, head_dim], or E (see ``FetchedKV``); ``into`` has room
        for the whole prompt; ``Paged`` pages get it where their slots say, and the list has their views.
        ``heads``: a range of kv heads. ``verify``: hash every strip on the way. Raises: InvalidRequest, Exhausted;
        Internal where a copy hangs that may still write to ``into``.
        """
        prompt = Prompt.of(spec, tokens, extras, exactness)
        return fetches.fetch(self._context, prompt, Wanted.of(prompt.spec, layers, heads, hidden_layers, verify), into)

    def fetch_layers(
        self, spec: ModelSpec, tokens: GivenTokens, *, layers: Sequence[int] | None = None, heads: Heads | None = None,
        into: Into = None, extras: Sequence[Extra] = (), exactness: Exactness = Exactness.EXACT, verify: bool = False,
    ) -> LayerStream:  # fmt: skip
        """Like ``fetch``, layer by layer: (layer, (K, V)) as each lands while the next are copied."""
        prompt = Prompt.of(spec, tokens, extras, exactness)
        return fetches.stream(self._context, prompt, Wanted.of(prompt.spec, layers, heads, (), verify), into)

    def start_fetch(
        self, ticket: bytes, *, into: Into = None, layers: Sequence[int] | None = None, heads: Heads | None = None,
        verify: bool = False,
    ) -> Transfer:  # fmt: skip
        """Fetch what a ticket holds, beside the caller. Returns at once; failures show in the transfer. The ticket of a
        writer joins its store: layers come as they are put, and count once ``wait`` returns, after its commit. Raises:
        InvalidRequest."""
        return fetches.redeem(self._context, ticket, into, layers, heads, verify)

    def start_fetch_prefix(
        self, spec: ModelSpec, tokens: GivenTokens, *, into: Into = None, layers: Sequence[int] | None = None,
        heads: Heads | None = None, hidden_layers: Sequence[int] = (), extras: Sequence[Extra] = (),
        exactness: Exactness = Exactness.EXACT, verify: bool = False,
    ) -> Transfer:  # fmt: skip
        """Fetch the longest stored prefix beside the caller, as ``fetch`` does. Returns when the sidecar has said what
        is there: the transfer's ``token_count``, 0 for a miss, and ``reason``. ``hidden_layers``: their E comes behind
        the layers, and only tokens count that have it. Raises: InvalidRequest, Exhausted."""
        prompt = Prompt.of(spec, tokens, extras, exactness)
        return fetches.start(self._context, prompt, Wanted.of(prompt.spec, layers, heads, hidden_layers, verify), into)

    def release_ticket(self, ticket: bytes | None) -> None:
        """Let go of what a match's ticket holds, when nobody will redeem it. None, and unknown ones, are fine."""
        tickets.release(self._context, ticket)

    # ------------------------------------------------------------ store
    def store(
        self, spec: ModelSpec, tokens: GivenTokens, kv: Sequence[Layer], *, hidden: Mapping[int, Tensor] | None = None,
        durability: Durability | None = None, extras: Sequence[Extra] = (), exactness: Exactness | None = None,
    ) -> Receipt:  # fmt: skip
        """Keep a context's cache. Returns as soon as the tensors may be reused; the receipt tells what was kept.

        Shapes: ``kv`` per layer (K, V), each [kv_heads, tokens, head_dim] in the spec's dtype, or E,
        [tokens, hidden_size], where the spec keeps that; ``hidden`` {layer: [tokens, hidden_size]}. ``durability``:
        what the receipt's ``wait`` waits for; None: the highest level the sidecar has. ``exactness`` None: exact, and
        refused for what is known to be derived. Raises: InvalidRequest.
        """
        return stores.keep(self._context, Prompt.of(spec, tokens, extras, exactness), kv, hidden, durability)

    def start_store(
        self, spec: ModelSpec, tokens: GivenTokens, *, shards: int = 1, hidden_layers: Sequence[int] = (),
        durability: Durability | None = None, extras: Sequence[Extra] = (), exactness: Exactness | None = None,
    ) -> StoreWriter:  # fmt: skip
        """A store that is written as the engine goes: ``put_layer``, again and again, then ``commit``. ``tokens``: all
        of the prompt. ``shards``: how many writers there are, each with its heads or layers; the last one's commit
        publishes, and one that goes aborts all. The others ``join_store`` by the writer's ticket. Raises:
        InvalidRequest."""
        prompt = Prompt.of(spec, tokens, extras, exactness)
        return stores.start(self._context, prompt, hidden_layers, shards, durability)

    def join_store(
        self, ticket: bytes, shard: int, *, durability: Durability | None = None, exactness: Exactness | None = None
    ) -> StoreWriter:  # fmt: skip
        """Write shard 1, 2, ... of a store that another process started. ``exactness``: the store's, said again.
        Raises: InvalidRequest, also for a store that ended."""
        return stores.join(self._context, ticket, shard, durability, exactness)

    def store_segment(
        self, spec: ModelSpec, tokens: GivenTokens, kv: Sequence[Layer], *, hidden: Mapping[int, Tensor] | None = None,
        preamble: GivenTokens = (), durability: Durability | None = None, extras: Sequence[Extra] = (),
        exactness: Exactness | None = None,
    ) -> Receipt:  # fmt: skip
        """Keep a document's cache that was computed alone, or behind a ``preamble`` (a chat template's beginning, say):
        K rotated from 0, or from the preamble's end. It is found under its tokens and the preamble's wherever they
        stand, never as a prompt's prefix. Shapes as in ``store``, of the document's tokens; ``extras``: positions count
        from its first token. Raises: InvalidRequest."""
        prompt = Prompt.segment(spec, tokens, extras, exactness, preamble)
        receipt = stores.keep(self._context, prompt, kv, hidden, durability)
        self._known.learn(prompt)
        return receipt

    def fetch_segment(
        self, spec: ModelSpec, tokens: GivenTokens, *, layers: Sequence[int] | None = None, heads: Heads | None = None,
        hidden_layers: Sequence[int] = (), into: Into = None, preamble: GivenTokens = (), extras: Sequence[Extra] = (),
        exactness: Exactness = Exactness.EXACT, verify: bool = False,
    ) -> FetchedKV:  # fmt: skip
        """A document's cache as it was computed, alone or behind the ``preamble``: K is rotated for the positions it
        stood at. As much of its beginning as is stored; everything else as in ``fetch``."""
        prompt = Prompt.segment(spec, tokens, extras, exactness, preamble)
        wanted = Wanted.of(prompt.spec, layers, heads, hidden_layers, verify)
        found = fetches.fetch(self._context, prompt, wanted, into)
        if prompt.digests and found.token_count == prompt.token_count:
            self._known.learn(prompt)
        return found

    def fetch_segment_layers(
        self, spec: ModelSpec, tokens: GivenTokens, *, layers: Sequence[int] | None = None, heads: Heads | None = None,
        into: Into = None, preamble: GivenTokens = (), extras: Sequence[Extra] = (),
        exactness: Exactness = Exactness.EXACT, verify: bool = False,
    ) -> LayerStream:  # fmt: skip
        """Like ``fetch_segment``, layer by layer; ``token_count`` says at once how much of the document is there."""
        prompt = Prompt.segment(spec, tokens, extras, exactness, preamble)
        return fetches.stream(self._context, prompt, Wanted.of(prompt.spec, layers, heads, (), verify), into)

    def start_fetch_segment(
        self, spec: ModelSpec, tokens: GivenTokens, *, into: Into = None, layers: Sequence[int] | None = None,
        heads: Heads | None = None, hidden_layers: Sequence[int] = (), preamble: GivenTokens = (),
        extras: Sequence[Extra] = (), exactness: Exactness = Exactness.EXACT, verify: bool = False,
    ) -> Transfer:  # fmt: skip
        """Like ``start_fetch_prefix``, of a document, as ``fetch_segment`` does."""
        prompt = Prompt.segment(spec, tokens, extras, exactness, preamble)
        return fetches.start(self._context, prompt, Wanted.of(prompt.spec, layers, heads, hidden_layers, verify), into)

    def find_segments(self, spec: ModelSpec, tokens: GivenTokens, *, preamble: GivenTokens = ()) -> list[range]:
        """Where documents that this client stored, fetched or looked up, alone or behind this ``preamble``, stand in a
        text, confirmed by the digest of all their tokens. Those of fewer than 32 tokens, or with extras, are not found;
        nothing is asked of the sidecar. Raises: InvalidRequest."""
        return self._known.find_in(Prompt.of(spec, tokens, (), Exactness.EXACT), preamble_tokens(preamble, spec))

    def put_bytes(
        self, namespace: str, key: str | bytes, data: Buffer, *, durability: Durability | None = None
    ) -> Receipt:  # fmt: skip
        """Keep a value under a key; what the key had before is gone. Returns as soon as ``data`` may be reused; the
        receipt tells what was kept: all of it or nothing. Two puts of one key at a time: one of them stays, whole.
        Values stay on their node, for another one would find what was replaced: ``durability`` is LOCAL at most.
        ``data``: bytes, or a contiguous array or CPU tensor. Raises: InvalidRequest naming what is wrong.
        """
        return self.put_pieces(namespace, key, [data], durability=durability)

    def put_pieces(
        self, namespace: str, key: str | bytes, pieces: Sequence[Buffer], *, durability: Durability | None = None,
        replace: bool = True,
    ) -> Receipt:  # fmt: skip
        """As ``put_bytes``, of a value that lies in several buffers. ``replace=False``: what the key has stays, for
        keys that have one value for ever, of one chunk; nothing is sent then."""
        return opaque.put(self._context, namespace, key, pieces, durability, replace=replace)

    def get_bytes(
        self, namespace: str, key: str | bytes, *, into: Buffer | None = None, verify: bool = False
    ) -> NDArray[np.uint8] | None:  # fmt: skip
        """The value of a key, whole, as an array of bytes: owned memory, or ``into``, which is as long as the value.
        None when it is not there. ``verify``: hash every strip on the way. Raises: InvalidRequest."""
        return opaque.get(self._context, namespace, key, into, verify=verify)

    def get_each(
        self, namespace: str, keys: Sequence[str | bytes], targets: Sequence[Buffer], *, verify: bool = False
    ) -> list[bool]:
        """Values of known sizes, each into its target: a buffer, or a list of buffers that are one run. One call for
        all of them; False for what is not there, or has another size: that target's bytes mean nothing then. Raises:
        InvalidRequest."""
        return opaque.get_each(self._context, namespace, keys, targets, verify=verify)

    def put_each(
        self, namespace: str, keys: Sequence[str | bytes], values: Sequence[Buffer], *, timeout_s: float = 30.0
    ) -> list[bool]:
        """Values of keys that have one value for ever: what is there is not sent again. Each value is a buffer, or a
        list of buffers that are one run. Returns when all of them are stored, or ``timeout_s`` have passed: whether
        each is there. ``values`` may be reused then. Raises: InvalidRequest."""
        return opaque.put_each(self._context, namespace, keys, values, timeout_s)

    def exists(self, namespace: str, keys: str | bytes | Sequence[str | bytes]) -> Any:
        """Whether a key has a value, or, of a sequence of keys, which of them have. Moves nothing that is of one chunk
        (4 MiB). Raises: InvalidRequest."""
        asked = [keys] if isinstance(keys, str | bytes) else keys
        found = opaque.exists(self._context, namespace, asked)
        return found if asked is keys else found[0]

    def count_leading(self, namespace: str, keys: Sequence[str | bytes]) -> int:
        """How many of the leading keys have a value."""
        return opaque.count_leading(self._context, namespace, keys)

    def put_encoder(
        self, spec: ModelSpec, key: str | bytes, embeddings: Tensor, *, dtype: str | None = None
    ) -> Receipt:
        """Keep the embeddings [tokens, hidden] of a multimodal item under its hash. ``dtype`` names that of unsigned
        integers (numpy has no bfloat16). Raises: InvalidRequest."""
        return self.put_bytes(namespace_of(spec), key, packed(embeddings, dtype))

    def get_encoder(self, spec: ModelSpec, key: str | bytes) -> Tensor | None:
        """The embeddings of an item, owned memory, or None. A tensor when the process uses torch, else an array."""
        found = self.get_bytes(namespace_of(spec), key)
        return None if found is None else unpacked(found)

    def has_encoder(self, spec: ModelSpec, keys: str | bytes | Sequence[str | bytes]) -> Any:
        """Whether an item's embeddings are there, or, of a sequence of hashes, which of them are."""
        return self.exists(namespace_of(spec), keys)

    @property
    def gate(self) -> Gate:
        """What lets lossy reuse through when ``recompute`` is None, and watches it: a ``Gate`` over the profiles of
        this user. Set another for another floor, directory or check interval."""
        # Of threads that come here at once, all get the first one's.
        found: Gate = vars(self).get("_gate") or vars(self).setdefault("_gate", Gate(counters=self._context.counters))
        return found

    @gate.setter
    def gate(self, gate: Gate) -> None:
        gate.counters = self._context.counters
        vars(self)["_gate"] = gate

    def fetch_projected(
        self, runner: ModelRunner, tokens: GivenTokens, *, step_tokens: int | None = None, extras: Sequence[Extra] = (),
        verify: bool = False,
    ) -> FetchedKV:  # fmt: skip
        """The cache of the longest stored prefix of a model whose spec keeps E in the place of KV: each layer's K and V
        are projected by the runner as its E lands, while later layers' E is on its way.
        Shapes as in ``fetch``, on the runner's device; ``byte_count`` is what came. ``step_tokens``: rows projected at
        a time (None: a chunk): the same bits as a prefill in these steps, otherwise the same within rounding. What is
        lost on the way is a miss, of all of it. Needs torch. Raises: InvalidRequest for a spec that keeps KV, and a
        runner without ``project_kv``.
        """
        from kvstore_client.recompute.projecting import fetch_projected

        return fetch_projected(self, runner, tokens, step_tokens, extras, verify)

    def partial_prefill(
        self, runner: ModelRunner, tokens: GivenTokens, *, segments: Sequence[Any] | None = None,
        preamble: GivenTokens = (), senders: Sequence[ModelSpec] = (), recompute: Recompute | None = None,
        extras: Sequence[Extra] = (), logit_count: int = 1,
    ) -> PartialPrefill:  # fmt: skip
        """A prompt's cache and the logits of its last ``logit_count`` tokens, from what the sidecar has and what the
        runner computes: the model's own exact prefix, and behind it, as ``recompute`` says, its ``segments`` (runs
        (start, stop) of the prompt) that ``store_segment`` kept, alone or behind the prompt's ``preamble``, and where
        there are none of these, what a sibling model left of the same tokens, the one of ``senders`` that has the most.
        None: decided for you: the cheapest setting that a profile of these weights has at the ``gate``'s floor; without
        one, exact reuse or a plain prefill. Segments and a sibling's cache are then mixed when one profile's setting
        computes all that the other's does. Some of these requests are checked: prefilled in full as well, which is then
        the answer. What the plan became, and why it is less than what was asked for, is in ``plan``; ``exactness`` says
        what the cache may be stored as. A sidecar that goes in the middle costs time: the prompt is then computed in
        full. Needs torch. Raises: InvalidRequest naming the argument, the setting, or what differs in a sender's model.
        """
        from kvstore_client.recompute.prefill import partial_prefill
        from kvstore_client.recompute.request import Request

        request = Request.of(runner, tokens, segments, senders, recompute, extras, logit_count, preamble)
        return partial_prefill(self, request, self._context.timeout_s, self._context.clock)

    def stats(self) -> admin_pb2.StatsResponse:
        """What the sidecar holds and has done. Raises Unavailable when it is gone."""
        session, timeout_s = self.connect_now(), self._context.timeout_s
        reply: admin_pb2.StatsResponse = session.call(session.admin.Stats, admin_pb2.StatsRequest(), timeout_s)
        return reply

    def statistics(self) -> dict[str, int]:
        """This client's counters: sessions, unavailable, stores_refused, fetched_bytes, loads_given_up, the gate's."""
        return {name: self._context.connection.counters[name] for name in _COUNTERS}

    def close(self) -> None:
        """Finish what is being committed, as long as a call may take, and end the session. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._context.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
