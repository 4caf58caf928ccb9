"""Stores written by an engine as it goes: layer by layer, in pieces of a prefill, by one process or several."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvstore.chunk import ChunkLayout
from kvstore.errors import DeadlineExceeded, InvalidRequest, KVStoreError
from kvstore.seams.jobs import NotBegun, begun, failure_of
from kvstore.spec import Durability, ModelSpec, StoreState
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.arrays import Layer, Tensor, checked
from kvstore_client.context import Context
from kvstore_client.copying import commit_beside
from kvstore_client.derived import check_exact
from kvstore_client.fetch.paged import Paged, Pages
from kvstore_client.fetch.ticket import packed_spec
from kvstore_client.fetch.wanted import Heads, Wanted
from kvstore_client.halves import checked_planes
from kvstore_client.planes.parts import part_layout
from kvstore_client.planes.session import ClientSession
from kvstore_client.planes.store import StagingMemory, StagingRun
from kvstore_client.prompt import EXACT
from kvstore_client.store.gathering import Dense, FromPages, Pile, PutTokens, StripRange, gather, strips_bytes
from kvstore_client.store.receipt import Receipt, Settle
from kvstore_client.store.store import drop_reservation, dropping

COMMIT_S_MAX = 90.0
"""The sidecar ends a store whose writers do not all commit (limits.reservation_age_s_max); this is past that."""


@dataclass(frozen=True)
class ReservedChunks:
    """A store's chunks, and which are still wanted. ``states``: one per chunk and part, the KV part first."""

    spec: ModelSpec
    digests: list[bytes]
    exactness: int
    token_count: int
    hidden_layers: tuple[int, ...]
    shards: int
    reservation_id: int = 0
    states: Sequence[int] = ()
    ticket: bytes = b""
    supersedes: Callable[[], bytes] = bytes
    """Returns digests of the stored partial chunks that begin this store's chunks."""
    is_claimed: bool = False
    """True when the caller gave an exactness."""

    def check_exact(self, planes: Sequence[Tensor], name: str, slots: NDArray[np.int64] | None = None) -> None:
        """Raise InvalidRequest for a derived cache, where the caller gave no exactness."""
        if self.exactness == EXACT and not self.is_claimed:
            check_exact(planes, name, slots)

    def known(self, reply: pb.StoreResponse, supersedes: Callable[[], bytes]) -> ReservedChunks:
        """Return this reservation with the sidecar's answer."""
        return replace(
            self, reservation_id=reply.reservation_id, states=list(reply.states), ticket=reply.ticket,
            supersedes=supersedes,
        )  # fmt: skip

    def entry(self, chunk: int, part: int) -> int:
        """Return the number of a chunk's part in the reservation."""
        return chunk * (1 + len(self.hidden_layers)) + part

    def layout(self, chunk: int, part: int) -> ChunkLayout:
        count = min(self.spec.chunk_tokens, self.token_count - chunk * self.spec.chunk_tokens)
        return part_layout(self.spec, self.hidden_layers, part, count)

    def packed(self) -> bytes:
        """Return all that another process needs to join, as one run of bytes."""
        if not self.ticket:
            return b""
        return pb.SharedStore(
            ticket=self.ticket, spec=packed_spec(self.spec), digests=b"".join(self.digests),
            exactness=self.exactness,  # type: ignore[arg-type]  # the wire's number
            token_count=self.token_count, hidden_layers=self.hidden_layers, shards=self.shards,
        ).SerializeToString()  # fmt: skip


