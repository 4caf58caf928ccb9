"""Copies of strips from messages into their places."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from kvstore.chunk import layout_of
from kvstore.seams import FaultPoints
from kvstore.spec import MissReason
from kvstore_client.planes.prefix import Target
from kvstore_client.planes.stream.streamed import StreamedChunks
from kvstore_client.planes.stream.strips import StreamChunk, Strips


class StreamLanding:
    """Copies strips into their places as messages come, on the thread that waits for them: while it hashes and copies a
    message in the processor's cache, gRPC's threads take the next from the network. A separate thread to hash and copy
    saved nothing: it lost as much time waiting for the interpreter."""

    def __init__(
        self, prefix: StreamedChunks, target: Target, faults: FaultPoints, bad: set[int], on_copied: Callable[[], None]
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
        """Wait for a message and copy its strips. Returns False when no more will come."""
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
        """True while wanted strips have not come yet."""
        return any(self._missing.values())

    def has_landed(self, position: int) -> bool:
        """Return True when all of a layer has been copied."""
        return not any(missing for key, missing in self._missing.items() if position in self._positions.get(key, ()))

    def stop(self, timeout_s: float) -> None:
        """Do nothing: no copy runs on another thread."""

    def finish(self, timeout_s: float) -> None:
        """Do nothing: no copy runs on another thread."""
