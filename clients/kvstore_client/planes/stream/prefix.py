"""A prefix that a stream of messages brings: its layers are copied into places, or its chunks received whole."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Self

import grpc

from kvstore.chunk import layout_of
from kvstore.errors import DataLoss, InvalidRequest
from kvstore.seams import FaultPoints
from kvstore.seams.memory import Bytes
from kvstore.spec import CacheKind, Exactness, MissReason, Tier
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1 import remote_pb2 as rpb
from kvstore.wire.data import split_message
from kvstore_client.copying import Copier
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.planes.incoming import Incoming
from kvstore_client.planes.parts import asked_header, part_layout
from kvstore_client.planes.prefix import Target, land, nothing
from kvstore_client.planes.session import ClientSession, translated
from kvstore_client.planes.stream.strips import StreamChunk, Strips, extent_of

_log = logging.getLogger("kvstore.client")


class StreamLanding:
    """Copies strips into their places as messages come (``planes.prefix.Landing``), on the thread that waits for them:
    while it hashes and copies a message in the processor's cache, gRPC's threads take the next from the network. A
    separate thread to hash and copy saved nothing: it lost as much time waiting for the interpreter."""

    def __init__(
        self, prefix: StreamPrefix, target: Target, faults: FaultPoints, bad: set[int], on_copied: Callable[[], None]
    ) -> None:
        self._prefix = prefix
        self._target = target
        self._faults = faults
        self._bad = bad
        self._on_copied = on_copied
        wanted = prefix.wanted
        self.layers: list[list[Future[None]]] = [[] for _ in wanted.layers]
        self._stop = prefix.stop
        slabs = layout_of(wanted.spec, wanted.spec.kind, 1).slab_of_layer
        self._positions: dict[tuple[int, int], list[int]] = {}
        for position, layer in enumerate(wanted.layers):
            self._positions.setdefault((0, slabs[layer]), []).append(position)
        parts = [*self._positions, *((part, 0) for part in range(1, len(wanted.hidden_layers) + 1))]
        self._missing = {
            each: {id(chunk): (chunk, *self._heads(chunk, each[1])) for chunk in prefix.chunks if chunk.part == each[0]}
            for each in parts
        }
        """Per slab and chunk, the strips that are still to come: (chunk, first, stop)."""

    def _heads(self, chunk: StreamChunk, slab: int) -> tuple[int, int]:
        wanted, count = self._prefix.wanted, chunk.layout.slabs[slab].strip_count
        if chunk.layout.blocked or wanted.head_stop is None:
            return 0, count
        return wanted.head_start, wanted.head_stop

    def advance(self) -> bool:
        strips = self._prefix.receive()
        if strips is None:
            self._end()
            return False
        if self._prefix.stop < self._stop:
            self._stop = self._prefix.stop
            for missing in self._missing.values():
                for key in [key for key, (chunk, _, _) in missing.items() if chunk.token_start >= self._stop]:
                    del missing[key]
        placed = [each for each in strips if self._note(each)]
        for each in placed:
            self._put(each)
        if placed:
            self._on_copied()
        return True

    def _note(self, strips: Strips) -> bool:
        """Return True when these strips are the next wanted ones of their slab: none is skipped, none comes twice."""
        extent = strips.extent
        missing = self._missing.get((strips.chunk.part, extent.slab), {})
        chunk, first, stop = missing.get(id(strips.chunk), (strips.chunk, 0, 0))
        if extent.first != first or extent.stop > stop:
            return False
        missing[id(chunk)] = (chunk, extent.stop, stop)
        if extent.stop == stop:
            del missing[id(chunk)]
        return True

    def _put(self, strips: Strips) -> None:
        """Copy strips into their places, if they match their chunk's header."""
        self._faults.reach("fetch.copy.middle")
        part, slab = strips.chunk.part, strips.extent.slab
        if not strips.is_intact():
            self._bad.add(id(strips.chunk))
        elif part:
            self._target.copy_hidden_strips(self._prefix.wanted.hidden_layers[part - 1], strips)
        else:
            for position in self._positions[0, slab]:
                self._target.copy_strips(position, strips)

    def _end(self) -> None:
        """Treat strips that did not come as lost."""
        for missing in self._missing.values():
            for chunk, _, _ in missing.values():
                reason = self._prefix.reason
                lost = reason if reason in (MissReason.CORRUPT, MissReason.STALE) else MissReason.UNAVAILABLE
                self._prefix.cut(chunk, lost)
            missing.clear()

    @property
    def is_waiting(self) -> bool:
        return any(self._missing.values())

    def has_landed(self, position: int) -> bool:
        return not any(missing for key, missing in self._missing.items() if position in self._positions.get(key, ()))

    def stop(self, timeout_s: float) -> None:
        """Do nothing: no copy runs on another thread."""

    def finish(self, timeout_s: float) -> None:
        """Do nothing: no copy runs on another thread."""


