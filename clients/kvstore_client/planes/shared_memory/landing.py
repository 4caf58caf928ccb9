"""Copies out of the sidecar's memory, of a prefix that is still arriving there."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from kvstore.chunk import layout_of
from kvstore.seams import FaultPoints
from kvstore_client.copying import Copier, stopped, wait_all
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.planes.prefix import Target
from kvstore_client.planes.shared_memory.chunk import Chunk, MappedRun, runs_of


class Arriving(Protocol):
    """A prefix of which chunks still arrive in memory."""

    wanted: Wanted

    def runs(self, part: int) -> list[MappedRun]:
        """Return the chunks of one part that are in memory, grouped for copying."""

    def advance(self) -> bool:
        """Wait for news. False when nothing is arriving any more."""

    def arrived(self, part: int, slab: int) -> list[Chunk] | None:
        """Return the chunks of which a slab has arrived since. None while one of them has not."""


class MappedLanding:
    """Copies of a prefix that is still arriving: resident chunks at once, the rest layer by layer as it lands."""

    def __init__(
        self,
        prefix: Arriving,
        target: Target,
        copier: Copier,
        faults: FaultPoints,
        bad: set[int],
        on_copied: Callable[[], None],
    ) -> None:
        self._prefix = prefix
        self._on_copied = on_copied
        self._target = target
        self._copier = copier
        self._faults = faults
        self._bad = bad
        slabs = layout_of(prefix.wanted.spec, prefix.wanted.spec.kind, 1).slab_of_layer
        self._coming = [(0, slabs[layer], position) for position, layer in enumerate(prefix.wanted.layers)]
        self._coming += [(part, 0, part) for part in range(1, len(prefix.wanted.hidden_layers) + 1)]
        self.layers: list[list[Future[None]]] = [[] for _ in prefix.wanted.layers]
        self._hidden: list[Future[None]] = []
        here = {part: prefix.runs(part) for part in range(1 + len(prefix.wanted.hidden_layers))}
        for part, _, position in self._coming:
            self._copy(part, position, here[part])

    def _copy(self, part: int, position: int, runs: list[MappedRun]) -> None:
        if not runs:
            return
        if part == 0:
            self.layers[position].append(self._copier.submit(self._copy_layer, position, runs))
        else:
            layer = self._prefix.wanted.hidden_layers[part - 1]
            self._hidden.append(self._copier.submit(self._target.copy_hidden, layer, runs, self._bad))

    def _copy_layer(self, position: int, runs: list[MappedRun]) -> None:
        self._target.copy_layer(position, runs, self._bad, self._faults)
        self._on_copied()

    def advance(self) -> bool:
        """Wait for news and start the copies it allows. False when nothing is arriving any more."""
        more = self._prefix.advance()
        waiting = []
        for part, slab, position in self._coming:
            chunks = self._prefix.arrived(part, slab)
            if chunks is None:
                waiting.append((part, slab, position))
            else:
                self._copy(part, position, runs_of(chunks))
        self._coming = waiting
        return more

    @property
    def is_waiting(self) -> bool:
        """True while wanted bytes have not landed yet."""
        return bool(self._coming)

    def has_landed(self, position: int) -> bool:
        """Return True when all copies of a layer have been started."""
        return (0, position) not in {(part, number) for part, _, number in self._coming}

    def stop(self, timeout_s: float) -> None:
        """Begin no more copies, wait for those that run, at most ``timeout_s`` s, and drop all of them: a failed copy
        keeps its frame, which keeps the landing and its target."""
        stopped(self._jobs(), timeout_s)
        self.layers.clear()
        self._hidden.clear()

    def _jobs(self) -> list[Future[None]]:
        return [future for layer in self.layers for future in layer] + self._hidden

    def finish(self, timeout_s: float) -> None:
        """Wait for the copies. Raises DeadlineExceeded while one may still be running."""
        wait_all(self._jobs(), timeout_s)
