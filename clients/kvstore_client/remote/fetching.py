"""Fetches by the remote plane: a prefix that arrives in messages, and its strips into their places."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import lru_cache
from typing import Any, NamedTuple

import grpc
import numpy as np
import xxhash

from kvstore.chunk import ChunkHeader, ChunkLayout, layout_of, parse_header, strip_seeds
from kvstore.errors import DataLoss, InvalidRequest, KVStoreError, Unavailable
from kvstore.keys import fingerprint
from kvstore.seams import FaultPoints
from kvstore.seams.memory import Bytes
from kvstore.spec import CacheKind, MissReason, Tier
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1 import remote_pb2 as rpb
from kvstore.wire.data import ALIGNMENT, split_message
from kvstore_client.copying import Copier, wait_all
from kvstore_client.remote.session import RemoteSession
from kvstore_client.remote.staging import stream_timeout_s
from kvstore_client.wanted import Wanted

MESSAGES_AHEAD = 4
"""Messages whose copies may be waiting: what a fetch holds beside its destination."""
_log = logging.getLogger("kvstore.client")
_kept_seeds = lru_cache(maxsize=512)(strip_seeds)


class RemoteChunk:
    """One chunk of a prefix: what its header says, once that came."""

    def __init__(self, part: int, index: int, token_start: int, layout: ChunkLayout) -> None:
        self.part = part
        self.index = index
        self.token_start = token_start
        self.layout = layout
        self.header: ChunkHeader | None = None


class Strips(NamedTuple):
    """Strips ``first .. stop`` of a slab (numbered within it), as they lie in a message."""

    chunk: RemoteChunk
    slab: int
    first: int
    stop: int
    memory: Bytes

    def is_intact(self) -> bool:
        """Whether they are what the chunk's header says. Without a header, no."""
        layout, header = self.chunk.layout, self.chunk.header
        if header is None:
            return False
        base = layout.slabs[self.slab].strip_first
        start, stop = base + self.first, base + self.stop
        seeds = _kept_seeds(header.storage_key, layout, header.write_id)
        offsets = (layout.strip_offsets[start:stop] - layout.strip_offsets[start]).tolist()
        lengths = layout.strip_lengths[start:stop].tolist()
        data = self.memory.data
        found = b"".join(
            xxhash.xxh3_128_digest(data[offset : offset + length], seed)
            for offset, length, seed in zip(offsets, lengths, seeds[start:stop], strict=True)
        )
        return found == header.checksums[start:stop].tobytes()


class RemotePrefix:
    """A prefix on its way. ``close`` ends the stream, and the lease with it."""

    def __init__(self, wanted: Wanted, head: pb.FetchResponse, digests: list[bytes], stream: Any) -> None:
        self.wanted = wanted
        self.tier = Tier(head.tier)
        self.reason = MissReason(head.reason)
        self.tails = head.tails
        self._digests = digests
        self._stream = stream
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
                strips.append(_strips(chunk, run, memory))
            else:
                chunk.header = self._header(chunk, memory)
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

    def close(self) -> None:
        """End the stream. Idempotent."""
        self._stream.cancel()


def _strips(chunk: RemoteChunk, run: rpb.StripRun, memory: Bytes) -> Strips:
    layout = chunk.layout
    stop = run.strip_first + run.strip_count
    if stop > layout.strip_count:
        raise DataLoss("the message names strips that the chunk does not have", reason="strips")
    slab = int(np.searchsorted(layout.slab_firsts, run.strip_first, side="right")) - 1
    entry = layout.slabs[slab]
    last = stop - 1
    size = int(layout.strip_offsets[last] + layout.strip_lengths[last] - layout.strip_offsets[run.strip_first])
    if stop > entry.strip_first + entry.strip_count or memory.size != -(-size // ALIGNMENT) * ALIGNMENT:
        raise DataLoss("a run of strips is not as long as its strips are", reason="strips")
    return Strips(chunk, slab, run.strip_first - entry.strip_first, stop - entry.strip_first, memory)


class RemoteLanding:
    """Strips into their places as the messages come. Interface: ``fetching.Landing``."""

    def __init__(
        self, prefix: RemotePrefix, target: Any, copier: Copier, faults: FaultPoints, bad: set[int],
        on_copied: Callable[[], None], timeout_s: float,
    ) -> None:  # fmt: skip
        self._prefix = prefix
        self._target = target
        self._copier = copier
        self._faults = faults
        self._bad = bad
        self._on_copied = on_copied
        self._timeout_s = timeout_s
        wanted = prefix.wanted
        self.layers: list[list[Future[Any]]] = [[] for _ in wanted.layers]
        self._running: deque[Future[Any]] = deque()
        self._all: list[Future[Any]] = []
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
        """Wait for a message and start its copies. False when no more will come."""
        while len(self._running) >= MESSAGES_AHEAD:
            wait_all([self._running.popleft()], self._timeout_s)
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
        if placed:
            job = self._copier.submit(self._place, placed)
            self._running.append(job)
            self._all.append(job)
            for slab in {(each.chunk.part, each.slab) for each in placed}:
                for position in self._positions.get(slab, ()):
                    self.layers[position].append(job)
        return True

    def _note(self, strips: Strips) -> bool:
        """Whether they are the next that are wanted of their slab: none is left out, none comes twice."""
        missing = self._missing.get((strips.chunk.part, strips.slab), {})
        chunk, first, stop = missing.get(id(strips.chunk), (strips.chunk, 0, 0))
        if strips.first != first or strips.stop > stop:
            return False
        missing[id(chunk)] = (chunk, strips.stop, stop)
        if strips.stop == stop:
            del missing[id(chunk)]
        return True

    def _place(self, placed: list[Strips]) -> None:
        for strips in placed:
            self._faults.reach("fetch.copy.middle")
            if not strips.is_intact():
                self._bad.add(id(strips.chunk))
            elif strips.chunk.part:
                self._target.copy_hidden_strips(self._prefix.wanted.hidden_layers[strips.chunk.part - 1], strips)
            else:
                for position in self._positions[0, strips.slab]:
                    self._target.copy_strips(position, strips)
        self._on_copied()

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
        """Whether all copies of a layer have been started."""
        return not any(missing for key, missing in self._missing.items() if position in self._positions.get(key, ()))

    def finish(self, timeout_s: float) -> None:
        """Wait for the copies. Raises DeadlineExceeded while one may still be running."""
        wait_all(self._all, timeout_s)


def open_remote(
    session: RemoteSession, wanted: Wanted, fetch: pb.FetchRequest, digests: list[bytes], timeout_s: float
) -> RemotePrefix:
    """Ask for the prefix; its first message says how long it is. Raises the typed error of a failed call."""
    unique = tuple(dict.fromkeys(wanted.layers))
    del fetch.layers[:]
    fetch.layers.extend(unique)
    count = 0 if wanted.head_stop is None else wanted.head_stop - wanted.head_start
    request = rpb.FetchBytesRequest(fetch=fetch, head_first=wanted.head_start, head_count=count)
    limit_s = stream_timeout_s(timeout_s, wanted.byte_count(len(digests) * wanted.spec.chunk_tokens))
    try:
        stream = session.fetch_bytes(request, timeout=limit_s, metadata=session.metadata)
        fields, _ = split_message(rpb.FetchBytesResponse, next(stream))
    except grpc.RpcError as error:
        raise session.translated(error) from error
    except (StopIteration, ValueError, KVStoreError) as error:
        raise Unavailable("the sidecar is gone, or speaks another release's protocol") from error
    return RemotePrefix(wanted, fields.head, digests, stream)
