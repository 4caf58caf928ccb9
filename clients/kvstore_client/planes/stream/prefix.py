"""A prefix that arrives in messages: its layers are copied into places, or its chunks received whole."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.chunk import ChunkLayout
from kvstore.seams import FaultPoints
from kvstore.seams.memory import Bytes
from kvstore.spec import MissReason
from kvstore_client.arrays import destination
from kvstore_client.copying import Copier
from kvstore_client.planes.prefix import Target, land, nothing
from kvstore_client.planes.stream.landing import StreamLanding
from kvstore_client.planes.stream.streamed import StreamedChunks
from kvstore_client.planes.stream.strips import StreamChunk, Strips


class ReceivedChunk:
    """A chunk that arrives strip by strip, each of them checked."""

    def __init__(self, chunk: StreamChunk) -> None:
        self.token_start = chunk.token_start
        self.layout: ChunkLayout = chunk.layout
        self._memory = destination(0)
        self._strip_count = 0

    def take(self, strips: Strips) -> bool:
        """Add strips. Returns False unless they are the chunk's next ones, and match its header."""
        slab, extent = self.layout.slabs[0], strips.extent
        if extent.first != self._strip_count or not strips.is_intact():
            return False
        if not self._strip_count:
            self._memory = destination(slab.byte_count)
        start, size = int(self.layout.strip_offsets[extent.first]), extent.spans[-1][1]
        self._memory[start : start + size] = strips.memory[:size]
        self._strip_count = extent.stop
        return True

    @property
    def is_whole(self) -> bool:
        return self._strip_count == self.layout.slabs[0].strip_count

    def slab(self, _: int) -> Bytes:
        return self._memory

    def is_intact(self, *_: object) -> bool:
        """Return True: only strips that passed their check are here."""
        return True


class ReceivedPrefix:
    """The chunks of a query, received to the end, in memory of their own."""

    def __init__(self, prefix: StreamedChunks) -> None:
        self._prefix = prefix
        found = {id(chunk): (chunk, ReceivedChunk(chunk)) for chunk in prefix.chunks}
        while (strips := prefix.receive()) is not None:
            for each in strips:
                if not found[id(each.chunk)][1].take(each):
                    prefix.cut(each.chunk, MissReason.CORRUPT)
        for chunk, received in found.values():
            if not received.is_whole:
                prefix.cut(chunk, MissReason.UNAVAILABLE)
        self.chunks = [received for _, received in found.values() if received.token_start < prefix.stop]

    def settle(self, bad: set[int]) -> int:
        """Return the number of leading tokens that are good."""
        return self._prefix.settle(bad)

    def close(self) -> None:
        self._prefix.close()


class StreamPrefix(StreamedChunks):
    """Streamed chunks that can be taken in each of the ways that a prefix is."""

    is_leased = True
    is_provisional = False
    """The server sends committed bytes only: it waits for the commit of a store in flight."""

    def copy_all(self, target: Target, copier: Copier, faults: FaultPoints, bad: set[int], timeout_s: float) -> None:
        """Copy every requested layer, message by message."""
        land(self.landing(target, copier, faults, bad, nothing), timeout_s)

    def landing(
        self, target: Target, copier: Copier, faults: FaultPoints, bad: set[int], on_copied: Callable[[], None]
    ) -> StreamLanding:
        """Return copies that run on the thread that waits for the messages."""
        return StreamLanding(self, target, faults, bad, on_copied)

    def received(self) -> ReceivedPrefix:
        """Receive its chunks to the end, and return them."""
        return ReceivedPrefix(self)
