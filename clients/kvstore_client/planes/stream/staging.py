"""A writer's staging without shared memory, and the messages that send it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

from kvstore.seams.memory import Bytes
from kvstore.units import PAGE_BYTES
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1 import remote_pb2 as rpb
from kvstore.wire.data import ALIGNMENT, data_message
from kvstore_client.planes.store import StagingRun

POOL_BYTES_MAX = 512 << 20
RATE_BYTES_MIN = 50_000_000


def stream_timeout_s(timeout_s: float, byte_count: int) -> float:
    """Return how many seconds a stream of so many bytes may take."""
    return timeout_s + byte_count / RATE_BYTES_MIN


class PrivatePool:
    """Staging in this process's own memory, for a sidecar that cannot read it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self.used_bytes = 0

    def take(self, byte_count: int, expected_bytes: int) -> StagingRun | None:
        """Return a run, or None when POOL_BYTES_MAX are in use."""
        byte_count = -(-byte_count // PAGE_BYTES) * PAGE_BYTES
        with self._lock:
            if self.used_bytes and self.used_bytes + byte_count > POOL_BYTES_MAX:
                return None
            self.used_bytes += byte_count
        return StagingRun(next(self._ids), 0, byte_count, np.zeros(byte_count, np.uint8))

    def give_back(self, run: StagingRun) -> None:
        with self._lock:
            self.used_bytes -= run.byte_count


def messages_of(
    reservation_id: int, fills: Sequence[pb.Fill], runs: Sequence[StagingRun], message_bytes: int
) -> Iterator[bytes]:  # fmt: skip
    """Return messages with the strips of ``fills``, each at the start of its run's memory."""
    groups = list(_grouped(list(zip(fills, runs, strict=True)), message_bytes))
    return (_message(reservation_id, group) for group in groups)


def _grouped(pairs: list[tuple[pb.Fill, StagingRun]], message_bytes: int) -> Iterator[list[tuple[pb.Fill, StagingRun]]]:
    group: list[tuple[pb.Fill, StagingRun]] = []
    size = 0
    for pair in pairs:
        if group and size + pair[1].byte_count > message_bytes:
            yield group
            group, size = [], 0
        group.append(pair)
        size += pair[1].byte_count
    if group:
        yield group


def _message(reservation_id: int, group: list[tuple[pb.Fill, StagingRun]]) -> bytes:
    fields = rpb.StoreBytesRequest(reservation_id=reservation_id)
    digest = xxhash.xxh3_128()
    memories: list[Bytes] = []
    for fill, run in group:
        assert run.byte_count % ALIGNMENT == 0
        memory = run.memory[run.offset : run.offset + run.byte_count]
        fields.runs.add(
            chunk=fill.chunk, strip_first=fill.strip_first, strip_count=fill.strip_count, byte_count=memory.size
        )
        digest.update(memory.data)
        memories.append(memory)
    fields.checksum = digest.digest()
    return data_message(fields, memories)
