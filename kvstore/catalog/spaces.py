"""Models, and the namespaces of their chunks. Also writes the presence table, in which clients see chunks without a
call."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstore.catalog.events import Event, Events
from kvstore.catalog.namespace import DEPARTURE_COUNT_MAX, UNNUMBERED, Departures, Namespace, SpaceKey
from kvstore.catalog.table import ROOT_ROW, SPACE_COUNT_MAX, ChunkTable
from kvstore.errors import Exhausted, InvalidRequest
from kvstore.keys import ROOT_DIGEST, fingerprint
from kvstore.presence import (
    LENGTHS_PER_WORD,
    TAIL_TOKENS_MAX,
    TAILS,
    PresenceTable,
    encoded_news,
    lengths_news,
    lengths_tag,
    lengths_words,
    pack_news,
    tag_of,
    tags_of,
)
from kvstore.spec import CacheKind, ChunkState, Encoding, EventKind, Exactness, MissReason, ModelSpec, Provenance, Tier

ADOPTED_EVENTS_MAX = 1024
"""Watchers are told of a recovered namespace with more chunks than this as a gap of lost events."""


@dataclass(eq=False)
class Model:
    """A registered spec and its namespaces, each of which is made by the first store to it."""

    spec: ModelSpec
    fingerprint: bytes
    spaces: Spaces = field(repr=False)
    used_at: int = 0
    """The number of its last use, which only grows."""
    user_count: int = 0
    """Tickets, stores in flight and calls under way that need it, whether it has chunks or not."""
    namespaces: dict[tuple[int | None, Provenance, Exactness], Namespace] = field(default_factory=dict)
    _names: dict[int | None, bytes] = field(default_factory=dict)

    @property
    def is_needed(self) -> bool:
        """True when it has chunks, or something under way needs it."""
        return bool(self.user_count) or any(map(self.spaces.is_needed, self.namespaces.values()))

    def namespace(
        self, layer: int | None, exactness: Exactness, provenance: Provenance = Provenance.IN_CONTEXT,
        beside: Collection[Namespace] = (),
    ) -> Namespace:  # fmt: skip
        """Return the namespace of the attention cache (``layer`` None) or of the E entering ``layer``, for a store: it
        is made when there is none. ``beside``: the store's other namespaces, which may be as empty as those that give
        their number up for this one. Raises Exhausted past limits.namespace_count_max."""
        found = self._known(layer, exactness, provenance)
        return found or self._ours(self.spaces.make(self._name(layer), provenance, exactness, beside), layer)

    def seen(
        self, layer: int | None, exactness: Exactness, provenance: Provenance = Provenance.IN_CONTEXT
    ) -> Namespace:
        """As ``namespace``, for readers: it makes none. Where nothing was ever stored, return an empty namespace that
        is not registered anywhere."""
        found = self._known(layer, exactness, provenance)
        return found or self._empty(layer, provenance, exactness)

    def recognize(self, layer: int, unnamed: Mapping[bytes, Sequence[Namespace]]) -> None:
        """Take over the recovered namespaces (by fingerprint) of the E entering ``layer``. Registration does not do so,
        because hashing the spec for every layer takes a while; a request for E does it for the layers it asks for."""
        for space in unnamed.get(self._name(layer), ()):
            self.seen(layer, space.exactness, space.provenance)

    def _known(self, layer: int | None, exactness: Exactness, provenance: Provenance) -> Namespace | None:
        """Return a namespace that was used before, by this process or by an earlier one whose chunks a device has."""
        key = (layer, provenance, exactness)
        found = self.namespaces.get(key)
        if found is None and (recovered := self.spaces.find(self._name(layer), provenance, exactness)):
            if (
                recovered.model_spec is not None
            ):  # it is of this model, as it was registered after this one was forgotten
                return recovered
            found = self._ours(recovered, layer)
        return found

    def _name(self, layer: int | None) -> bytes:
        """Return the fingerprint of the attention cache or of a layer's E. It is remembered: a spec of many layers
        takes a millisecond to hash."""
        found = self._names.get(layer)
        if found is None:
            if layer is not None and not 0 <= layer < self.spec.layer_count:
                raise InvalidRequest(f"hidden layer {layer}: the model has layers 0..{self.spec.layer_count - 1}")
            kind = self.spec.kind if layer is None else CacheKind.E
            found = self._names[layer] = fingerprint(self.spec, kind, layer)
        return found

    def _empty(self, layer: int | None, provenance: Provenance, exactness: Exactness) -> Namespace:
        return self._of_model(Namespace(UNNUMBERED, self._name(layer), provenance, exactness), layer)

    def _of_model(self, space: Namespace, layer: int | None) -> Namespace:
        space.model_name, space.model_spec, space.layer = self.fingerprint, self.spec, layer
        space.model_kind = self.spec.kind if layer is None else CacheKind.E
        return space

    def _ours(self, space: Namespace, layer: int | None) -> Namespace:
        self.spaces.adopt(self._of_model(space, layer))
        space.siblings = self.namespaces
        self.namespaces[layer, space.provenance, space.exactness] = space
        return space


class Spaces:
    """All namespaces: those of registered models, and those found on a device whose model is not registered yet."""

    def __init__(self, table: ChunkTable, presence: PresenceTable, count_max: int) -> None:
        self._table = table
        self._count_max = count_max
        self.presence = presence
        self.events = Events()
        self.departures = Departures()
        self.numbered: list[Namespace] = []
        """By number. A namespace that was forgotten stays, empty and UNNUMBERED, until another one has its place."""
        self._free: deque[int] = deque()
        """Numbers of forgotten namespaces: the one that was given up first is used first."""
        self._by_key: dict[SpaceKey, Namespace] = {}

    def find(self, name: bytes, provenance: Provenance, exactness: Exactness) -> Namespace | None:
        return self._by_key.get((name, provenance, exactness))

    @property
    def count(self) -> int:
        """The number of namespaces, empty ones included."""
        return len(self.numbered) - len(self._free)

    def make(
        self, name: bytes, provenance: Provenance, exactness: Exactness, beside: Collection[Namespace] = ()
    ) -> Namespace:
        """Make a namespace for a store. At limits.namespace_count_max, empty namespaces that nothing needs are
        forgotten for it, but none of ``beside``. Raises Exhausted where there are none."""
        if self.count >= self._count_max:
            self._forget_empty(beside)
        if self.count >= self._count_max:
            raise Exhausted(
                f"{self.count} namespaces (models x hidden layers x provenances x exactness) are in use, all of them "
                "by chunks that are stored or on their way: raise limits.namespace_count_max"
            )
        return self.get(name, provenance, exactness)

    def get(self, name: bytes, provenance: Provenance, exactness: Exactness) -> Namespace:
        """Return a namespace whose chunks a device has; it is made when there is none, even past
        limits.namespace_count_max. Raises Exhausted past SPACE_COUNT_MAX, beyond which rows have no number for it."""
        key = (name, provenance, exactness)
        found = self._by_key.get(key)
        if found is None:
            if self.count >= SPACE_COUNT_MAX:
                raise Exhausted(f"chunks of more than {SPACE_COUNT_MAX} namespaces cannot be kept by one tenant")
            number = self._free.popleft() if self._free else len(self.numbered)
            found = self._by_key[key] = Namespace(number, name, provenance, exactness)
            self.numbered[number : number + 1] = [found]
        return found

    def of(self, name: bytes) -> list[Namespace]:
        """Return the namespaces of one fingerprint."""
        keys = [(name, provenance, exactness) for provenance in Provenance for exactness in Exactness]
        return [self._by_key[key] for key in keys if key in self._by_key]

    def by_id(self, space_id: int) -> Namespace | None:
        """Return the namespace of an id (``ChunkTable.space_id``); None: it was forgotten."""
        space = self.numbered[space_id % SPACE_COUNT_MAX]
        is_it = space.number != UNNUMBERED and self._table.space_id(space.number) == space_id
        return space if is_it else None

    # ------------------------------------------------------------ forget

    def is_needed(self, space: Namespace) -> bool:
        """True when a row belongs to the namespace, or a store is on its way to it: its number must stay its own."""
        return bool(self._table.row_count(space.number) or space.pending or space.user_count)

    def forget(self, space: Namespace) -> None:
        """Forget a namespace that nothing needs, with the reasons of its departed chunks. Its number is used again.
        Cost: 0.1 us per departed chunk."""
        assert not self.is_needed(space)
        del self._by_key[space.fingerprint, space.provenance, space.exactness]
        space.siblings.pop((space.layer, space.provenance, space.exactness), None)
        if space.is_looked_up and space.departures:
            self.presence.forget(tags_of(space.salt, b"".join(space.departures)))
        self.departures.forget(space)
        self._table.renew(space.number)
        self._free.append(space.number)
        space.number, space.siblings = UNNUMBERED, {}

    def _forget_empty(self, beside: Collection[Namespace]) -> None:
        """Forget the namespaces that nothing needs, but not ``beside``, and only some where this takes long."""
        departed = 0
        for number in self._table.without_rows(len(self.numbered)):
            space = self.numbered[number]
            if space.number != UNNUMBERED and space not in beside and not self.is_needed(space):
                departed += len(space.departures)
                self.forget(space)
                if departed > DEPARTURE_COUNT_MAX:
                    return

    def adopt(self, namespace: Namespace) -> None:
        """Complete a recovered namespace whose model is known now: count its bytes, find its partial chunks, and show
        its chunks to clients and watchers. A chunk whose token count the model cannot have is hidden as a ghost."""
        if not (namespace.index or namespace.departures):
            return
        table = self._table
        ours = np.frombuffer(table.spaces, np.uint16) == namespace.number
        counts = np.frombuffer(table.token_counts, np.int32)
        full = namespace.spec.chunk_tokens
        short = np.flatnonzero(ours & (counts != full)).tolist()
        del ours, counts  # as long as these views exist the columns cannot grow
        rest = [row for row in short if namespace.index.get(table.digests[row]) == row]
        namespace.byte_count = (len(namespace.index) - len(rest)) * namespace.chunk_bytes(full)
        for row in rest:
            count = table.token_counts[row]
            if not 0 < count < full:
                del namespace.index[table.digests[row]]
                namespace.ghosts[table.digests[row]] = row
                continue
            namespace.byte_count += namespace.chunk_bytes(count)
            if not namespace.is_tail(count):
                continue
            namespace.tails.add(parent_digest(table, row), row, table.token_counts)
        self._show_all(namespace)
        if not self.events.watchers or len(namespace.index) > ADOPTED_EVENTS_MAX:
            self.events.lose(len(namespace.index))
            return
        for row in namespace.index.values():
            self.tell(EventKind.STORED, row, table.kind(row))

    def tell(self, kind: EventKind, row: int, tier: Tier, reason: MissReason = MissReason.NONE) -> None:
        """Tell watchers of a chunk. Cost without watchers: one addition."""
        self.events.sequence += 1
        if self.events.watchers:
            self.events.deliver(self.event(kind, row, tier, reason))

    def event(self, kind: EventKind, row: int, tier: Tier, reason: MissReason = MissReason.NONE) -> Event:
        """Return an event of a chunk, with the number of the last event."""
        table = self._table
        space, digest, count = self.numbered[table.spaces[row]], table.digests[row], table.token_counts[row]
        return Event(self.events.sequence, kind, space, digest, parent_digest(table, row), count, tier, reason)

    # ------------------------------------------------------------ what clients see

    def show(self, space: Namespace, digest: bytes) -> None:
        """Write a chunk's current state into the presence table. Only attention caches of known models are in it."""
        if space.is_looked_up:
            self.presence.put(tag_of(space.salt, digest), self.news(space, digest))

    def show_tail(self, space: Namespace, parent: bytes, token_count: int) -> None:
        """Update the presence table: a partial chunk of ``token_count`` tokens came or went. Writes the lengths of the
        parent's partial chunks."""
        if space.is_looked_up and space.spec.chunk_tokens <= TAIL_TOKENS_MAX:
            group = token_count // LENGTHS_PER_WORD
            bits = space.tails.bits(parent, self._table.token_counts)
            self.presence.put(lengths_tag(space.salt, parent, group), lengths_news(bits, group))

    def news(self, space: Namespace, digest: bytes) -> int:
        """Return the presence table's value for a chunk: the answer of a lookup for which all chunks before it hit."""
        has_tails = digest in space.tails
        row = space.index.get(digest)
        if row is not None:
            first = self._table.copies[0]
            if row in first:  # it is mapped by clients, and so raw
                return pack_news(ChunkState.HIT, first.kind, Encoding.RAW, tails=has_tails)
            ((tier, encoding),) = self._table.places((row,))
            return pack_news(ChunkState.HIT, self._table.copies[tier].kind, encoding, tails=has_tails)
        if digest in space.pending:
            return pack_news(ChunkState.PENDING, tails=has_tails)
        reason = None if self.presence.is_partial else space.departures.get(digest)
        return pack_news(ChunkState.MISS if reason else 0, reason=reason or 0, tails=has_tails)

    def _show_all(self, space: Namespace) -> None:
        """Write all chunks of a recovered namespace into the presence table. Cost: about 1 us per chunk, and 5 us per
        parent of partial chunks. No request is answered meanwhile."""
        if not space.is_looked_up:
            return
        rows = np.fromiter(space.index.values(), np.int64, len(space.index))
        news = np.zeros(rows.size, np.uint64)
        for copies in self._table.copies:
            here = copies.where(rows) & (news == 0)
            news[here] = np.uint64(pack_news(ChunkState.HIT, copies.kind)) | encoded_news(copies.encodings(rows[here]))
        has_tails = np.fromiter(map(space.tails.__contains__, space.index), np.bool_, len(space.index))
        news |= np.where(has_tails, np.uint64(TAILS), np.uint64(0))
        if space.index:
            words = tags_of(space.salt, b"".join(space.index)) | news
            lengths = np.fromiter(self._lengths_of(space), np.uint64)
            self.presence.put_all(np.concatenate([words, lengths]), 0)
        for digest in (*space.tails, *space.departures):
            if digest not in space.index:
                self.show(space, digest)

    def _lengths_of(self, space: Namespace) -> Iterator[int]:
        """Give the presence table's words for the lengths of each parent's partial chunks."""
        if space.spec.chunk_tokens > TAIL_TOKENS_MAX:
            return
        for parent in space.tails:
            yield from lengths_words(space.salt, parent, space.tails.bits(parent, self._table.token_counts))


def parent_digest(table: ChunkTable, row: int) -> bytes:
    """Return the digest of the chunk before this one in its chain."""
    parent = table.parents[row]
    return ROOT_DIGEST if parent == ROOT_ROW else table.digests[parent]
