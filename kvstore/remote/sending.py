"""FetchBytes: a leased prefix, from the arena into messages.

Bytes are sent layer by layer in the order asked for, chunk by chunk, and of each slab only the heads asked for. Slabs
that still come from a device are sent when they have landed. A chunk whose generation changed while it was copied is
not sent: the client is told that it is lost, and no chunk after it is sent either.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import grpc

from kvstore.chunk import ChunkLayout, layout_of
from kvstore.errors import DataLoss, InvalidRequest, Unavailable
from kvstore.remote.node import Node, typed_error
from kvstore.remote.session import SidecarSession
from kvstore.seams.fence import fence
from kvstore.seams.memory import Bytes
from kvstore.spec import CacheKind, MissReason, ModelSpec
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1 import remote_pb2 as rpb
from kvstore.wire.data import ALIGNMENT, data_message


@dataclass(eq=False, slots=True)
class _Chunk:
    """A leased chunk. ``extents``: its bytes in the arena. ``landed``: a bitmap of the slabs that can be read; -1: all.
    ``is_introduced``: its header was queued."""

    number: int
    entry: pb.ResidentChunk
    layout: ChunkLayout
    extents: list[Bytes]
    landed: int
    is_introduced: bool = False

    def run(self, start: int, stop: int) -> Bytes:
        """Return the bytes ``start .. stop`` of header and body, which lie in one extent."""
        for extent in self.extents:
            if start < extent.size:
                return extent[start:stop]
            start, stop = start - extent.size, stop - extent.size
        raise DataLoss("the chunk's extents end before its slabs", reason="extents")


class Sending:
    """One stream. The caller iterates ``messages``, then calls ``close`` in any case."""

    def __init__(
        self, node: Node, session: SidecarSession, request: rpb.FetchBytesRequest, message_bytes: int,
        carried: tuple[tuple[str, str | bytes], ...],
    ) -> None:  # fmt: skip
        """``carried``: metadata for the call to the sidecar. Raises InvalidRequest for a model that was not registered
        here, or for layers and heads that it does not have."""
        query = request.fetch.query
        spec = node.spec_of(query.fingerprint)
        self._node = node
        self._session = session
        self._carried = carried
        self._request = request
        self._spec = spec
        self._message_bytes = message_bytes
        self._parts: list[int | None] = [*([] if query.hidden_only else [None]), *query.hidden_layers]
        self._steps = list(_steps(spec, self._parts, request))
        self._call: Any = None
        self._lease_id = 0
        self._chunks: list[_Chunk] = []
        self._lost: list[pb.Arrival] = []
        self._stop = 1 << 32
        """The chain index of the first lost chunk; no chunk from there on is sent."""
        self._runs: list[tuple[_Chunk, rpb.StripRun, Bytes]] = []
        self._pending_bytes = 0

    async def messages(self, timeout_s: float | None) -> AsyncIterator[bytes]:
        """Give the stream's messages. Raises the error with which the sidecar refuses the fetch."""
        self._call = self._node.cache.Fetch(self._request.fetch, timeout=timeout_s, metadata=self._carried)
        head = await self._read()
        if head is None:
            raise Unavailable("the sidecar ended the fetch before it began")
        self._lease_id = head.lease_id
        pauses = self._node.long_work.begin()
        shown = _shown(head)
        of_part: list[list[_Chunk]] = [[] for _ in self._parts]
        for number, entry in enumerate(head.chunks):
            chunk = await self._open(number, entry)
            self._chunks.append(chunk)
            of_part[entry.part].append(chunk)
            shown.chunks.add(index=entry.index, part=entry.part, token_count=entry.token_count, is_arriving=True)
            await pauses.between()
        yield rpb.FetchBytesResponse(head=shown).SerializeToString()
        for part, slab, first, stop in self._steps:
            for chunk in of_part[part]:
                if chunk.entry.index < self._stop:
                    while not self._is_there(chunk, slab):
                        if self._runs or self._lost:
                            yield self._message()
                        await self._advance()
                    if chunk.entry.index < self._stop:
                        for message in self._add(chunk, slab, first, stop):
                            yield message
                await pauses.between()
        if self._runs or self._lost:
            yield self._message()

    def close(self) -> None:
        """Give the lease back, without waiting: after a client went, its stream's task cannot wait for anything."""
        if self._call is not None:
            self._call.cancel()
        if self._lease_id:
            self._node.give_back(self._session, self._lease_id)

    # ------------------------------------------------------------ where it lies

    async def _open(self, number: int, entry: pb.ResidentChunk) -> _Chunk:
        if entry.part >= len(self._parts):
            raise InvalidRequest("hidden_layers must be the ones the ticket was issued for")
        layer = self._parts[entry.part]
        layout = layout_of(self._spec, self._spec.kind if layer is None else CacheKind.E, entry.token_count, layer)
        extents = [
            (await self._node.region(self._session, each.region))[each.offset : each.offset + each.byte_count]
            for each in entry.extents
        ]
        if sum(extent.size for extent in extents) != layout.total_bytes:
            raise DataLoss("the extents do not hold a chunk of this model", reason="extents")
        return _Chunk(number, entry, layout, extents, 0 if entry.is_arriving else -1)

    def _is_there(self, chunk: _Chunk, slab: int) -> bool:
        """True when there is nothing to wait for: the slab can be sent, or it never will be."""
        return bool(chunk.landed >> slab & 1) or chunk.entry.index >= self._stop

    async def _read(self) -> pb.FetchResponse | None:
        try:
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise typed_error(error) from error
        return None if response is grpc.aio.EOF else response

    async def _advance(self) -> None:
        """Wait for news of arriving chunks. Chunks that will not arrive any more are lost."""
        response = await self._read()
        if response is None:
            for chunk in self._chunks:
                if chunk.landed >= 0 and chunk.landed != (1 << len(chunk.layout.slabs)) - 1:
                    self._lose(chunk, MissReason.UNAVAILABLE)
            return
        for news in response.arrivals:
            if news.is_provisional:
                continue  # its checksums are not known yet, and clients could not check its bytes
            chunk = self._chunks[news.chunk]
            chunk.landed = int.from_bytes(news.slabs, "little")
            if news.lost:
                self._lose(chunk, MissReason(news.lost))

    def _lose(self, chunk: _Chunk, reason: MissReason) -> None:
        self._stop = min(self._stop, chunk.entry.index)
        self._lost.append(pb.Arrival(chunk=chunk.number, lost=int(reason)))  # type: ignore[arg-type]  # the wire's number

    # ------------------------------------------------------------ messages

    def _add(self, chunk: _Chunk, slab: int, first: int, stop: int | None) -> Iterable[bytes]:
        """Queue a slab's strips, and the header before the chunk's first strips. Give the messages that are full."""
        layout = chunk.layout
        if not chunk.is_introduced:
            chunk.is_introduced = True
            if self._pending_bytes + layout.header_bytes > self._message_bytes and self._runs:
                yield self._message()
            self._queue(chunk, 0, 0, chunk.run(0, layout.header_bytes))
        for number, count, low, high in _cuts(layout, slab, first, stop, self._message_bytes):
            if self._pending_bytes + high - low > self._message_bytes and self._runs:
                yield self._message()
            self._queue(chunk, number, count, chunk.run(low, high))

    def _queue(self, chunk: _Chunk, first: int, count: int, memory: Bytes) -> None:
        run = rpb.StripRun(chunk=chunk.number, strip_first=first, strip_count=count, byte_count=memory.size)
        self._runs.append((chunk, run, memory))
        self._pending_bytes += memory.size

    def _message(self) -> bytes:
        """Return the queued runs, copied into a message. A chunk that changed while it was copied is left out, and
        named as lost."""
        runs, self._runs, self._pending_bytes = self._runs, [], 0
        while True:
            lost, self._lost = self._lost, []
            fields = rpb.FetchBytesResponse(runs=[run for _, run, _ in runs], lost=lost)
            message = data_message(fields, [memory for _, _, memory in runs])
            fence()  # the bytes were read before their generations are
            gone = [
                chunk for chunk in {id(chunk): chunk for chunk, _, _ in runs}.values() if not self._is_current(chunk)
            ]
            if not gone:
                return message
            self._lost = lost
            for chunk in gone:
                self._lose(chunk, MissReason.STALE)
            runs = [each for each in runs if each[0] not in gone]

    def _is_current(self, chunk: _Chunk) -> bool:
        return bool(self._node.generations[chunk.entry.generation_slot] == chunk.entry.generation)