class StreamPrefix:
    """Chunks on their way, and where they end (``planes.prefix.Prefix``). ``close`` ends the stream, and the lease with
    it; so does dropping the prefix."""

    is_leased = True
    is_provisional = False
    """The server sends committed bytes only: it waits for the commit of a store in flight."""

    def __init__(
        self, session: ClientSession, wanted: Wanted, head: pb.FetchResponse, digests: list[bytes], stream: Incoming,
        exactness: Exactness,
    ) -> None:  # fmt: skip
        self.exactness = exactness
        self._session = session  # keeps the session alive as long as its last prefix
        self._stream = stream
        self.wanted = wanted
        self.tier = Tier(head.tier)
        self.reason = MissReason(head.reason)
        self.tails, self.tail_lengths = head.tails, head.tail_lengths
        self._digests = digests
        try:
            self.chunks = [self._chunk(entry) for entry in head.chunks]
            self._check_leading()
        except (InvalidRequest, IndexError):
            _log.error("kvstore: the server names chunks that this model does not have: treated as a miss")
            self.chunks, self.reason = [], MissReason.CORRUPT
        self.stop = max((chunk.token_start + chunk.layout.token_count for chunk in self.chunks), default=0)
        self.token_count = self.stop

    def _chunk(self, entry: pb.ResidentChunk) -> StreamChunk:
        spec = self.wanted.spec
        layout = part_layout(spec, self.wanted.hidden_layers, entry.part, entry.token_count)
        self._digests[entry.index]
        return StreamChunk(entry.part, entry.index, entry.index * spec.chunk_tokens, layout)

    def _check_leading(self) -> None:
        """Raise InvalidRequest unless the chunks are the chain's leading ones, in all parts and without a gap: a chunk
        in a gap would count as fetched, and never come. Values by key have lengths of their own."""
        part_count = 1 + len(self.wanted.hidden_layers)
        count = len(self.chunks) // part_count
        places = sorted((chunk.part, chunk.index) for chunk in self.chunks)
        is_chain = self.wanted.spec.kind is not CacheKind.OPAQUE
        if places != [(part, index) for part in range(part_count) for index in range(count)] or any(
            is_chain and chunk.index < count - 1 and not chunk.layout.is_full for chunk in self.chunks
        ):
            raise InvalidRequest("the chunks are not the leading ones of the chain")

    def receive(self) -> list[Strips] | None:
        """Return the strips of the next message, or None when no more will come."""
        try:
            message = self._stream.read()
            if message is None:
                return None
            fields, data = split_message(rpb.FetchBytesResponse, message)
        except grpc.RpcError as error:
            found = translated(error)
            self.reason = MissReason.CORRUPT if isinstance(found, DataLoss) else MissReason.UNAVAILABLE
            return None
        except (InvalidRequest, ValueError):
            return None
        for news in fields.lost:
            if news.chunk < len(self.chunks):
                self.cut(self.chunks[news.chunk], MissReason(news.lost))
        strips: list[Strips] = []
        place = 0
        for run in fields.runs:
            memory = data[place : place + run.byte_count]
            place += run.byte_count
            if run.chunk < len(self.chunks):
                self._take(self.chunks[run.chunk], run, memory, strips)
        return strips

    def _take(self, chunk: StreamChunk, run: rpb.StripRun, memory: Bytes, strips: list[Strips]) -> None:
        try:
            if run.strip_count:
                extent = extent_of(chunk.layout, run.strip_first, run.strip_count)
                if memory.size != extent.byte_count:
                    raise DataLoss("a run of strips is not as long as its strips are", reason="strips")
                strips.append(Strips(chunk, extent, memory))
            else:
                digest = self._digests[chunk.index]
                data = memory.tobytes()
                chunk.introduce(asked_header(data, chunk.layout, self.wanted, chunk.part, digest, self.exactness))
        except DataLoss as error:
            self.cut(chunk, MissReason.CORRUPT)
            _log.error("kvstore: %s: treated as a miss", error.message)

    def cut(self, chunk: StreamChunk, reason: MissReason) -> None:
        """End the prefix before this chunk."""
        if chunk.token_start < self.stop:
            self.stop, self.reason = chunk.token_start, reason

    def settle(self, bad: set[int]) -> int:
        for chunk in self.chunks:
            if id(chunk) in bad:
                self.cut(chunk, MissReason.CORRUPT)
        return self.stop

    def copy_all(self, target: Target, copier: Copier, faults: FaultPoints, bad: set[int], timeout_s: float) -> None:
        land(self.landing(target, copier, faults, bad, nothing), timeout_s)

    def landing(
        self, target: Target, copier: Copier, faults: FaultPoints, bad: set[int], on_copied: Callable[[], None]
    ) -> StreamLanding:
        """Return copies that run on the thread that waits for the messages."""
        return StreamLanding(self, target, faults, bad, on_copied)

    def received(self) -> Self:
        """Return itself, once its chunks were received to the end, in memory of their own."""
        while (strips := self.receive()) is not None:
            for each in strips:
                if not each.chunk.take(each):
                    self.cut(each.chunk, MissReason.CORRUPT)
        for chunk in self.chunks:
            if not chunk.is_whole:
                self.cut(chunk, MissReason.UNAVAILABLE)
        self.chunks = [chunk for chunk in self.chunks if chunk.token_start < self.stop]
        return self

    def cancel(self) -> None:
        self._stream.cancel()

    def abandon(self) -> None:
        self._stream.cancel_soon()

    def close(self) -> None:
        self._stream.end_soon()
