"""What a writer gathers in when there is no shared memory, and how that is sent."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import grpc
import numpy as np
import xxhash

from kvstore.errors import Unavailable
from kvstore.seams.memory import Bytes
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1 import remote_pb2 as rpb
from kvstore.wire.data import ALIGNMENT, data_message
from kvstore_client.staging import PAGE_BYTES, Run

if TYPE_CHECKING:
    from kvstore_client.remote.session import RemoteSession

POOL_BYTES_MAX = 512 << 20
RATE_BYTES_MIN = 50_000_000


def stream_timeout_s(timeout_s: float, byte_count: int) -> float:
    """How long a stream of so many bytes may take."""
    return timeout_s + byte_count / RATE_BYTES_MIN


class PrivatePool:
    """This process's own memory in the place of staging. Interface: ``StagingPool``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self.used_bytes = 0

    def take(self, byte_count: int, expected_bytes: int) -> Run | None:
        """A run, or None when POOL_BYTES_MAX are in use."""
        byte_count = -(-byte_count // PAGE_BYTES) * PAGE_BYTES
        with self._lock:
            if self.used_bytes and self.used_bytes + byte_count > POOL_BYTES_MAX:
                return None
            self.used_bytes += byte_count
        return Run(next(self._ids), 0, byte_count, np.zeros(byte_count, np.uint8))

    def give_back(self, run: Run) -> None:
        with self._lock:
            self.used_bytes -= run.byte_count


def send_fills(
    session: RemoteSession, reservation_id: int, fills: Sequence[pb.Fill], runs: Sequence[Run], timeout_s: float
) -> None:
    """The strips of ``fills``, each at the start of its run's memory, to the server. Raises the typed error of a failed
    stream."""
    messages = list(_grouped(list(zip(fills, runs, strict=True)), session.message_bytes))
    limit_s = stream_timeout_s(timeout_s, sum(run.byte_count for run in runs))
    try:
        session.store_bytes(
            (_message(reservation_id, group) for group in messages), timeout=limit_s, metadata=session.metadata
        )
    except grpc.RpcError as error:
        raise session.translated(error) from error
    except ValueError as error:
        raise Unavailable("the sidecar is gone") from error


def _grouped(pairs: list[tuple[pb.Fill, Run]], message_bytes: int) -> Iterator[list[tuple[pb.Fill, Run]]]:
    group: list[tuple[pb.Fill, Run]] = []
    size = 0
    for pair in pairs:
        if group and size + pair[1].byte_count > message_bytes:
            yield group
            group, size = [], 0
        group.append(pair)
        size += pair[1].byte_count
    if group:
        yield group


def _message(reservation_id: int, group: list[tuple[pb.Fill, Run]]) -> bytes:
    fields = rpb.StoreBytesRequest(reservation_id=reservation_id)
    digest = xxhash.xxh3_128()
    memories: list[Bytes] = []
    for fill, run in group:
        assert run.byte_count % ALIGNMENT == 0
        memory = run.segment[run.offset : run.offset + run.byte_count]
        fields.runs.add(
            chunk=fill.chunk, strip_first=fill.strip_first, strip_count=fill.strip_count, byte_count=memory.size
        )
        digest.update(memory.data)
        memories.append(memory)
    fields.checksum = digest.digest()
    return data_message(fields, memories)