class StoreWriter:
    """A store in flight. Nothing of it is visible before ``commit``; leaving the ``with`` block without one, or
    dropping it, aborts.

    The sidecar's failures never raise: later bytes are dropped; ``failure`` and the receipt say why. For one thread.
    """

    def __init__(
        self, session: ClientSession | None, reservation: ReservedChunks, shard: int, context: Context,
        settle: Settle | None, failure: str = "",
    ) -> None:  # fmt: skip
        self._has_ended = False
        self._session = session
        self._reservation = reservation
        self._shard = shard
        self._copier = context.copier
        self._committer = context.committer
        self._settle = settle
        self._timeout_s = context.timeout_s
        self.failure = failure
        self._piles: dict[StripRange, Pile] = {}
        self._cuts: dict[tuple[int, int], set[StripRange]] = {}
        """Per chunk and layer, the ranges of heads that came together: their strips are gathered and sent together."""
        self._whole: deque[Pile] = deque()
        """Piles that are whole and wait to be sent: those that wait together go in one call."""
        self._sent: list[Future[None]] = []
        self._unread: list[Pile] = []
        """Piles that the sidecar was told to read and did not confirm."""
        if session is not None:
            self._pool: StagingMemory = session.staging

    @property
    def ticket(self) -> bytes:
        """The ticket for ``join_store`` in the processes of the other shards; empty when there are none."""
        return self._reservation.packed()

    @property
    def wanted_token_count(self) -> int:
        """Number of tokens whose caches the sidecar asks for: it has the others, or no room for them."""
        reservation, step = self._reservation, self._reservation.spec.chunk_tokens
        chunks = [number for number in range(len(reservation.digests)) if self._wants(number, 0)]
        return sum(min(step, reservation.token_count - number * step) for number in chunks)

    @property
    def wanted_token_start(self) -> int:
        """The first token whose cache the sidecar asks for; past the last one where it asks for none. It has those
        before it, or another store has them."""
        reservation, step = self._reservation, self._reservation.spec.chunk_tokens
        chunks = (number * step for number in range(len(reservation.digests)) if self._wants(number, 0))
        return next(chunks, reservation.token_count)

    # ------------------------------------------------------------ put

    def put_layer(self, layer: int, kv: Layer | Paged, *, heads: Heads | None = None, token_start: int = 0) -> None:
        """Keep some tokens of one layer. Returns when the tensors may be reused.

        Shapes: ``kv`` is (K, V), each [heads, tokens, dim], or ``Paged`` with this one layer and these tokens' slots;
        or E, [tokens, hidden_size], where the spec keeps that.
        ``heads``: the range of kv heads in ``kv`` (None: all); put the same ranges for all tokens of a chunk.
        ``token_start``: the first token's place in the prompt.
        Raises: InvalidRequest naming what does not fit, or was put before.
        """
        wanted = Wanted.of(self._reservation.spec, [layer], heads, (), False)
        if isinstance(kv, Paged):
            pages = Pages(wanted, kv)
            self._reservation.check_exact(pages.views[0], "kv", pages.slots)
            source: Dense | FromPages = FromPages(pages)
        else:
            planes = checked_planes(wanted.spec, layer, kv, "kv", None, wanted.heads_of(layer))
            self._reservation.check_exact(planes, "kv")
            source = Dense(planes)
        stop = wanted.head_start + wanted.heads_of(layer)
        self._put(source, 0, lambda layout: layout.slab_of_layer[layer], wanted.head_start, stop, token_start)

    def put_hidden(self, layer: int, hidden: Tensor, *, token_start: int = 0) -> None:
        """Keep some tokens' hidden states entering a layer, [tokens, hidden_size]. Raises like ``put_layer``."""
        spec, layers = self._reservation.spec, self._reservation.hidden_layers
        if layer not in layers:
            raise InvalidRequest(f"hidden layer {layer}: this store was started with hidden_layers={layers}")
        count = int(hidden.shape[0]) if len(getattr(hidden, "shape", ())) == 2 else 0
        x = checked(hidden, (count, spec.hidden_size), spec.hidden_dtype, "hidden")
        self._reservation.check_exact([x], "hidden")
        source = Dense([x.reshape(1, count, spec.hidden_size)])
        self._put(source, 1 + layers.index(layer), lambda _: 0, 0, 1, token_start)

    def _put(
        self, source: Dense | FromPages, part: int, slab_of: Callable[[ChunkLayout], int], head_start: int,
        head_stop: int, token_start: int,
    ) -> None:  # fmt: skip
        reservation, step = self._reservation, self._reservation.spec.chunk_tokens
        stop = token_start + source.token_count
        if not 0 <= token_start <= stop <= reservation.token_count:
            raise InvalidRequest(f"tokens {token_start}..{stop} of a store of {reservation.token_count}")
        if self._has_ended:
            raise InvalidRequest("this store was committed or aborted")
        if self._is_elsewhere:  # its staging is not mapped here
            return
        work: list[PutTokens] = []
        for chunk in range(token_start // step, -(-stop // step)):
            if self.failure or not self._wants(chunk, part):
                continue
            layout = reservation.layout(chunk, part)
            strips = StripRange(reservation.entry(chunk, part), slab_of(layout), head_start, head_stop)
            first = chunk * step
            start, end = max(token_start - first, 0), min(stop - first, layout.token_count)
            pile = self._pile(strips, layout)
            if pile is None:
                return
            if pile.there[start:end].any():
                raise InvalidRequest(f"some of tokens {first + start}..{first + end} were put before")
            work.append((pile, start, end, first - token_start))
        self._copy(source, work)

    def _wants(self, chunk: int, part: int) -> bool:
        entry = self._reservation.entry(chunk, part)
        return entry < len(self._reservation.states) and self._reservation.states[entry] == StoreState.WANTED

    def _pile(self, strips: StripRange, layout: ChunkLayout) -> Pile | None:
        """Return the pile of these strips. None when staging has no room for them: the store has failed."""
        cut = self._cuts.get((strips.entry, strips.slab), set())
        if strips in cut and strips not in self._piles:  # it was whole
            raise InvalidRequest("this layer of these tokens was put before")
        for other in cut:
            if other != strips and other.head_start < strips.head_stop and strips.head_start < other.head_stop:
                raise InvalidRequest(
                    f"heads {strips.head_start}..{strips.head_stop}: of the same chunk and layer heads "
                    f"{other.head_start}..{other.head_stop} were put together: put the same heads together for all its "
                    "tokens"
                )
        pile = self._piles.get(strips)
        if pile is None:
            run = self._take(strips_bytes(layout, strips))
            if run is None:
                return None
            pile = self._piles[strips] = Pile(strips, layout, run)
        return pile

    def _take(self, byte_count: int) -> StagingRun | None:
        """Return room in staging; if it is full, wait for sent strips to give theirs back."""
        while True:
            try:
                run = self._pool.take(byte_count, byte_count)
            except KVStoreError as error:
                self._fail(error.message)
                return None
            if run is not None or not self._sent:
                break
            self._settled(self._sent.pop(0))
            if self.failure:
                return None
        if run is None:
            self._fail(
                f"staging has no room for {byte_count} bytes more: raise limits.staging_bytes_max, or put fewer tokens "
                "at a time"
            )
        return run

    def _copy(self, source: Dense | FromPages, work: list[PutTokens]) -> None:
        if not work:
            return
        try:
            gather(source, work, self._copier, self._timeout_s)
        except DeadlineExceeded as error:
            # A copy may still write to its staging. End the session, so that this memory is never used again.
            if self._session is not None:
                self._session.close()
            self._fail(error.message)
            return
        except Exception as error:  # noqa: BLE001 - the boundary: whatever it was, this store has failed, not its engine
            self._fail(error.message if isinstance(error, KVStoreError) else f"a copy failed: {error!r}")
            return
        is_whole = False
        for pile, start, stop, _ in work:
            pile.there[start:stop] = True
            self._cuts.setdefault((pile.strips.entry, pile.strips.slab), set()).add(pile.strips)
            if pile.there.all():
                self._whole.append(self._piles.pop(pile.strips))
                is_whole = True
        if is_whole:
            sent = begun(self._committer, self._send)
            self._sent.append(sent)
            if sent.done() and isinstance(refusal := failure_of(sent), NotBegun):
                self._fail(refusal.message)

    # ------------------------------------------------------------ what runs beside the caller

    def _take_whole(self) -> list[Pile]:
        """Take the piles that wait to be sent: whoever takes one sends it or frees its room."""
        piles: list[Pile] = []
        while True:
            try:
                piles.append(self._whole.popleft())
            except IndexError:  # not asked before: two threads may take some
                return piles

    def _send(self) -> None:
        piles = self._take_whole()
        if piles and not self.failure:
            try:
                self._fill(piles)
            except InvalidRequest as error:  # nothing was read: the store has ended
                self._fail(error.message)
            except KVStoreError as error:
                self._fail(error.message)
                self._unread += piles  # the server may still read that staging
                return
        self._free(pile.run for pile in piles)

    def _free(self, runs: Iterable[StagingRun]) -> None:
        for run in runs:
            self._pool.give_back(run)

    def _fill(self, piles: list[Pile]) -> None:
        assert self._session is not None
        fills, runs = zip(*(each for pile in piles for each in pile.fills()), strict=True)
        self._session.fill(self._reservation.reservation_id, fills, runs, self._timeout_s)

    def _settled(self, sent: Future[None]) -> None:
        try:
            sent.result(self._timeout_s)
        except Exception as error:  # noqa: BLE001 - the boundary: whatever it was, this store has failed
            self._fail(f"the sidecar did not take what was put: {error!r}")

    @property
    def _is_elsewhere(self) -> bool:
        """True in a forked child, for its parent's store: it has failed here, and goes on in the parent."""
        if self._session is None or self._session.pid == os.getpid():
            return False
        self._fail("this store is of the process that this one is a fork of: start one here")
        return True

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason

    def _call(self, request: pb.StoreRequest, timeout_s: float | None = None) -> pb.StoreResponse:
        assert self._session is not None
        reply: pb.StoreResponse = self._session.call(self._session.cache.Store, request, timeout_s or self._timeout_s)
        return reply

    # ------------------------------------------------------------ end

    def commit(self) -> Receipt:
        """Publish the store, in the background, as soon as every other shard has committed, too. Chunks of which some
        strips were never put are not stored."""
        if self._has_ended:
            raise InvalidRequest("this store was committed or aborted")
        self._has_ended = True
        if self._session is None or self._is_elsewhere:
            return Receipt.nothing(self.failure)
        beside = commit_beside(self._committer, self._commit, self._abort, waits=self._waits)
        return Receipt(beside, self._settle)

    @property
    def _waits(self) -> bool:
        """True when the commit waits for others, perhaps of this very client."""
        return self._reservation.shards > 1 or StoreState.PENDING in self._reservation.states

    def _commit(self) -> tuple[Durability, int, str]:
        if self._waits:
            for sent in self._sent:
                self._settled(sent)
        if not self.failure:
            reservation = self._reservation
            step = pb.Commit(
                reservation_id=reservation.reservation_id, shard=self._shard, supersedes=reservation.supersedes()
            )
            try:
                wait_s = COMMIT_S_MAX if self._reservation.shards > 1 else self._timeout_s
                response = self._call(pb.StoreRequest(commit=step), wait_s)
                self._free(self._unsent())
                stored = min(
                    response.committed_count * self._reservation.spec.chunk_tokens, self._reservation.token_count
                )
                return Durability(response.durability), stored, response.refusal
            except KVStoreError as error:
                self._fail(error.message)
        self._abort()
        return Durability.NONE, 0, self.failure

    def abort(self) -> None:
        """Drop the store, for every shard. Idempotent, also after ``commit``. Waits for the sidecar's answer."""
        if not self._has_ended:
            self._has_ended = True
            self._fail("it was aborted")
            if self._session is not None:
                self._abort()

    def _abort(self) -> None:
        assert self._session is not None
        drop_reservation(self._session, self._pool, self._reservation.reservation_id, self._unsent(), self._timeout_s)

    def _unsent(self) -> list[StagingRun]:
        """Return the runs gathered and not sent, or sent in vain, and forget them: the caller gives them back."""
        runs = [pile.run for pile in (*self._piles.values(), *self._take_whole(), *self._unread)]
        self._piles.clear()
        self._unread.clear()
        return runs

    def __del__(self) -> None:
        if self._session is not None and not self._has_ended:
            end = (self._session, self._pool, self._reservation.reservation_id, self._unsent(), self._timeout_s)
            self._session.returns.soon(dropping(*end))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()
