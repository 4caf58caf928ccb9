"""Sends a store's bytes in a stream between reserve and commit: a caller's tensors, or a writer's private staging."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc
import numpy as np
import xxhash

from kvstore.errors import DeadlineExceeded
from kvstore.seams.memory import Bytes
from kvstore.units import PAGE_BYTES
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1 import remote_pb2 as rpb
from kvstore.wire.data import ALIGNMENT, data_message, data_prefix
from kvstore_client.arrays import fresh_message
from kvstore_client.copying import Copier, check
from kvstore_client.planes.session import ClientSession, cancel, translated
from kvstore_client.planes.store import StagingRun, StoreSource, Unit

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


@dataclass(frozen=True)
class _SentStrips:
    """Strips ``first .. stop`` of a slab of a unit's chunk."""

    unit: Unit
    slab: int
    first: int
    stop: int
    byte_count: int

    def run(self) -> rpb.StripRun:
        entry = self.unit.layout.slabs[self.slab]
        return rpb.StripRun(
            chunk=self.unit.chunk, strip_first=entry.strip_first + self.first, strip_count=self.stop - self.first,
            byte_count=self.byte_count,
        )  # fmt: skip


class StoreWay(NamedTuple):
    """The way for a store's bytes: gRPC's call, and the bytes of data that a message should carry."""

    call: Any
    message_bytes: int


class StreamUpload:
    """Messages on their way to another host (``planes.store.Upload``). ``put`` returns when every byte is in a
    message."""

    def __init__(
        self, session: ClientSession, way: StoreWay, source: StoreSource, copier: Copier, timeout_s: float
    ) -> None:
        self._session = session
        self._way = way
        self._source = source
        self._copier = copier
        self._timeout_s = timeout_s
        self._reservation_id = 0
        self._stream: Any = None
        self._limit_s = timeout_s
        self._builds: list[Future[bytes]] = []
        self._has_stopped = False
        self._turn = threading.Lock()
        self._read = threading.Event()
        """Set when nothing reads the caller's tensors any more, or the stream has ended."""

    def put(self, reservation_id: int, units: Sequence[Unit], *, at_once: bool = False) -> None:
        self._reservation_id = reservation_id
        messages = list(_messages(units, self._way.message_bytes))
        if messages:
            self._send(messages, sum(unit.byte_count for unit in units))

    def _send(self, messages: list[list[_SentStrips]], byte_count: int) -> None:
        session = self._session
        self._limit_s = stream_timeout_s(self._timeout_s, byte_count)
        self._stream = session.begun(
            lambda: self._way.call.future(self._outgoing(messages), timeout=self._limit_s, metadata=session.carried)
        )
        self._stream.add_done_callback(lambda _: self._read.set())
        read = self._read.wait(self._limit_s)
        if not read or self._stream.done():
            self.stop()
        if not read:
            raise DeadlineExceeded(f"the store was not sent within {self._limit_s:.0f} s")
        if self._stream.done():
            self._result()

    def _outgoing(self, messages: Sequence[list[_SentStrips]]) -> Iterator[bytes]:
        """Yield the messages, each built while the one before is sent. gRPC takes the next when it has room."""
        for number in range(len(messages) + 1):
            with self._turn:
                if self._has_stopped:
                    return
                built = self._builds[-1:]
                if number < len(messages):
                    self._builds = [*built, self._copier.submit(self._build, messages[number])]
            if built:
                message = built[0].result(self._limit_s)
                if number == len(messages):
                    self._read.set()
                yield message

    def _build(self, pieces: list[_SentStrips]) -> bytes:
        """Build one message: copy the tensors' bytes to the memory they are sent from."""
        size = sum(piece.byte_count for piece in pieces)
        fields = rpb.StoreBytesRequest(
            reservation_id=self._reservation_id, runs=[piece.run() for piece in pieces], checksum=bytes(16)
        )
        start = len(data_prefix(fields, size))
        message, memory = fresh_message(start + size)
        place = start
        for piece in pieces:
            self._source.copy(
                piece.unit, piece.slab, memory[place : place + piece.byte_count], first=piece.first, stop=piece.stop
            )
            place += piece.byte_count
        fields.checksum = xxhash.xxh3_128_digest(memory[start:].data)
        memory[:start] = np.frombuffer(data_prefix(fields, size), np.uint8)
        return message

    def stop(self) -> list[StagingRun]:
        with self._turn:
            self._has_stopped = True
        if self._stream is not None:
            cancel(self._stream)
        wait(self._builds, self._limit_s)
        return []

    def _result(self) -> None:
        """Wait until the bytes are in place. Raises the typed error of a failed stream."""
        if self._stream is None:
            return
        try:
            self._stream.result(self._limit_s)
        except grpc.RpcError as error:
            for build in self._builds:
                if build.done():
                    check(build)  # gRPC gives no reason when a message could not be built
            raise translated(error) from error
        except (grpc.FutureTimeoutError, grpc.FutureCancelledError) as error:
            raise DeadlineExceeded(f"the store was not taken within {self._limit_s:.0f} s") from error

    def finish(self) -> list[pb.Fill]:
        self._result()
        return []

    def free(self) -> None:
        """Do nothing: the messages went with the stream."""


def _messages(units: Sequence[Unit], message_bytes: int) -> Iterator[list[_SentStrips]]:
    """Yield the units' strips, in messages of at most ``message_bytes``; a larger strip has a message of its own."""
    pieces: list[_SentStrips] = []
    size = 0
    for unit in units:
        layout = unit.layout
        for slab in range(unit.slab_first, unit.slab_stop):
            entry = layout.slabs[slab]
            first = 0
            for strip in range(entry.strip_count):
                number = entry.strip_first + strip
                strip_bytes = -(-int(layout.strip_lengths[number]) // ALIGNMENT) * ALIGNMENT
                begun = int(layout.strip_offsets[number] - layout.strip_offsets[entry.strip_first + first])
                if size + begun + strip_bytes > message_bytes and (pieces or begun):
                    if begun:
                        pieces.append(_SentStrips(unit, slab, first, strip, begun))
                    yield pieces
                    pieces, size, first, begun = [], 0, strip, 0
                if strip == entry.strip_count - 1:
                    pieces.append(_SentStrips(unit, slab, first, strip + 1, begun + strip_bytes))
                    size += begun + strip_bytes
    if pieces:
        yield pieces