@lru_cache(maxsize=4096)
def _cuts(
    layout: ChunkLayout, slab: int, first: int, stop: int | None, message_bytes: int
) -> tuple[tuple[int, int, int, int], ...]:
    """Cut the strips ``first .. stop`` of a slab into as few runs as fit messages: (first strip's number in the chunk,
    count, start and stop in header and body). A strip larger than a message is a run of its own."""
    entry = layout.slabs[slab]
    numbers = range(entry.strip_first + first, entry.strip_first + (entry.strip_count if stop is None else stop))
    cuts: list[tuple[int, int, int, int]] = []
    for number in numbers:
        low = layout.header_bytes + int(layout.strip_offsets[number])
        high = low + -(-int(layout.strip_lengths[number]) // ALIGNMENT) * ALIGNMENT
        if cuts and high - cuts[-1][2] <= message_bytes:
            begun, count, start, _ = cuts[-1]
            cuts[-1] = begun, count + 1, start, high
        else:
            cuts.append((number, 1, low, high))
    return tuple(cuts)


def _steps(
    spec: ModelSpec, parts: list[int | None], request: rpb.FetchBytesRequest
) -> Iterable[tuple[int, int, int, int | None]]:
    """Give (part, slab, first and stop strip within the slab) in the order to send. Raises InvalidRequest for layers
    and heads that the model does not have."""
    for part, hidden in enumerate(parts):
        if hidden is not None:
            yield part, 0, 0, None
            continue
        layout = layout_of(spec, spec.kind, spec.chunk_tokens)
        for layer in request.fetch.layers or spec.slab_layers or (0,):  # opaque chunks have one slab and no layers
            slab = layout.slab_of_layer.get(layer)
            if slab is None:
                raise InvalidRequest(f"layer {layer} keeps no cache in this model of {spec.layer_count} layers")
            if layout.blocked or not request.head_count:
                yield part, slab, 0, None
                continue
            stop = request.head_first + request.head_count
            if stop > layout.slabs[slab].heads:
                raise InvalidRequest(f"heads {request.head_first}..{stop} of {layout.slabs[slab].heads}")
            yield part, slab, request.head_first, stop


def _shown(head: pb.FetchResponse) -> pb.FetchResponse:
    """Return the first message without its chunks, and without what means nothing on another host."""
    return pb.FetchResponse(
        hit_count=head.hit_count, tier=head.tier, reason=head.reason, tails=head.tails, tail_lengths=head.tail_lengths
    )
