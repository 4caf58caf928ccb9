"""Remembers why chunks are not here any more, in all namespaces of a catalog."""

from __future__ import annotations

from collections import OrderedDict

from kvstore.catalog.namespace import Namespace
from kvstore.spec import MissReason

DEPARTURE_COUNT_MAX = 65536
"""Departed chunks for which a catalog remembers the reason, in all its namespaces together. It bounds memory (0.25 KB
each): a client may have chunks stored in, and evicted from, as many namespaces as there may be."""


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
