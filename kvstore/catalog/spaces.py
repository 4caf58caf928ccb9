"""Models, and the namespaces of their chunks. Also writes the presence table, in which clients see chunks without a
call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstore.catalog.events import Event, Events
from kvstore.catalog.namespace import Namespace, SpaceKey
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
UNNUMBERED = -1
"""The number of a namespace that is empty and that no row can belong to."""


@dataclass(eq=False)
class Model:
    """A registered spec and its namespaces, each of which is made by the first store to it."""

    spec: ModelSpec
    fingerprint: bytes
    spaces: Spaces = field(repr=False)
    namespaces: dict[tuple[int | None, Provenance, Exactness], Namespace] = field(default_factory=dict)
    _names: dict[int | None, bytes] = field(default_factory=dict)

    def namespace(
        self, layer: int | None, exactness: Exactness, provenance: Provenance = Provenance.IN_CONTEXT
    ) -> Namespace:
        """Return the namespace of the attention cache (``layer`` None) or of the E entering ``layer``, for a store: it
        is made when there is none. Raises Exhausted past limits.namespace_count_max."""
        found = self._known(layer, exactness, provenance)
        return found or self._ours(self.spaces.make(self._name(layer), provenance, exactness), layer)

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
        space.model_spec, space.layer = self.spec, layer
        space.model_kind = self.spec.kind if layer is None else CacheKind.E
        return space

    def _ours(self, space: Namespace, layer: int | None) -> Namespace:
        self.spaces.adopt(self._of_model(space, layer))
        self.namespaces[layer, space.provenance, space.exactness] = space
        return space


class Spaces:
    """All namespaces: those of registered models, and those found on a device whose model is not registered yet."""

    def __init__(self, table: ChunkTable, presence: PresenceTable, count_max: int) -> None:
        self._table = table
        self._count_max = count_max
        self.presence = presence
        self.events = Events()
        self.numbered: list[Namespace] = []
        self._by_key: dict[SpaceKey, Namespace] = {}

    def find(self, name: bytes, provenance: Provenance, exactness: Exactness) -> Namespace | None:
        return self._by_key.get((name, provenance, exactness))

    def make(self, name: bytes, provenance: Provenance, exactness: Exactness) -> Namespace:
        """Make a namespace for a store. Raises Exhausted past limits.namespace_count_max."""
        if len(self.numbered) >= self._count_max:
            raise Exhausted(
                f"{len(self.numbered)} namespaces (models x hidden layers x provenances x exactness) were stored to: "
                "raise limits.namespace_count_max, or restart to forget those that are empty"
            )
        return self.get(name, provenance, exactness)

    def get(self, name: bytes, provenance: Provenance, exactness: Exactness) -> Namespace:
        """Return a namespace whose chunks a device has; it is made when there is none, even past
        limits.namespace_count_max. Raises Exhausted past SPACE_COUNT_MAX, beyond which rows have no number for it."""
        key = (name, provenance, exactness)
        found = self._by_key.get(key)
        if found is None:
            if len(self.numbered) >= SPACE_COUNT_MAX:
                raise Exhausted(f"chunks of more than {SPACE_COUNT_MAX} namespaces cannot be kept by one tenant")
            found = self._by_key[key] = Namespace(len(self.numbered), name, provenance, exactness)
            self.numbered.append(found)
        return found

    def of(self, name: bytes) -> list[Namespace]:
        """Return the namespaces of one fingerprint."""
        return [space for key, space in self._by_key.items() if key[0] == name]

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
