"""The rows: one per chunk that is stored somewhere, or that another row hangs on."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from kvstore.arena import Placement
from kvstore.spec import Encoding

ROOT_ROW = -1
"""The parent of a chain's first chunk."""
NOWHERE = -1
"""The NVMe residency of a chunk that has none."""
UNPROVEN = 1 << 62
"""Set in the residency of a copy that was met after a crash: it may be torn, or not there to stay."""
SPACE_COUNT_MAX = 1 << 16
"""How many namespaces rows can name."""
_EMPTY = b""


class ChunkTable:
    """Columns by row number. A row is a small integer; it is reused once nothing refers to it.

    ``parents`` and ``child_counts`` are the chains; ``residencies`` says where the NVMe tier keeps the chunk;
    ``write_marks`` are the first 8 bytes of its write id, which a read compares; ``arena`` where memory does.
    """

    def __init__(self) -> None:
        self.digests: list[bytes] = []
        self.spaces = array("H")
        self.parents = array("i")
        self.child_counts = array("i")
        self.token_counts = array("i")
        self.residencies = array("q")
        self.write_marks = array("Q")
        self.arena: dict[int, Placement] = {}
        self._columns: tuple[tuple[array[int], int], ...] = (
            (self.spaces, 0), (self.parents, ROOT_ROW), (self.child_counts, 0), (self.token_counts, 0),
            (self.residencies, NOWHERE), (self.write_marks, 0),
        )  # fmt: skip
        self._holds: dict[int, int] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self.digests) - len(self._free)

    def add(self, space: int, digest: bytes, parent: int, token_count: int) -> int:
        """A new row, resident nowhere. Its parent gains a child. Nothing has changed when it raises: OverflowError for
        a number that its column cannot hold, MemoryError, BufferError while somebody looks into a column."""
        row = self._free[-1] if self._free else self._grown()
        self.spaces[row] = space
        self.parents[row] = parent
        self.token_counts[row] = token_count
        if self._free:
            self.digests[row] = digest
            self._free.pop()
        else:
            self.digests.append(digest)
        if parent != ROOT_ROW:
            self.child_counts[parent] += 1
        return row

    def _grown(self) -> int:
        """One more row in every column but the digests: a row counts once its digest is there, and what a growth that
        failed left in some columns is cut off."""
        row = len(self.digests)
        for column, empty in self._columns:
            if len(column) > row:
                del column[row:]
            column.append(empty)
        return row

    def remove(self, row: int) -> None:
        """Forget a row that nothing refers to. Its parent loses a child."""
        assert not self.is_needed(row)
        assert not self.is_resident(row)
        parent = self.parents[row]
        if parent != ROOT_ROW:
            self.child_counts[parent] -= 1
        self.digests[row] = _EMPTY
        self._free.append(row)

    def rows(self) -> Iterator[int]:
        """Every row in use, ghosts included."""
        return (row for row, digest in enumerate(self.digests) if digest)

    # ------------------------------------------------------------ holds

    def hold(self, row: int) -> None:
        """Keep the row, and what tiers hold of it, from being evicted: a lease, a pin or a job needs it."""
        self._holds[row] = self._holds.get(row, 0) + 1

    def unhold(self, row: int) -> None:
        count = self._holds[row] - 1
        if count:
            self._holds[row] = count
        else:
            del self._holds[row]

    def is_held(self, row: int) -> bool:
        return row in self._holds

    def is_needed(self, row: int) -> bool:
        """Whether another row or a holder refers to it."""
        return bool(self.child_counts[row]) or row in self._holds

    def is_resident(self, row: int) -> bool:
        """Whether any tier has the chunk."""
        return row in self.arena or self.residencies[row] != NOWHERE

    def is_proven(self, row: int) -> bool:
        """Whether the device has a copy that survives whatever comes, synced by this process or one that ended well."""
        return not self.residencies[row] & UNPROVEN  # NOWHERE has the bit, too

    def encoding(self, row: int) -> Encoding:
        """How the device's copy is encoded."""
        return Encoding(self.residencies[row] >> 56 & 0x3F)
