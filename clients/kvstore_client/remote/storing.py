"""Stores by the remote plane: the same steps, the bytes in a stream between reserve and commit."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import xxhash

from kvstore.chunk import slab_parts
from kvstore.errors import DeadlineExceeded, KVStoreError, Unavailable
from kvstore.seams import FaultPoints
from kvstore.spec import Durability
from kvstore.v1 import remote_pb2 as rpb
from kvstore.wire.data import ALIGNMENT, data_prefix
from kvstore_client.arrays import fresh_message
from kvstore_client.calls import noted
from kvstore_client.copying import Copier, check, copy, plane_run, raw
from kvstore_client.prefix import AnySession
from kvstore_client.remote.session import RemoteSession
from kvstore_client.remote.staging import stream_timeout_s
from kvstore_client.storing import Source, Store, Unit


@dataclass(frozen=True)
class _Piece:
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


def store_of(session: AnySession, source: Source, copier: Copier, faults: FaultPoints, timeout_s: float) -> Store:
    """A store by the session's plane."""
    if isinstance(session, RemoteSession):
        return RemoteStore(session, source, copier, faults, timeout_s)
    return Store(session, session.staging, source, copier, faults, timeout_s)


class RemoteStore(Store):
    """One store on its way to another host. ``stage`` returns when every byte is in a message."""

    def __init__(
        self, session: RemoteSession, source: Source, copier: Copier, faults: FaultPoints, timeout_s: float
    ) -> None:
        super().__init__(session, None, source, copier, faults, timeout_s)
        self._stream: Any = None
        self._limit_s = timeout_s
        self._builds: list[Future[bytes]] = []
        self._has_stopped = False
        self._turn = threading.Lock()
        self._read = threading.Event()
        """Nothing reads the caller's tensors any more, or the stream has ended."""

    def _copy_all(self, units: list[Unit]) -> None:
        session = self._session
        assert isinstance(session, RemoteSession)
        messages = list(_messages(units, session.message_bytes))
        if messages:
            self._send(session, messages, sum(unit.byte_count for unit in units))
        self._faults.reach("store.staged")

    def _send(self, session: RemoteSession, messages: list[list[_Piece]], byte_count: int) -> None:
        """Returns when nothing reads the caller's tensors any more. Raises the typed error of a failed stream."""
        self._limit_s = stream_timeout_s(self._timeout_s, byte_count)
        try:
            self._stream = noted(
                session.store_bytes.future(self._outgoing(messages), timeout=self._limit_s, metadata=session.metadata)
            )
        except ValueError as error:
            raise Unavailable("the sidecar is gone") from error
        self._stream.add_done_callback(lambda _: self._read.set())
        read = self._read.wait(self._limit_s)
        if not read or self._stream.done():
            self._stop()
        if not read:
            raise DeadlineExceeded(f"the store was not sent within {self._limit_s:.0f} s")
        if self._stream.done():
            self._result()

    def _outgoing(self, messages: Sequence[list[_Piece]]) -> Iterator[bytes]:
        """The messages, each built while the one before is sent. gRPC takes the next when it has room."""
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

    def _build(self, pieces: list[_Piece]) -> bytes:
        """One message: the tensors' bytes, copied to where they will be sent from."""
        size = sum(piece.byte_count for piece in pieces)
        fields = rpb.StoreBytesRequest(
            reservation_id=self._reservation_id, runs=[piece.run() for piece in pieces], checksum=bytes(16)
        )
        start = len(data_prefix(fields, size))
        message, memory = fresh_message(start + size)
        place = start
        for piece in pieces:
            self._copy_piece(piece, memory[place : place + piece.byte_count])
            place += piece.byte_count
        fields.checksum = xxhash.xxh3_128_digest(memory[start:].data)
        memory[:start] = np.frombuffer(data_prefix(fields, size), np.uint8)
        return message

    def _copy_piece(self, piece: _Piece, memory: Any) -> None:
        unit = piece.unit
        layout = unit.layout
        planes = self._source.planes[unit.part][piece.slab]
        heads = slice(0, 1) if layout.blocked else slice(piece.first, piece.stop)
        for part in slab_parts(layout, piece.slab, memory, first=piece.first, stop=piece.stop):
            source = plane_run(planes[part.which], unit.token_start, layout.token_count, 1, part)
            copy(raw(part.array), source[:, heads])

    def _stop(self) -> None:
        """End the stream. Afterwards nothing reads the caller's tensors."""
        with self._turn:
            self._has_stopped = True
        if self._stream is not None:
            self._stream.cancel()
        wait(self._builds, self._limit_s)

    def _result(self) -> None:
        """Wait until the bytes are in place. Raises the typed error of a failed stream."""
        if self._stream is None:
            return
        try:
            self._stream.result(self._limit_s)
        except grpc.RpcError as error:
            for build in self._builds:
                if build.done():
                    check(build)  # to gRPC a message that could not be built is a stream without a reason
            raise self._session.translated(error) from error
        except (grpc.FutureTimeoutError, grpc.FutureCancelledError) as error:
            raise DeadlineExceeded(f"the store was not taken within {self._limit_s:.0f} s") from error

    def commit(self) -> tuple[Durability, int, str]:
        """Wait for the stream, and commit. Runs in the background. Failures are the outcome, not exceptions."""
        try:
            self._result()
        except KVStoreError as error:
            self.abort()
            return Durability.NONE, 0, error.message
        return super().commit()

    def abort(self) -> None:
        """Drop the reservation, if the server still knows us."""
        self._stop()
        super().abort()


def _messages(units: Sequence[Unit], message_bytes: int) -> Iterator[list[_Piece]]:
    """The units' strips, in messages of at most ``message_bytes``; a strip larger than that has one of its own."""
    pieces: list[_Piece] = []
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
                        pieces.append(_Piece(unit, slab, first, strip, begun))
                    yield pieces
                    pieces, size, first, begun = [], 0, strip, 0
                if strip == entry.strip_count - 1:
                    pieces.append(_Piece(unit, slab, first, strip + 1, begun + strip_bytes))
                    size += begun + strip_bytes
    if pieces:
        yield pieces
