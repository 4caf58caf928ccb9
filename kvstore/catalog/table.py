"""The table of chunks: one row per chunk that a tier has, or that another row or a holder refers to."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.catalog.copies import NOWHERE, Copies
from kvstore.spec import Tier

RowIdentity = tuple[int, bytes]
"""The identity of a row's chunk: (id of its namespace, chain digest). See ``ChunkTable.space_id``."""
ROOT_ROW = -1
"""The parent of a chain's first chunk."""
SPACE_COUNT_MAX = 1 << 16
"""Namespaces that rows can name: a row has 16 bits for the number."""
LIFE_COUNT = 1 << 15
"""Lives of a number that ids tell apart. What remembers an id does so for minutes, not for so many namespaces."""
SHARED_COUNT_MAX = 4
USE_COUNT_MAX = 255
"""Uses beyond that are not counted."""
STORED_S_MAX = (1 << 32) - 1
_EMPTY = b""


def whole_seconds(wall_s: float) -> int:
    """Return a time of storing (seconds since 1970) as rows and headers have it: whole seconds, at least 1, because 0
    means unknown."""
    return min(max(1, int(wall_s)), STORED_S_MAX)


class ChunkTable:
    """Columns by row number. A row is a small integer; it is reused once nothing refers to it.

    ``parents`` and ``child_counts`` are the chains. ``write_marks`` are the first 8 bytes of each chunk's write id,
    which a read compares. ``copies`` has the places of the chunks in each local tier, the fastest tier first.
    ``shared`` has two bits per shared tier: it is said to have the chunk, and it was seen to have it. ``uses`` count
    stores and hits. ``stored_s`` is the time when a chunk came to this node, in whole seconds since 1970; 0: the time
    was not noted.
    """

    def __init__(self) -> None:
        self.digests: list[bytes] = []
        self.spaces = array("H")
        self.parents = array("i")
        self.child_counts = array("i")
        self.token_counts = array("i")
        self.write_marks = array("Q")
        self.shared = array("B")
        self.uses = array("B")
        self.stored_s = array("I")
        self.copies: list[Copies] = []
        self._shared_count = 0
        self._columns: list[tuple[array[int], int]] = [
            (self.spaces, 0), (self.parents, ROOT_ROW), (self.child_counts, 0), (self.token_counts, 0),
            (self.write_marks, 0), (self.shared, 0), (self.uses, 0), (self.stored_s, 0),
        ]  # fmt: skip
        self._holds: dict[int, int] = {}
        self._free: list[int] = []
        self._counts = np.zeros(SPACE_COUNT_MAX, np.uint32)
        self._lives = np.zeros(SPACE_COUNT_MAX, np.uint16)
        self._count_of, self._life_of = self._counts.data, self._lives.data  # numbers are read and written faster so

    def __len__(self) -> int:
        return len(self.digests) - len(self._free)

    def add_tier(self, copies: Copies) -> None:
        """Take a tier into use as the slowest so far. It has no chunks yet."""
        copies.column.extend([NOWHERE] * len(self.digests))
        self.copies.append(copies)
        self._columns.append((copies.column, NOWHERE))

    def drop_tier(self, copies: Copies) -> None:
        """Drop a tier, and its copies with it."""
        self.copies.remove(copies)
        self._columns = [each for each in self._columns if each[0] is not copies.column]

    def new_shared_bits(self) -> tuple[int, int]:
        """Return the two bits in ``shared`` for one more shared tier: it is said to have the chunk; it was seen to."""
        assert self._shared_count < SHARED_COUNT_MAX, "one byte per row says which shared tiers have it"
        self._shared_count += 1
        said = 1 << 2 * (self._shared_count - 1)
        return said, said << 1

    def add(self, space: int, digest: bytes, parent: int, token_count: int) -> int:
        """Add a row, resident in no tier. Its parent gains a child. Raises OverflowError for a number that its column
        cannot hold, MemoryError, and BufferError while a view of a column exists: then the table is as it was."""
        row = self._free[-1] if self._free else self._grown()
        self.spaces[row] = space
        self.parents[row] = parent
        self.token_counts[row] = token_count
        self.shared[row] = 0
        self.uses[row] = 0
        self.stored_s[row] = 0
        if self._free:
            self.digests[row] = digest
            self._free.pop()
        else:
            self.digests.append(digest)
        if parent != ROOT_ROW:
            self.child_counts[parent] += 1
        self._count_of[space] += 1
        return row

    def _grown(self) -> int:
        """Grow every column but the digests by one row. A row counts only once its digest is there: rows that a failed
        growth left in some columns are cut off first."""
        row = len(self.digests)
        for column, empty in self._columns:
            if len(column) > row:
                del column[row:]
            column.append(empty)
        return row

    def came(self, row: int, wall_s: float) -> None:
        """Set the time when the chunk came to this node (seconds since 1970). A time beyond the column's largest number
        is stored as that number."""
        self.stored_s[row] = whole_seconds(wall_s)

    def remove(self, row: int) -> None:
        """Forget a row that nothing refers to. Its parent loses a child."""
        assert not self.is_needed(row)
        assert not self.is_resident(row)
        parent = self.parents[row]
        if parent != ROOT_ROW:
            self.child_counts[parent] -= 1
        self.digests[row] = _EMPTY
        self._count_of[self.spaces[row]] -= 1
        self._free.append(row)

    def identity(self, row: int) -> RowIdentity:
        """Return which chunk the row belongs to. Code that awaits without a hold on the row compares the identity
        afterwards: the row may belong to another chunk by then."""
        return self.space_id(self.spaces[row]), self.digests[row]

    def rows(self) -> Iterator[int]:
        """Give every row in use, ghosts included."""
        return (row for row, digest in enumerate(self.digests) if digest)

    # ------------------------------------------------------------ numbers of namespaces

    def space_id(self, number: int) -> int:
        """Return the id of the namespace that has a number now. Numbers of empty namespaces are given to others, and
        each of these has an id of its own: what is remembered over an await is the id, not the number."""
        return number | self._life_of[number] << 16

    def space_ids(self, numbers: NDArray[np.uint16]) -> NDArray[np.int64]:
        """As ``space_id``, for many numbers."""
        return numbers.astype(np.int64) | self._lives[numbers].astype(np.int64) << 16

    def renew(self, number: int) -> None:
        """Begin a number's next life: the namespace that had it is forgotten."""
        assert not self._count_of[number], "rows of the forgotten namespace would be the next one's"
        self._life_of[number] = (self._life_of[number] + 1) % LIFE_COUNT

    def row_count(self, number: int) -> int:
        """Count the rows of a namespace, ghosts included."""
        return self._count_of[number]

    def without_rows(self, number_count: int) -> list[int]:
        """Return which of the first ``number_count`` numbers have no row."""
        found: list[int] = np.flatnonzero(self._counts[:number_count] == 0).tolist()
        return found

    # ------------------------------------------------------------ holds

    def hold(self, row: int) -> None:
        """Keep the row from being reused and its copies from being evicted: a lease, a ticket or a move needs them."""
        self._holds[row] = self._holds.get(row, 0) + 1

    def unhold(self, row: int) -> None:
        count = self._holds[row] - 1
        if count:
            self._holds[row] = count
        else:
            del self._holds[row]

    def is_held(self, row: int) -> bool:
        return row in self._holds

    def held(self) -> list[int]:
        """Return the rows that are held now."""
        return list(self._holds)

    def hold_count(self, row: int) -> int:
        """Count the holds of the row: leases, tickets, moves and others."""
        return self._holds.get(row, 0)

    def is_needed(self, row: int) -> bool:
        """True when the row has a child or is held."""
        return bool(self.child_counts[row]) or row in self._holds

    def fastest(self, row: int) -> Copies | None:
        """Return the fastest tier that has the chunk; None when no tier has it."""
        for copies in self.copies:
            if row in copies:
                return copies
        return None

    def kind(self, row: int) -> Tier:
        """Return the kind of the fastest tier that has the chunk. Some tier must have it."""
        fastest = self.fastest(row)
        assert fastest is not None
        return fastest.kind

    def is_resident(self, row: int) -> bool:
        """True when some local tier has the chunk."""
        return any(row in copies for copies in self.copies)

    def places(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Return for each row the number of the fastest tier that has the chunk, and its encoding there. All chunks
        must be resident."""
        found = np.full(len(rows), -1)
        encodings = np.zeros(len(rows), np.uint8)
        chosen = np.asarray(rows, np.int64)
        for number, copies in enumerate(self.copies):
            here = copies.where(chosen) & (found < 0)
            found[here] = number
            encodings[here] = copies.encodings(chosen[here])
        return list(zip(found.tolist(), encodings.tolist(), strict=True))
