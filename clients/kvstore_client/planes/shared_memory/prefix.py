"""A resident prefix in the sidecar's memory: its chunks, their places, and the check that they are unchanged."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Self

import grpc

from kvstore.errors import DataLoss, KVStoreError
from kvstore.seams import FaultPoints
from kvstore.seams.fence import fence
from kvstore.spec import Exactness, MissReason, Tier
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.copying import Copier
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.planes.incoming import Incoming
from kvstore_client.planes.parts import part_layout
from kvstore_client.planes.prefix import Target, land, nothing
from kvstore_client.planes.shared_memory.chunk import Chunk
from kvstore_client.planes.shared_memory.mapped import MappedMemory
from kvstore_client.planes.shared_memory.reading import read_chunk
from kvstore_client.planes.shared_memory.resident import ResidentPrefix

_log = logging.getLogger("kvstore.client")


def _bits(number: int) -> Iterator[int]:
    """Yield the places of the bits that are set."""
    while number:
        low = number & -number
        yield low.bit_length() - 1
        number ^= low


class MappedPrefix(ResidentPrefix):
    """A leased prefix in mapped memory; some of its chunks may still be on their way there. ``close`` ends the stream,
    which gives the lease back. So does dropping it: the stream goes with it."""

    is_leased = True

    def __init__(
        self, session: MappedMemory, wanted: Wanted, response: pb.FetchResponse, digests: list[bytes], stream: Incoming,
        exactness: Exactness,
    ) -> None:  # fmt: skip
        super().__init__(session, wanted, [], exactness, Tier(response.tier), MissReason(response.reason))
        self._stream = stream
        self.tails, self.tail_lengths = response.tails, response.tail_lengths
        self._digests = digests
        self._entries = list(response.chunks)
        self._stop = max((self._span(entry)[1] for entry in self._entries), default=0)
        self._arriving = {number: entry for number, entry in enumerate(self._entries) if entry.is_arriving}
        self._landed: dict[int, tuple[Chunk, int]] = {}
        self._provisional: set[int] = set()
        self._missing: Counter[tuple[int, int]] | None = None
        """(part, slab) -> number of chunks of the prefix in which it has not landed; None: to be counted anew."""
        try:
            for entry in self._entries:
                if not entry.is_arriving and (chunk := self._read(entry)) is not None:
                    self.chunks.append(chunk)
        except BaseException:
            self.close()
            raise
        # What follows a chunk that is stale already is no part of it: no later check would look at that chunk.
        self.token_count = self._stop = self.settle(set())
        self.chunks = [chunk for chunk in self.chunks if chunk.token_start < self.token_count]

    def _span(self, entry: pb.ResidentChunk) -> tuple[int, int]:
        """Return the tokens of a chunk, (start, stop)."""
        start = entry.index * self.wanted.spec.chunk_tokens
        return start, start + entry.token_count

    def _read(self, entry: pb.ResidentChunk) -> Chunk | None:
        """Read a chunk's header. None for a wrong one: the prefix then ends before this chunk."""
        try:
            return read_chunk(self.session, self.wanted, entry, self._digests[entry.index], self.exactness)
        except DataLoss:
            pass  # the header of a store in flight may be written just now
        try:
            return read_chunk(self.session, self.wanted, entry, self._digests[entry.index], self.exactness)
        except DataLoss as error:
            fence()
            if not self._is_current(entry.generation_slot, entry.generation):
                self._cut(entry, MissReason.STALE)
                return None
            self._cut(entry, MissReason.CORRUPT)
            _log.error("kvstore: %s: treated as a miss", error.message)
            return None

    def _cut(self, entry: pb.ResidentChunk, reason: MissReason) -> None:
        start = self._span(entry)[0]
        if start < self._stop:
            self._stop, self.reason = start, reason
            self._missing = None

    # ------------------------------------------------------------ arrivals

    @property
    def was_in_memory(self) -> bool:
        """True when all of it was in memory at once."""
        return not any(entry.is_arriving for entry in self._entries)

    @property
    def is_provisional(self) -> bool:
        """True while some of it comes from stores that are not committed yet."""
        return bool(self._provisional)

    def advance(self) -> bool:
        """Wait for news of chunks on their way. Returns False when no more will come: chunks that did not arrive are
        lost then."""
        try:
            response = self._stream.read()
        except (grpc.RpcError, ValueError) as error:
            error.__traceback__ = None  # as in ``translated``
            response = None
        try:
            for each in response.arrivals if response is not None else ():
                entry = self._arriving.get(each.chunk)
                if entry is not None:
                    self._note(each.chunk, entry, each)
        except KVStoreError:  # the session ended just now, and with it the memory that the chunk arrived in
            response = None
        if response is None:
            for entry in self._arriving.values():
                self._cut(entry, MissReason.UNAVAILABLE)
            self._arriving, self._provisional = {}, set()
        return bool(self._arriving)

    def _note(self, number: int, entry: pb.ResidentChunk, arrival: pb.Arrival) -> None:
        known = self._landed.get(number)
        landed = int.from_bytes(arrival.slabs, "little")
        chunk = known[0] if known else self._read(entry) if landed else None
        if arrival.is_provisional:
            self._provisional.add(number)
            chunk = replace(chunk, is_provisional=True) if chunk is not None and known is None else chunk
        elif number in self._provisional:
            self._provisional.discard(number)
            self._committed(entry, lost=bool(arrival.lost))
        if chunk is not None:
            self._landed[number] = chunk, landed
            if known is None:
                self.chunks.append(chunk)
            if self._missing is not None and self._span(entry)[0] < self._stop:
                fresh = landed & ~(known[1] if known else 0)
                self._missing.subtract((entry.part, slab) for slab in _bits(fresh))
        if arrival.lost:
            self._cut(entry, MissReason(arrival.lost))
        whole = chunk is not None and landed == (1 << len(chunk.layout.slabs)) - 1
        if arrival.lost or (whole and not arrival.is_provisional):
            del self._arriving[number]

    def _committed(self, entry: pb.ResidentChunk, *, lost: bool) -> None:
        """Handle the end of a chunk's store. With ``verify`` its strips are checked now that their checksums are
        known."""
        if lost or (chunk := self._read(entry)) is None or not self.wanted.verify:
            return
        layers = self.wanted.layers if chunk.part == 0 else (None,)
        slabs = [0 if layer is None else chunk.layout.slab_of_layer[layer] for layer in layers]
        if not all(chunk.is_intact(slab, self.wanted.head_start, self.wanted.head_stop) for slab in slabs):
            self._cut(entry, MissReason.CORRUPT)

    def arrived(self, part: int, slab: int) -> list[Chunk] | None:
        """Return the arriving chunks of one part, once that slab of all of them is there; else None."""
        if self._missing is None:
            self._missing = self._counted()
        if self._missing[part, slab] > 0:
            return None
        return [self._landed[number][0] for number, entry in self._awaited() if entry.part == part]

    def _awaited(self) -> Iterator[tuple[int, pb.ResidentChunk]]:
        """Yield the chunks that were not in memory at once, as far as the prefix still reaches."""
        for number, entry in enumerate(self._entries):
            if entry.is_arriving and self._span(entry)[0] < self._stop:
                yield number, entry

    def _counted(self) -> Counter[tuple[int, int]]:
        missing: Counter[tuple[int, int]] = Counter()
        for number, entry in self._awaited():
            landed = self._landed[number][1] if number in self._landed else 0
            slab_count = len(
                part_layout(self.wanted.spec, self.wanted.hidden_layers, entry.part, entry.token_count).slabs
            )
            missing.update((entry.part, slab) for slab in _bits(~landed & (1 << slab_count) - 1))
        return missing

    # ------------------------------------------------------------ copies

    def copy_all(self, target: Target, copier: Copier, faults: FaultPoints, bad: set[int], timeout_s: float) -> None:
        if self._arriving:
            land(self.landing(target, copier, faults, bad, nothing), timeout_s)
            return
        super().copy_all(target, copier, faults, bad, timeout_s)

    def received(self) -> Self:
        """Return itself, once everything is in memory."""
        while self._arriving:
            self.advance()
        return self

    def cancel(self) -> None:
        self._stream.cancel()

    def abandon(self) -> None:
        self._stream.cancel_soon()

    def close(self) -> None:
        self._stream.end_soon()
