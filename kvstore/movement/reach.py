"""Finds how far a chain goes beyond the node, as far as shared tiers were asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvstore.catalog import Namespace
from kvstore.movement.shared import SharedCopies
from kvstore.spec import Tier


class ChunkHint(NamedTuple):
    """The places of one chunk, as hinted: for each part the shared tier that has it, None where the node has it."""

    parts: tuple[SharedCopies | None, ...]

    @property
    def kind(self) -> Tier | None:
        """The kind of the slowest of these tiers; None where the node has all parts."""
        slowest = max((each for each in self.parts if each), key=lambda each: each.rank, default=None)
        return slowest.tier.kind if slowest else None


class Beyond(NamedTuple):
    """The chunks by which a chain continues beyond the node. ``is_known``: False where a tier did not answer for the
    next chunk."""

    chunks: list[ChunkHint]
    is_known: bool


class PartReach(NamedTuple):
    """The places of one part of a chain's leading chunks: the shared tier, or None for the node. ``is_known``: False
    where no tier said if it has the next one. ``is_open``: True where none was asked for the next one so far."""

    places: list[SharedCopies | None]
    is_known: bool = True
    is_open: bool = False


class Reach:
    """One chain: its leading chunks of which every part is here or said to be in a shared tier, and what to ask next.
    ``is_open`` until the next chunk is one that not all parts are of, or of which nothing is known, or the chain
    ends."""

    def __init__(self, spaces: Sequence[Namespace], digests: Sequence[bytes]) -> None:
        self.spaces = spaces
        self._digests = digests
        self._chunks: list[ChunkHint] = []
        self.keys: Sequence[Sequence[bytes]] = ()
        """The storage keys, part by part, of the chunks that are looked at now."""
        self.is_open = True
        self._is_known = True

    @property
    def rest(self) -> Sequence[bytes]:
        """The digests of the chunks that were not found so far."""
        return self._digests[len(self._chunks) :] if self._chunks else self._digests

    def go_on(self, parts: Sequence[PartReach]) -> None:
        """Take the places of the chunks that were looked at."""
        found = list(zip(*(each.places for each in parts), strict=False))
        hints = {each: ChunkHint(each) for each in set(found)}
        self._chunks += [hints[each] for each in found]
        last = [each for each in parts if len(each.places) == len(found)]
        self._is_known = all(each.is_known for each in last)
        self.is_open = all(each.is_open for each in last) and len(self._chunks) < len(self._digests)

    @property
    def beyond(self) -> Beyond:
        """The chunks found."""
        return Beyond(self._chunks, self._is_known and not self.is_open)
