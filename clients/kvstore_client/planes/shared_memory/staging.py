"""The client's side of staging: runs of shared memory that it writes and the server reads once."""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from functools import partial

from kvstore.errors import DeadlineExceeded, Exhausted, KVStoreError, Unavailable
from kvstore.seams.mapping import HUGE_BYTES, Bytes, SharedMap
from kvstore.seams.runs import FreeRuns
from kvstore.seams.scheduler import start_thread
from kvstore.units import PAGE_BYTES
from kvstore_client.planes.shared_memory.mapped import MappedMemory
from kvstore_client.planes.store import StagingRun

SEGMENT_BYTES = 64 << 20
IDLE_S = 30.0
"""Staging that was not used for so many seconds goes back to the machine: all sessions share a budget of it
(``limits.staging_bytes_total_max``). What comes anew costs page faults: 4 ms for a segment in huge pages, 40 in small
ones."""


class StagingFile:
    """A staging memfd of this client, and its free runs. It gets pages only as it fills: many clients never fill
    one."""

    def __init__(self, mapping: SharedMap) -> None:
        self._mapping = mapping
        self._backed = 0
        self._free = FreeRuns()
        self._free.give_back(0, mapping.byte_count)
        self.was_used = True
        """True when any of it was used since the last look for idle staging."""
        self.may_be_gone = False
        """True when nobody knows whether the sidecar has taken it back: it gives no runs any more."""

    @property
    def used_bytes(self) -> int:
        return self._mapping.byte_count - self._free.free_bytes

    def take(self, byte_count: int) -> tuple[int, Bytes] | None:
        """Return the offset of a run, and the whole file's bytes, or None when there is no run. Those of the run are
        backed, and cause no more page faults. Raises Exhausted when the machine has no memory for it."""
        offset = None if self.may_be_gone else self._free.take(byte_count)
        if offset is None:
            return None
        try:
            self._back(offset + byte_count)
        except BaseException:
            self._free.give_back(offset, byte_count)
            raise
        self.was_used = True
        return offset, self._mapping.bytes

    def _back(self, stop: int) -> None:
        if stop > self._backed:
            stop = min(-(-stop // HUGE_BYTES) * HUGE_BYTES, self._mapping.byte_count)
            self._mapping.back(self._backed, stop - self._backed)
            self._backed = stop

    def give_back(self, offset: int, byte_count: int) -> None:
        """Free a run."""
        self._free.give_back(offset, byte_count)
        self.was_used = True


class StagingPool:
    """Allocates runs, first fit (``planes.store.StagingMemory``), in segments made on demand, within the server's
    limit. Idle segments go back."""

    def __init__(self, session: MappedMemory) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._segments: dict[int, StagingFile] = {}
        self._is_watched = False
        """True while a thread looks for idle segments."""

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
        for segment, file in self._segments.items():
            found = file.take(byte_count)
            if found is not None:
                offset, memory = found
                return StagingRun(segment, offset, byte_count, memory)
        return None

    def _grow(self, byte_count: int, expected_bytes: int) -> bool:
        wanted = max(byte_count, min(SEGMENT_BYTES * 4, -(-expected_bytes // SEGMENT_BYTES) * SEGMENT_BYTES))
        while True:
            try:
                segment, mapping = self._session.create_staging(wanted)
                self._segments[segment] = StagingFile(mapping)
            except Exhausted:
                if wanted == byte_count:
                    return False
                wanted = max(byte_count, wanted // 2 // PAGE_BYTES * PAGE_BYTES)
                continue
            except KVStoreError:
                raise
            except BaseException:  # an interrupt: nobody knows of the segment, and only the session's end gives it back
                self._session.close()
                raise
            self._watch()
            return True

    def _watch(self) -> None:
        if not self._is_watched:
            with suppress(Unavailable):  # no thread can be started now: the next segment tries again
                start_thread(partial(_give_back_idle, weakref.ref(self), self._session.ended), "kvstore-staging")
                self._is_watched = True

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return sum(file.used_bytes for file in self._segments.values())

    def give_back(self, run: StagingRun) -> None:
        with self._lock:
            self._segments[run.staging_id].give_back(run.offset, run.byte_count)

    def give_back_idle(self) -> bool:
        """Give segments back to the sidecar that were not used since the last call. Returns False when none is left.
        The session may end meanwhile."""
        closed: list[StagingFile] = []  # unmapped in the end, when nobody waits for the lock any more
        with self._lock:  # also while the sidecar is asked: a store would find neither the segment nor its room
            for segment, file in list(self._segments.items()):
                if file.was_used or file.used_bytes:
                    file.was_used = False
                    continue
                try:
                    self._session.close_staging(segment)
                except DeadlineExceeded:
                    file.may_be_gone = True  # or refused, when it goes on: it is asked again
                    break  # it stands still, and would let each further one wait
                except KVStoreError:  # it may be reading for a store of this session, and does not look from where
                    continue
                closed.append(self._segments.pop(segment))
            self._is_watched = bool(self._segments)
            return self._is_watched


def _give_back_idle(pool_of: weakref.ref[StagingPool], ended: threading.Event) -> None:
    """Give back what is idle, until nothing is left or the session has ended. The thread that does this does not keep
    the pool alive."""
    while not ended.wait(IDLE_S):
        pool = pool_of()
        if pool is None or not pool.give_back_idle():
            return
        del pool
