"""The free runs of a piece of memory. First fit; neighbouring free runs are joined."""

from __future__ import annotations

from bisect import bisect_left


class FreeRuns:
    """The free runs of one piece of memory, sorted by offset."""

    def __init__(self) -> None:
        self.free_bytes = 0
        self._offsets: list[int] = []
        self._sizes: list[int] = []

    def take(self, byte_count: int) -> int | None:
        """Return the offset of the first free run that holds ``byte_count`` bytes, or None."""
        if byte_count > self.free_bytes:
            return None
        for index, size in enumerate(self._sizes):
            if size >= byte_count:
                return self._cut(index, byte_count)
        return None

    def take_run(self, sizes: tuple[int, ...]) -> tuple[int, int] | None:
        """Return (offset, number of leading ``sizes`` that fit there), taken from the first run that holds at least the
        first size; None when there is no such run."""
        if sizes[0] > self.free_bytes:
            return None
        for index, size in enumerate(self._sizes):
            if size >= sizes[0]:
                count = used = 0
                for wanted in sizes:
                    if used + wanted > size:
                        break
                    used += wanted
                    count += 1
                return self._cut(index, used), count
        return None

    def _cut(self, index: int, byte_count: int) -> int:
        offset = self._offsets[index]
        if self._sizes[index] == byte_count:
            del self._offsets[index], self._sizes[index]
        else:
            self._offsets[index] += byte_count
            self._sizes[index] -= byte_count
        self.free_bytes -= byte_count
        return offset

    def size_at(self, offset: int) -> int:
        """Return the size of the free run that begins at ``offset``; 0 where none begins."""
        index = bisect_left(self._offsets, offset)
        return self._sizes[index] if index < len(self._offsets) and self._offsets[index] == offset else 0

    def give_back(self, offset: int, byte_count: int) -> None:
        """Free a run of bytes, and join it with its free neighbours."""
        index = bisect_left(self._offsets, offset)
        before = index > 0 and self._offsets[index - 1] + self._sizes[index - 1] == offset
        after = index < len(self._offsets) and offset + byte_count == self._offsets[index]
        assert index == 0 or self._offsets[index - 1] + self._sizes[index - 1] <= offset, "freed twice"
        assert index == len(self._offsets) or offset + byte_count <= self._offsets[index], "freed twice"
        self.free_bytes += byte_count
        if before and after:
            self._sizes[index - 1] += byte_count + self._sizes[index]
            del self._offsets[index], self._sizes[index]
        elif before:
            self._sizes[index - 1] += byte_count
        elif after:
            self._offsets[index] = offset
            self._sizes[index] += byte_count
        else:
            self._offsets.insert(index, offset)
            self._sizes.insert(index, byte_count)
