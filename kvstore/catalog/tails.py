"""The partial chunks of each parent: the newest few by row, and a bitmap of the lengths of all.

A client computes a partial chunk's digest from its own tokens once it knows a length. So a parent with 100,000 partial
chunks, as the root has where prompts are short, answers with one bit per length, and nobody walks the chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

NAMED_MAX = 4
"""Partial chunks of a parent that a reply names: the newest. Clients of older releases find only these."""


class Lengths:
    """The number of partial chunks of each length. ``bits``: bit n is set while there is one of n tokens."""

    __slots__ = ("bits", "counts", "total")

    def __init__(self) -> None:
        self.bits = self.total = 0
        self.counts: dict[int, int] = {}

    def add(self, token_count: int) -> None:
        self.total += 1
        self.counts[token_count] = self.counts.get(token_count, 0) + 1
        self.bits |= 1 << token_count

    def remove(self, token_count: int) -> None:
        self.total -= 1
        self.counts[token_count] -= 1
        if not self.counts[token_count]:
            del self.counts[token_count]
            self.bits &= ~(1 << token_count)


class Tails:
    """The partial chunks of one namespace by their parents' digests.

    Cost: a list per parent. A parent with more than NAMED_MAX partial chunks also takes a number per length, and
    nothing per chunk. ``token_counts`` is the chunk table's column.
    """

    __slots__ = ("_lengths", "_named")

    def __init__(self) -> None:
        self._named: dict[bytes, list[int]] = {}
        self._lengths: dict[bytes, Lengths] = {}
        """Parent -> the lengths of all its partial chunks, where some of them are not in ``_named``."""

    def __contains__(self, parent: bytes) -> bool:
        return parent in self._named

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over the parents' digests."""
        return iter(self._named)

    def add(self, parent: bytes, row: int, token_counts: Sequence[int]) -> bool:
        """Add a partial chunk. Return True when it is its parent's first."""
        named = self._named.get(parent)
        if named is None:
            self._named[parent] = [row]
            return True
        lengths = self._lengths.get(parent)
        if lengths is None and len(named) == NAMED_MAX:
            lengths = self._lengths[parent] = Lengths()
            for each in named:
                lengths.add(token_counts[each])
        if lengths is not None:
            lengths.add(token_counts[row])
        if len(named) == NAMED_MAX:
            del named[0]
        named.append(row)
        return False

    def remove(self, parent: bytes, row: int, token_counts: Sequence[int]) -> bool:
        """Remove a partial chunk. Return True when it was its parent's last."""
        named = self._named[parent]
        if row in named:
            named.remove(row)
        lengths = self._lengths.get(parent)
        if lengths is not None:
            lengths.remove(token_counts[row])
            if lengths.total == len(named):
                del self._lengths[parent]
        if named or parent in self._lengths:
            return False
        del self._named[parent]
        return True

    def named(self, parent: bytes) -> Sequence[int]:
        """Return the rows of the parent's newest partial chunks, the oldest of them first."""
        return self._named.get(parent, ())

    def are_all_named(self, parent: bytes) -> bool:
        """True when ``named`` returns all partial chunks of the parent."""
        return parent not in self._lengths

    def bits(self, parent: bytes, token_counts: Sequence[int]) -> int:
        """Return a bitmap of the lengths of the parent's partial chunks: bit n is set where one has n tokens."""
        lengths = self._lengths.get(parent)
        if lengths is not None:
            return lengths.bits
        bits = 0
        for row in self._named.get(parent, ()):
            bits |= 1 << token_counts[row]
        return bits
