"""Copies out of the sidecar's memory, of a prefix that is still arriving there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import chain
from typing import Protocol

from kvstore.chunk import layout_of
from kvstore.errors import Unavailable
from kvstore.seams import FaultPoints
from kvstore.seams.jobs import failure_of
from kvstore_client.copying import Copier, stopped, wait_all
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.planes.prefix import Target
from kvstore_client.planes.shared_memory.chunk import Chunk, MappedRun, runs_of

JOB_BYTES = 2 << 20
"""Small layers are copied together, so many bytes in a job: to hand a job over takes as long as to copy some 300 KB."""


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
    """Copies of a prefix that is still arriving (``planes.prefix.Landing``): resident chunks at once, the rest as its
    layers land. Small layers that are there together are one job; a layer is handed out once all of its jobs have
    ended."""

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
        self._turns: list[Future[None]] = []
        """Jobs that copy ranges of layers one after the other."""
        self._is_stopped = False
        try:
            self._copy(range(len(self.layers)), prefix.runs(0))
            for number in range(len(prefix.wanted.hidden_layers)):
                self._copy_hidden(number, prefix.runs(number + 1))
            self._copy_arrived()
        except BaseException:  # an interrupt, for one: nobody has the landing yet who would stop it
            stopped(self._jobs(), None)
            raise

    def _copy(self, positions: Sequence[int], runs: list[MappedRun]) -> None:
        """Begin to copy layers, small ones together."""
        if not runs:
            return
        wanted = self._prefix.wanted
        byte_count = wanted.byte_count(sum(chunk.layout.token_count for run in runs for chunk in run.chunks))
        count = max(1, JOB_BYTES * len(wanted.layers) // max(1, byte_count))
        some = list(_ranges(positions, count))
        in_turn = self._copied_in_turn(some, runs)
        for each in some:  # each is known at once: an interrupt before the next one has to stop it
            copy = self._copier.submit(self._copy_layers, each, runs) if in_turn is None else in_turn[each]
            for position in each:
                self.layers[position].append(copy)

    def _copied_in_turn(
        self, positions: Sequence[range], runs: list[MappedRun]
    ) -> dict[range, Future[None]] | None:  # fmt: skip
        """Begin to copy ranges of layers one after the other, in one job; None where they are copied side by side."""
        copies: dict[range, Future[None]] = {each: Future() for each in positions}

        def landed(some: range) -> bool:
            self._on_copied()
            copies[some].set_result(None)
            return not self._is_stopped

        call = self._target.in_turn(runs, positions, self._faults, landed)
        if call is None:
            return None
        for copy in copies.values():
            copy.set_running_or_notify_cancel()  # whoever stops it waits until the job has ended it
        self._turns.append(self._copier.submit(call))
        self._turns[-1].add_done_callback(partial(_end, list(copies.values())))
        return copies

    def _copy_layers(self, positions: range, runs: list[MappedRun]) -> None:
        fused = self._target.fused(runs, positions)
        if fused is None:
            for position in positions:
                self._target.copy_layer(position, runs, self._bad, self._faults)
        else:
            for copy in fused.pieces(self._faults, 1):
                copy()
        self._on_copied()

    def _copy_hidden(self, number: int, runs: list[MappedRun]) -> None:
        if runs:
            layer = self._prefix.wanted.hidden_layers[number]
            self._hidden.append(self._copier.submit(self._target.copy_hidden, layer, runs, self._bad))

    def advance(self) -> bool:
        more = self._prefix.advance()
        self._copy_arrived()
        return more

    def _copy_arrived(self) -> None:
        waiting, positions = [], []
        cache: list[Chunk] = []  # each layer's are the same
        for part, slab, position in self._coming:
            chunks = self._prefix.arrived(part, slab)
            if chunks is None:
                waiting.append((part, slab, position))
            elif part:
                self._copy_hidden(part - 1, runs_of(chunks))
            else:
                positions.append(position)
                cache = chunks
        self._coming = waiting
        self._copy(positions, runs_of(cache))

    @property
    def is_waiting(self) -> bool:
        return bool(self._coming)

    def has_landed(self, position: int) -> bool:
        return not any(part == 0 and number == position for part, _, number in self._coming)

    def stop(self, timeout_s: float) -> None:
        """Begin no more copies, wait for those that run, at most ``timeout_s`` s, and drop all of them: a failed copy
        keeps its frame, which keeps the landing and its target."""
        self._is_stopped = True
        stopped(self._jobs(), timeout_s)
        self.layers.clear()
        self._hidden.clear()
        self._turns.clear()

    def _jobs(self) -> list[Future[None]]:
        return list(dict.fromkeys(chain(*self.layers, self._hidden, self._turns)))

    def finish(self, timeout_s: float) -> None:
        wait_all(self._jobs(), timeout_s)


def _end(copies: Sequence[Future[None]], job: Future[None]) -> None:
    """End the copies of a job that has ended without them."""
    failure = failure_of(job)
    for copy in copies:
        if not copy.done():
            copy.set_exception(failure or Unavailable("the copies were stopped"))


def _ranges(positions: Sequence[int], length_max: int) -> Iterator[range]:
    """Yield ascending positions as ranges, of ``length_max`` at most."""
    start = stop = -1
    for position in positions:
        if position != stop or stop - start == length_max:
            if stop > start:
                yield range(start, stop)
            start = position
        stop = position + 1
    if stop > start:
        yield range(start, stop)
