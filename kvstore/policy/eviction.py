"""The interface of eviction policies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.spec import MissReason

ABSENT = -1
"""Stands in the place of a row: this tier does not have that chunk."""


class EvictionPolicy(Protocol):
    """Orders the chunks of one local tier. Pure: no I/O, no clock, no bytes.

    A row is a small number that is reused. A key names a chunk for ever, also after it left, so that a policy can
    remember chunks that it gave up too early. Chains are given root first.
    """

    def requested(self, keys: Sequence[bytes], rows: Sequence[int], hit_count: int) -> None:
        """Record that one request asked for this chain, and that its first ``hit_count`` chunks were there. ``rows``:
        the row of each of these hits, or ABSENT where this tier does not have it. A store counts as a request for the
        chunks that it stored."""

    def admits(self, key: bytes, weight: int, cost: float) -> bool:
        """Return True when a chunk is worth its room here. ``weight``: its bytes in this tier. ``cost``: what computing
        it again takes; in tokens, until timings of the model are known. Memory does not ask: stored chunks enter it
        first."""

    def stored(self, row: int, key: bytes, weight: int, cost: float) -> None:
        """Record that this tier has the chunk now. The chunk counts as used just now."""

    def superseded(self, row: int) -> None:
        """Make a chunk the first to go, until it is used again. Where its children are to go, too, they are told after
        it. Ignored for a row that is not in this tier."""

    def removed(self, row: int, reason: MissReason) -> None:
        """Record that the chunk left this tier; its row may be reused for another chunk. ``reason``: EVICTED for the
        policy's victims, and for copies that were given up after a move or by an operator's word."""

    def victims(self, eligible: Callable[[int], bool]) -> Iterator[int]:
        """Yield rows to remove, most dispensable first. ``eligible`` is asked anew before each is yielded. The caller
        calls ``removed`` for each row that it takes; asking alone changes nothing. A parent never comes before its
        children when ``eligible`` refuses chunks that have children."""

    def place(self, row: int) -> int:
        """Return the row's place in the order: smaller for a more dispensable one, another one after each change, 0 for
        a row that is not in this tier."""

    def in_order(self, rows: NDArray[np.int64], after: int | None, count_max: int) -> list[int]:
        """Return those of these rows whose place is larger than ``after`` (None: all of them), in the order of
        ``victims``, the first ``count_max``. All of them must be in this tier. Cost: some passes over ``rows``."""
