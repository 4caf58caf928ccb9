"""The chunks of a prefix, as a stream of messages brings them."""

from __future__ import annotations

import logging

import grpc

from kvstore.chunk import ChunkHeader, layout_of, parse_header
from kvstore.errors import DataLoss, InvalidRequest
from kvstore.keys import fingerprint
from kvstore.seams.memory import Bytes
from kvstore.spec import CacheKind, Exactness, MissReason, Tier
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1 import remote_pb2 as rpb
from kvstore.wire.data import split_message
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.planes.incoming import Incoming
from kvstore_client.planes.session import ClientSession, translated
from kvstore_client.planes.stream.strips import StreamChunk, Strips, extent_of

_log = logging.getLogger("kvstore.client")


class StreamedChunks:
    """Chunks on their way, and where they end. ``close`` ends the stream, and the lease with it; so does
    dropping them."""

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
        layer = None if entry.part == 0 else self.wanted.hidden_layers[entry.part - 1]
        layout = layout_of(spec, spec.kind if layer is None else CacheKind.E, entry.token_count, layer)
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
                chunk.introduce(self._header(chunk, memory))
        except DataLoss as error:
            self.cut(chunk, MissReason.CORRUPT)
            _log.error("kvstore: %s: treated as a miss", error.message)

    def _header(self, chunk: StreamChunk, memory: Bytes) -> ChunkHeader:
        spec = self.wanted.spec
        layer = None if chunk.part == 0 else self.wanted.hidden_layers[chunk.part - 1]
        header = parse_header(memory.tobytes(), chunk.layout)
        if header.encoding != "raw":
            raise DataLoss("memory holds raw chunks only", reason="encoding")
        name = fingerprint(spec, spec.kind if layer is None else CacheKind.E, layer)
        if header.chain_digest != self._digests[chunk.index] or header.fingerprint != name:
            raise DataLoss("the message holds another chunk than the one asked for", reason="header")
        if header.exactness is not self.exactness:
            raise DataLoss(f"the message holds a chunk that is {header.exactness}", reason="exactness")
        return header

    def cut(self, chunk: StreamChunk, reason: MissReason) -> None:
        """End the prefix before this chunk."""
        if chunk.token_start < self.stop:
            self.stop, self.reason = chunk.token_start, reason

    def settle(self, bad: set[int]) -> int:
        """Return the number of leading tokens whose strips are good (``bad``: ids of chunks)."""
        for chunk in self.chunks:
            if id(chunk) in bad:
                self.cut(chunk, MissReason.CORRUPT)
        return self.stop

    def cancel(self) -> None:
        """Stop waiting for bytes on their way. From any thread."""
        self._stream.cancel()

    def abandon(self) -> None:
        """Cancel from a destructor."""
        self._stream.cancel_soon()

    def close(self) -> None:
        """End the stream, and the lease with it. Idempotent."""
        self._stream.end_soon()
