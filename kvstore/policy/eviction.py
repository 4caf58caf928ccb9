"""The eviction interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from kvstore.spec import MissReason

ABSENT = -1
"""In the place of a row: this tier does not have that chunk."""


class EvictionPolicy(Protocol):
    """Orders the chunks of one local tier. Pure: no I/O, no clock, no bytes.

    A row is a small number that is reused; a key names a chunk for ever, also after it left, so that a policy can keep
    a list of what it would have liked to keep. Chains are given root first.
    """

    def requested(self, keys: Sequence[bytes], rows: Sequence[int], hit_count: int) -> None:
        """One request asked for this chain, and its first ``hit_count`` chunks were there. ``rows``: of these hits,
        each one's row, or ABSENT where this tier does not have it. A store counts as a request for what it stored."""

    def admits(self, key: bytes, weight: int, cost: float) -> bool:
        """Whether a chunk is worth its room here. ``weight``: its bytes in this tier. ``cost``: what computing it again
        takes; in tokens, until timings of the model are known. Memory does not ask: what is stored lies there first."""

    def stored(self, row: int, key: bytes, weight: int, cost: float) -> None:
        """This tier has the chunk now. It counts as used just now."""

    def superseded(self, row: int) -> None:
        """A chunk without children becomes the first to go, until it is used again: another chunk has all its tokens.
        Ignored for a row that is not in this tier."""

    def removed(self, row: int, reason: MissReason) -> None:
        """The chunk left this tier; its row may come back as another chunk's. EVICTED: because of the policy."""

    def victims(self, eligible: Callable[[int], bool]) -> Iterator[int]:
        """Rows to remove, most dispensable first. ``eligible`` is asked anew before each is yielded. The caller calls
        ``removed`` for what it takes, or takes nothing: asking alone changes nothing. A parent never comes before its
        children when ``eligible`` refuses chunks that have children."""
