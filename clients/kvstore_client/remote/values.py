"""Opaque values by the remote plane: chunks out of messages, and into them."""

from __future__ import annotations

from typing import Any

from kvstore.chunk import ChunkLayout
from kvstore.seams import FaultPoints
from kvstore.spec import MissReason
from kvstore_client.arrays import destination
from kvstore_client.copying import Copier
from kvstore_client.remote.fetching import RemoteChunk, RemotePrefix, Strips
from kvstore_client.remote.session import RemoteSession
from kvstore_client.remote.storing import RemoteStore, _Piece
from kvstore_client.value import UNIT_BYTES, Value, WholeStore


class ReceivedChunk:
    """A chunk as it comes, strip by strip, each of them checked."""

    def __init__(self, chunk: RemoteChunk) -> None:
        self.token_start = chunk.token_start
        self.layout: ChunkLayout = chunk.layout
        self._memory = destination(0)
        self._strip_count = 0

    def take(self, strips: Strips) -> bool:
        """Whether they are the next of it, and what its header says."""
        slab, place = self.layout.slabs[0], strips.place
        if place.first != self._strip_count or not strips.is_intact():
            return False
        if not self._strip_count:
            self._memory = destination(slab.byte_count)
        start, size = int(self.layout.strip_offsets[place.first]), place.spans[-1][1]
        self._memory[start : start + size] = strips.memory[:size]
        self._strip_count = place.stop
        return True

    @property
    def is_whole(self) -> bool:
        return self._strip_count == self.layout.slabs[0].strip_count

    def slab(self, _: int) -> Any:
        return self._memory

    def is_intact(self, *_: object) -> bool:
        """It would not be here."""
        return True


class ReceivedPrefix:
    """The chunks of a query, received to the end: what a reader asks of a ``Prefix``. Held beside where they go."""

    def __init__(self, prefix: RemotePrefix) -> None:
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
        """Leading tokens that are good."""
        return self._prefix.settle(bad)

    def close(self) -> None:
        self._prefix.close()


class RemoteValueStore(WholeStore, RemoteStore):
    """A store of an opaque value to another host: the whole of it, or nothing."""

    def __init__(
        self, session: RemoteSession, value: Value, copier: Copier, faults: FaultPoints, timeout_s: float
    ) -> None:
        RemoteStore.__init__(self, session, value, copier, faults, timeout_s)  # type: ignore[arg-type]  # a source by its uses
        self._value = value

    def _copy_piece(self, piece: _Piece, memory: Any) -> None:
        start = int(piece.unit.layout.strip_offsets[piece.first])
        self._value.copy(piece.unit.token_start * UNIT_BYTES + start, memory)
