"""The client's side of staging: runs of shared memory that it writes and the server reads once."""

from __future__ import annotations

import threading
from bisect import insort

from kvstore.errors import Exhausted
from kvstore.seams.mapping import HUGE_BYTES, Bytes, SharedMap
from kvstore.units import PAGE_BYTES
from kvstore_client.planes.shared_memory.mapped import MappedMemory
from kvstore_client.planes.store import StagingRun

SEGMENT_BYTES = 64 << 20


class StagingFile:
    """A staging memfd of this client. It gets pages only as it fills: many clients never fill one."""

    def __init__(self, mapping: SharedMap) -> None:
        self._mapping = mapping
        self._backed = 0

    @property
    def byte_count(self) -> int:
        return self._mapping.byte_count

    def backed_to(self, stop: int) -> Bytes:
        """Return all its bytes; those before ``stop`` are backed, and cause no more page faults."""
        if stop > self._backed:
            stop = min(-(-stop // HUGE_BYTES) * HUGE_BYTES, self._mapping.byte_count)
            self._mapping.back(self._backed, stop - self._backed)
            self._backed = stop
        return self._mapping.bytes


class StagingPool:
    """Allocates runs, first fit, in segments made on demand, within the server's limit."""

    def __init__(self, session: MappedMemory) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._segments: dict[int, StagingFile] = {}
        self._free: list[tuple[int, int, int]] = []
        """(segment, offset, byte_count), sorted; neighbours are joined."""

    def take(self, byte_count: int, expected_bytes: int) -> StagingRun | None:
        """Return a run, or None when the budget is used up. ``expected_bytes``: the bytes that the store still needs,
        which set the size of a new segment. Raises Exhausted when the machine has no memory for it."""
        byte_count = -(-byte_count // PAGE_BYTES) * PAGE_BYTES
        with self._lock:
            run = self._first_fit(byte_count)
            if run is None and self._grow(byte_count, expected_bytes):
                run = self._first_fit(byte_count)
            return run

    def _first_fit(self, byte_count: int) -> StagingRun | None:
        for index, (segment, offset, size) in enumerate(self._free):
            if size >= byte_count:
                memory = self._segments[segment].backed_to(offset + byte_count)  # before the list changes: it may raise
                if size == byte_count:
                    del self._free[index]
                else:
                    self._free[index] = (segment, offset + byte_count, size - byte_count)
                return StagingRun(segment, offset, byte_count, memory)
        return None

    def _grow(self, byte_count: int, expected_bytes: int) -> bool:
        wanted = max(byte_count, min(SEGMENT_BYTES * 4, -(-expected_bytes // SEGMENT_BYTES) * SEGMENT_BYTES))
        while True:
            try:
                segment, mapping = self._session.create_staging(wanted)
            except Exhausted:
                if wanted == byte_count:
                    return False
                wanted = max(byte_count, wanted // 2 // PAGE_BYTES * PAGE_BYTES)
                continue
            self._segments[segment] = StagingFile(mapping)
            insort(self._free, (segment, 0, wanted))
            return True

    @property
    def used_bytes(self) -> int:
        """Bytes that were taken and not given back."""
        with self._lock:
            held = sum(each.byte_count for each in self._segments.values())
            return held - sum(size for _, _, size in self._free)

    def give_back(self, run: StagingRun) -> None:
        """Free a run: the server has read it."""
        with self._lock:
            insort(self._free, (run.staging_id, run.offset, run.byte_count))
            joined: list[tuple[int, int, int]] = []
            for segment, offset, size in self._free:
                if joined and joined[-1][0] == segment and joined[-1][1] + joined[-1][2] == offset:
                    joined[-1] = (segment, joined[-1][1], joined[-1][2] + size)
                else:
                    joined.append((segment, offset, size))
            self._free = joined
