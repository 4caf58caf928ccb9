"""A namespace: the chunks of one kind of cache of one model, computed in one way, and why chunks left it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from kvstore.catalog.tails import Tails
from kvstore.chunk import ChunkLayout, layout_of
from kvstore.errors import InvalidRequest
from kvstore.keys import presence_salt
from kvstore.spec import CacheKind, Exactness, MissReason, ModelSpec, Provenance

SpaceKey = tuple[bytes, Provenance, Exactness]
UNNUMBERED = -1
"""The number of a namespace that is empty and that no row can belong to: no store made it, or it is forgotten."""
DEPARTURE_COUNT_MAX = 65536
"""Departed chunks for which a catalog remembers the reason, in all its namespaces together. It bounds memory (0.25 KB
each): a client may have chunks stored in, and evicted from, as many namespaces as there may be."""


@dataclass(eq=False)
class Namespace:
    """The chunks of one fingerprint, provenance and exactness. ``model_spec``, ``model_kind`` and ``layer`` are None
    while a recovered namespace waits for its model's registration; until then nobody can ask for its chunks."""

    number: int
    fingerprint: bytes
    provenance: Provenance
    exactness: Exactness
    model_spec: ModelSpec | None = None
    model_kind: CacheKind | None = None
    layer: int | None = None
    model_name: bytes = b""
    """The fingerprint of its model, which is not its own where it has E; empty while the model is not registered."""
    siblings: dict[tuple[int | None, Provenance, Exactness], Namespace] = field(default_factory=dict, repr=False)
    """The namespaces of its model, itself included, by layer, provenance and exactness."""
    user_count: int = 0
    """Stores in flight that need its number, beside its rows and pending chunks."""
    byte_count: int = 0
    """Raw bytes of the chunks in the index."""
    index: dict[bytes, int] = field(default_factory=dict)
    """Digest -> row of a chunk that some tier holds."""
    ghosts: dict[bytes, int] = field(default_factory=dict)
    """Digest -> row of a chunk that no tier holds and something still refers to."""
    pending: dict[bytes, object] = field(default_factory=dict)
    """Digest -> the store in flight that will publish it."""
    tails: Tails = field(default_factory=Tails)
    departures: dict[bytes, MissReason] = field(default_factory=dict)
    """Digest -> why the chunk is not here, as far as the catalog's ``Departures`` remembers it."""
    salt: int = field(init=False)
    """The salt of its chunks' tags in the presence table."""

    def __post_init__(self) -> None:
        self.salt = presence_salt(self.fingerprint, self.provenance, self.exactness)

    @property
    def is_looked_up(self) -> bool:
        """True when clients look its chunks up in the presence table: its model is registered, and it is no E of a
        layer."""
        return self.model_spec is not None and self.layer is None

    @property
    def spec(self) -> ModelSpec:
        """Only of a registered model."""
        assert self.model_spec is not None
        return self.model_spec

    @property
    def kind(self) -> CacheKind:
        """Only of a registered model."""
        assert self.model_kind is not None
        return self.model_kind

    def layout(self, token_count: int) -> ChunkLayout:
        """Return the layout of a chunk of so many tokens. Only for a registered model."""
        return layout_of(self.spec, self.kind, token_count, self.layer)

    def chunk_bytes(self, token_count: int) -> int:
        """Return the bytes of a raw chunk, header and body; 0 while the model is unknown."""
        return 0 if self.model_spec is None else self.layout(token_count).total_bytes

    def known_bytes(self, token_count: int) -> int:
        """As ``chunk_bytes``, but 0 for a length that no chunk of the model has: a start may have found such a chunk on
        a device, and a chunk that only its children named has length 0."""
        try:
            return self.chunk_bytes(token_count)
        except InvalidRequest:
            return 0

    def is_tail(self, token_count: int) -> bool:
        """True when a chunk of so many tokens is a partial chunk, which prompts that go on otherwise find by its
        length. Opaque values and documents have no partial chunks, whatever their length."""
        if self.model_spec is None or self.model_kind is CacheKind.OPAQUE:
            return False
        if self.provenance is Provenance.STANDALONE:
            return False
        return token_count < self.model_spec.chunk_tokens

    @property
    def may_be_replaced(self) -> bool:
        """True when a digest may stand for other bytes later, so that a removed copy must not come back. True also
        while the model is not registered, because then the kind is unknown."""
        return self.model_kind in (CacheKind.OPAQUE, None)


class Departures:
    """The order in which chunks departed, so that the oldest reason is forgotten first, whichever namespace has it.
    Each namespace has its own reasons, which lookups read."""

    def __init__(self) -> None:
        self._order: OrderedDict[tuple[Namespace, bytes], None] = OrderedDict()

    def add(self, namespace: Namespace, digest: bytes, reason: MissReason) -> tuple[Namespace, bytes] | None:
        """Remember why a chunk is not here. Return the chunk whose reason had to be forgotten for it; None: no one."""
        namespace.departures[digest] = reason
        self._order[namespace, digest] = None
        self._order.move_to_end((namespace, digest))
        if len(self._order) <= DEPARTURE_COUNT_MAX:
            return None
        (space, forgotten), _ = self._order.popitem(last=False)
        del space.departures[forgotten]
        return space, forgotten

    def remove(self, namespace: Namespace, digest: bytes) -> None:
        """Forget a chunk that is here again. One that did not depart is no error."""
        if namespace.departures.pop(digest, None) is not None:
            del self._order[namespace, digest]

    def forget(self, namespace: Namespace) -> None:
        """Forget all chunks that departed from a namespace."""
        for digest in namespace.departures:
            del self._order[namespace, digest]
        namespace.departures.clear()
