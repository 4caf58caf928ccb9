"""Fetches by the remote plane: a prefix that arrives in messages, and its strips into their places."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import lru_cache
from typing import Any, NamedTuple

import grpc
import numpy as np
from xxhash import xxh3_128_digest

from kvstore.chunk import ChunkHeader, ChunkLayout, layout_of, parse_header, strip_seeds
from kvstore.chunk.checksum import CHECKSUM_BYTES
from kvstore.errors import DataLoss, InvalidRequest, KVStoreError, Unavailable
from kvstore.keys import fingerprint
from kvstore.seams import FaultPoints
from kvstore.seams.memory import Bytes
from kvstore.spec import CacheKind, Exactness, MissReason, Tier
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1 import remote_pb2 as rpb
from kvstore.wire.data import ALIGNMENT, split_message
from kvstore_client.calls import noted
from kvstore_client.remote.session import RemoteSession
from kvstore_client.remote.staging import stream_timeout_s
from kvstore_client.wanted import Wanted

_log = logging.getLogger("kvstore.client")
_kept_seeds = lru_cache(maxsize=512)(strip_seeds)


class RemoteChunk:
    """One chunk of a prefix: what its header says, once that came."""

    def __init__(self, part: int, index: int, token_start: int, layout: ChunkLayout) -> None:
        self.part = part
        self.index = index
        self.token_start = token_start
        self.layout = layout
        self.seeds: list[int] = []
        self.checksums = b""

    def introduce(self, header: ChunkHeader) -> None:
        """Its header came: now its strips can be told from others."""
        self.seeds = _kept_seeds(header.storage_key, self.layout, header.write_id)
        self.checksums = header.checksums.tobytes()


class Place(NamedTuple):
    """Where consecutive strips lie: ``first .. stop`` of a slab (numbered within it), strip ``number`` of the chunk and
    those after it. ``spans``: (start, stop) of each in a run's bytes."""

    slab: int
    first: int
    stop: int
    number: int
    spans: tuple[tuple[int, int], ...]

    @property
    def byte_count(self) -> int:
        """With the padding after the last."""
        return -(-self.spans[-1][1] // ALIGNMENT) * ALIGNMENT


class Strips(NamedTuple):
    """Strips of a chunk, as they lie in a message."""

    chunk: RemoteChunk
    place: Place
    memory: Bytes

    def is_intact(self) -> bool:
        """Whether they are what the chunk's header says. Without a header, no."""
        spans, start = self.place.spans, self.place.number
        stop, data = start + len(spans), self.memory.data
        seeds = self.chunk.seeds[start:stop]
        if not seeds:
            return False
        found = [xxh3_128_digest(data[low:high], seed) for (low, high), seed in zip(spans, seeds, strict=True)]
        return b"".join(found) == self.chunk.checksums[start * CHECKSUM_BYTES : stop * CHECKSUM_BYTES]


class RemotePrefix:
    """A prefix on its way. ``close`` ends the stream, and the lease with it."""

    def __init__(
        self, session: RemoteSession, wanted: Wanted, head: pb.FetchResponse, digests: list[bytes], stream: Any,
        exactness: Exactness,
    ) -> None:  # fmt: skip
        self.exactness = exactness
        self._session = session  # it lasts as long as its last prefix
        self._stream = stream
        self._is_closed = False
        self.wanted = wanted
        self.tier = Tier(head.tier)
        self.reason = MissReason(head.reason)
        self.tails, self.tail_lengths = head.tails, head.tail_lengths
        self._digests = digests
        try:
            self.chunks = [self._chunk(entry) for entry in head.chunks]
        except (InvalidRequest, IndexError):
            _log.error("kvstore: the server names chunks that this model does not have: treated as a miss")
            self.chunks, self.reason = [], MissReason.CORRUPT
        self.stop = max((chunk.token_start + chunk.layout.token_count for chunk in self.chunks), default=0)
        self.token_count = self.stop

    is_provisional = False
    """What is sent was committed: a store in flight comes when it is."""

    @property
    def is_arriving(self) -> bool:
        return bool(self.chunks)

    def _chunk(self, entry: pb.ResidentChunk) -> RemoteChunk:
        spec = self.wanted.spec
        layer = None if entry.part == 0 else self.wanted.hidden_layers[entry.part - 1]
        layout = layout_of(spec, spec.kind if layer is None else CacheKind.E, entry.token_count, layer)
        self._digests[entry.index]
        return RemoteChunk(entry.part, entry.index, entry.index * spec.chunk_tokens, layout)

    def receive(self) -> list[Strips] | None:
        """The strips of the next message, or None when no more will come."""
        try:
            message = next(self._stream, None)
            if message is None:
                return None
            fields, data = split_message(rpb.FetchBytesResponse, message)
        except grpc.RpcError as error:
            found = RemoteSession.translated(error)
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

    def _take(self, chunk: RemoteChunk, run: rpb.StripRun, memory: Bytes, strips: list[Strips]) -> None:
        try:
            if run.strip_count:
                place = _place_of(chunk.layout, run.strip_first, run.strip_count)
                if memory.size != place.byte_count:
                    raise DataLoss("a run of strips is not as long as its strips are", reason="strips")
                strips.append(Strips(chunk, place, memory))
            else:
                chunk.introduce(self._header(chunk, memory))
        except DataLoss as error:
            self.cut(chunk, MissReason.CORRUPT)
            _log.error("kvstore: %s: treated as a miss", error.message)

    def _header(self, chunk: RemoteChunk, memory: Bytes) -> ChunkHeader:
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

    def cut(self, chunk: RemoteChunk, reason: MissReason) -> None:
        """The prefix ends before this chunk."""
        if chunk.token_start < self.stop:
            self.stop, self.reason = chunk.token_start, reason

    def settle(self, bad: set[int]) -> int:
        """Leading tokens whose strips are good (``bad``: ids of chunks)."""
        for chunk in self.chunks:
            if id(chunk) in bad:
                self.cut(chunk, MissReason.CORRUPT)
        return self.stop

    def cancel(self) -> None:
        """Wait no longer for what is on its way. From any thread."""
        self._stream.cancel()

    def abandon(self) -> None:
        """As ``cancel``, from a destructor."""
        self._session.returns.soon(self._stream.cancel)

    def close(self) -> None:
        """End the stream, and the lease with it. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._session.returns.soon(self._stream.cancel)

    __del__ = close  # a stream that nobody iterates, a fetch that failed half way


@lru_cache(maxsize=8192)
def _place_of(layout: ChunkLayout, number: int, count: int) -> Place:
    """Where ``count`` strips lie, from strip ``number`` of a chunk on. Raises DataLoss when they are not one slab's."""
    stop = number + count
    if stop > layout.strip_count:
        raise DataLoss("the message names strips that the chunk does not have", reason="strips")
    slab = int(np.searchsorted(layout.slab_firsts, number, side="right")) - 1
    entry = layout.slabs[slab]
    if stop > entry.strip_first + entry.strip_count:
        raise DataLoss("a run of strips reaches beyond its slab", reason="strips")
    starts = (layout.strip_offsets[number:stop] - layout.strip_offsets[number]).tolist()
    ends = [start + length for start, length in zip(starts, layout.strip_lengths[number:stop].tolist(), strict=True)]
    first = number - entry.strip_first
    return Place(slab, first, first + count, number, tuple(zip(starts, ends, strict=True)))


class RemoteLanding:
    """Strips into their places as the messages come, on the thread that waits for them: while it hashes and copies
    a message that is in the processor's cache, gRPC's threads take the next from the network. A thread more to hash
    and copy in cost as much as it did, on waiting for the interpreter. Interface: ``fetching.Landing``."""

    def __init__(
        self, prefix: RemotePrefix, target: Any, faults: FaultPoints, bad: set[int], on_copied: Callable[[], None]
    ) -> None:
        self._prefix = prefix
        self._target = target
        self._faults = faults
        self._bad = bad
        self._on_copied = on_copied
        wanted = prefix.wanted
        self.layers: list[list[Future[Any]]] = [[] for _ in wanted.layers]
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
        """Per slab and chunk the strips that are still to come: (chunk, first, stop)."""

    def _heads(self, chunk: RemoteChunk, slab: int) -> tuple[int, int]:
        wanted, count = self._prefix.wanted, chunk.layout.slabs[slab].strip_count
        if chunk.layout.blocked or wanted.head_stop is None:
            return 0, count
        return wanted.head_start, wanted.head_stop

    def advance(self) -> bool:
        """Wait for a message and copy what it brought. False when no more will come."""
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
        """Whether they are the next that are wanted of their slab: none is left out, none comes twice."""
        place = strips.place
        missing = self._missing.get((strips.chunk.part, place.slab), {})
        chunk, first, stop = missing.get(id(strips.chunk), (strips.chunk, 0, 0))
        if place.first != first or place.stop > stop:
            return False
        missing[id(chunk)] = (chunk, place.stop, stop)
        if place.stop == stop:
            del missing[id(chunk)]
        return True

    def _put(self, strips: Strips) -> None:
        """Into their places, if they are what their chunk's header says."""
        self._faults.reach("fetch.copy.middle")
        part, slab = strips.chunk.part, strips.place.slab
        if not strips.is_intact():
            self._bad.add(id(strips.chunk))
        elif part:
            self._target.copy_hidden_strips(self._prefix.wanted.hidden_layers[part - 1], strips)
        else:
            for position in self._positions[0, slab]:
                self._target.copy_strips(position, strips)

    def _end(self) -> None:
        """What did not come is lost."""
        for missing in self._missing.values():
            for chunk, _, _ in missing.values():
                reason = self._prefix.reason
                lost = reason if reason in (MissReason.CORRUPT, MissReason.STALE) else MissReason.UNAVAILABLE
                self._prefix.cut(chunk, lost)
            missing.clear()

    @property
    def is_waiting(self) -> bool:
        """Whether something that is wanted has not come yet."""
        return any(self._missing.values())

    def has_landed(self, position: int) -> bool:
        """Whether all of a layer has been copied."""
        return not any(missing for key, missing in self._missing.items() if position in self._positions.get(key, ()))

    def stop(self, timeout_s: float) -> None:
        """Nothing runs beside."""

    def finish(self, timeout_s: float) -> None:
        """Nothing runs beside."""


def open_remote(
    session: RemoteSession, wanted: Wanted, fetch: pb.FetchRequest, digests: list[bytes], timeout_s: float,
    exactness: Exactness,
) -> RemotePrefix:  # fmt: skip
    """Ask for the prefix; its first message says how long it is. Raises the typed error of a failed call."""
    unique = tuple(dict.fromkeys(wanted.layers))
    del fetch.layers[:]
    fetch.layers.extend(unique)
    count = 0 if wanted.head_stop is None else wanted.head_stop - wanted.head_start
    request = rpb.FetchBytesRequest(fetch=fetch, head_first=wanted.head_start, head_count=count)
    limit_s = stream_timeout_s(timeout_s, wanted.byte_count(len(digests) * wanted.spec.chunk_tokens))
    try:
        stream = noted(session.fetch_bytes(request, timeout=limit_s, metadata=session.metadata))
        fields, _ = split_message(rpb.FetchBytesResponse, next(stream))
    except grpc.RpcError as error:
        raise session.translated(error) from error
    except (StopIteration, ValueError, KVStoreError) as error:
        raise Unavailable("the sidecar is gone, or speaks another release's protocol") from error
    return RemotePrefix(session, wanted, fields.head, digests, stream, exactness)
