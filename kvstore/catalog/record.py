"""Records of resident chunks and the namespaces they live in."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.spec import CacheKind, Exactness, MissReason, ModelSpec, Provenance

if TYPE_CHECKING:
    from kvstore.arena import Placement

DEPARTURE_COUNT_MAX = 65536
"""How many departed chunks a namespace remembers the reason of."""


@dataclass(eq=False, slots=True)
class Record:
    """One resident chunk. ``slabs`` is a bitmap of the slabs that are present; all of them here."""

    namespace: Namespace
    digest: bytes
    parent: Record | None
    token_count: int
    placement: Placement
    storage_key: bytes
    slabs: int
    child_count: int = 0
    pin_count: int = 0
    lease_count: int = 0

    @property
    def is_held(self) -> bool:
        """Whether it must stay: it has children, or somebody pinned or leased it."""
        return bool(self.child_count or self.pin_count or self.lease_count)


@dataclass(eq=False)
class Namespace:
    """The chunks of one kind of one model, computed in one way."""

    fingerprint: bytes
    spec: ModelSpec
    kind: CacheKind
    layer: int | None
    provenance: Provenance
    exactness: Exactness
    index: dict[bytes, Record] = field(default_factory=dict)
    pending: dict[bytes, object] = field(default_factory=dict)
    """Digest -> the store in flight that will publish it."""
    tails: dict[bytes, list[Record]] = field(default_factory=dict)
    """Parent digest -> its partial tails, at most two, the older first."""
    departures: OrderedDict[bytes, MissReason] = field(default_factory=OrderedDict)

    def depart(self, digest: bytes, reason: MissReason) -> None:
        """Remember why a digest is not here."""
        self.departures[digest] = reason
        self.departures.move_to_end(digest)
        if len(self.departures) > DEPARTURE_COUNT_MAX:
            self.departures.popitem(last=False)
