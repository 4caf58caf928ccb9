"""Runs of a raw chunk's strips, with all data needed to check them. A byte mover gets these, and no layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash
from kvstore_copies import copy_checked, digests_of
from numpy.typing import NDArray

from kvstore.chunk.checksum import CHECKSUM_BYTES, seeds_of, strip_key
from kvstore.chunk.layout import ChunkLayout
from kvstore.chunk.seal import StripSeal
from kvstore.errors import DataLoss
from kvstore.seams.memory import Bytes, joined

PART_BYTES = 1 << 20
"""Bytes that are copied before they are checksummed: enough for memcpy's streaming stores, few enough for the cache."""


@dataclass(frozen=True, eq=False, slots=True)
class StripRun:
    """Consecutive strips; ``starts`` and ``stops`` [strips] count from the first byte of the run. ``first``: the number
    of the first strip. ``seal`` opens the strips of a copy in an envelope; None: there is no envelope."""

    key: bytes
    layers: NDArray[np.int32]
    heads: NDArray[np.int32]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    first: int = 0
    seal: StripSeal | None = field(default=None, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Cross to a byte mover as few plain bytes: four arrays cost the service's loop more than all else of a job."""
        numbers = self.layers.tobytes(), self.heads.tobytes(), self.starts.tobytes(), self.stops.tobytes()
        return _crossed, (self.key, *numbers, self.first, self.seal)

    def are_right(self, data: Bytes, expected: bytes) -> bool:
        """True when the strips in ``data`` match ``expected``, 16 bytes each. Strips in an envelope are opened in
        place."""
        if self.seal is None:
            return self.checksums(data) == expected
        spans = zip(self.starts.tolist(), self.stops.tolist(), strict=True)
        for number, (start, stop) in enumerate(spans):
            tag = expected[number * CHECKSUM_BYTES : (number + 1) * CHECKSUM_BYTES]
            if not self.seal.opens(self.first + number, data[start:stop], tag):
                return False
        return True

    def checksums(self, data: Bytes) -> bytes:
        """Return the checksums of the strips, 16 bytes each. ``data`` begins with the run."""
        seeds = seeds_of(self.key, self.layers, self.heads)
        found = digests_of(data, self.starts, self.stops, seeds)
        if found is not None:
            return found
        strips = zip(self.starts.tolist(), self.stops.tolist(), seeds, strict=True)
        return b"".join([xxhash.xxh3_128_digest(data[start:stop].data, seed) for start, stop, seed in strips])

    def copy(self, source: Bytes, target: Bytes) -> bytes:
        """Copy the run, and checksum the copy in the same pass, or part by part while each is in the processor's
        cache. ``source`` may end with the last strip. Returns 16 bytes per strip. Bytes that no strip covers become
        zero."""
        seeds = seeds_of(self.key, self.layers, self.heads)
        rows = copy_checked(target, source, self.starts, self.stops, seeds)
        if rows is None:
            rows = self._copy_parts(source, target, seeds)
        self.zero_gaps(target)
        return rows

    def _copy_parts(self, source: Bytes, target: Bytes, seeds: Sequence[int]) -> bytes:
        rows: list[bytes] = []
        done = 0
        for strips in self._parts(seeds):
            end = strips[-1][1]
            np.copyto(target[done:end], source[done:end])
            rows += [xxhash.xxh3_128_digest(target[start:stop].data, seed) for start, stop, seed in strips]
            done = end
        return b"".join(rows)

    def _parts(self, seeds: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
        """Yield lists of (start, stop, seed), one per strip. A list ends with the strip that reaches PART_BYTES."""
        part: list[tuple[int, int, int]] = []
        for strip in zip(self.starts.tolist(), self.stops.tolist(), seeds, strict=True):
            part.append(strip)
            if strip[1] - part[0][0] >= PART_BYTES:
                yield part
                part = []
        if part:
            yield part

    def zero_gaps(self, data: Bytes) -> None:
        """Zero the gaps between strips, as they are in every copy of a chunk. ``data`` ends with the run's bytes."""
        nexts = np.append(self.starts[1:], data.size)
        for gap in np.flatnonzero(self.stops < nexts).tolist():
            data[self.stops[gap] : nexts[gap]] = 0


def _crossed(
    key: bytes, layers: bytes, heads: bytes, starts: bytes, stops: bytes, first: int, seal: StripSeal | None
) -> StripRun:
    """Return the run that crossed as these."""
    narrow, wide = np.frombuffer(layers, np.int32), np.frombuffer(starts, np.int64)
    return StripRun(key, narrow, np.frombuffer(heads, np.int32), wide, np.frombuffer(stops, np.int64), first, seal)


def strip_run(
    layout: ChunkLayout, storage_key: bytes, write_id: bytes, first: int, stop: int, seal: StripSeal | None = None
) -> StripRun:
    """Return strips ``first .. stop`` of a chunk. ``seal``: opens them; None: they have no envelope."""
    starts = layout.strip_offsets[first:stop].astype(np.int64)
    starts -= starts[0]
    return StripRun(
        strip_key(storage_key, write_id), layout.strip_layers[first:stop], layout.strip_heads[first:stop], starts,
        starts + layout.strip_lengths[first:stop], first, seal,
    )  # fmt: skip


StripMemory = tuple[Bytes, StripRun]
"""Memory, and the strips in it."""


def slab_runs(
    layout: ChunkLayout, storage_key: bytes, write_id: bytes, slabs: range, memory: Sequence[Bytes],
    seal: StripSeal | None = None,
) -> list[StripMemory]:  # fmt: skip
    """Return the strips of raw slabs, each in its array of ``memory``, in as few runs as the memory allows. ``seal``:
    opens the strips; None: they have no envelope."""
    runs: list[StripMemory] = []
    first = slabs.start
    for data in joined(memory):
        size, stop = 0, first
        while size < data.size:
            size, stop = size + layout.slabs[stop].byte_count, stop + 1
        runs.append((data, strip_run(layout, storage_key, write_id, *layout.strips_of(range(first, stop)), seal)))
        first = stop
    return runs


def are_right(runs: Sequence[StripMemory], expected: bytes) -> bool:
    """Blocking. True when the strips in memory match ``expected``: 16 bytes each, in order. Strips in an envelope are
    opened in place."""
    start = 0
    for data, strips in runs:
        stop = start + len(strips.starts) * CHECKSUM_BYTES
        if not strips.are_right(data, expected[start:stop]):
            return False
        start = stop
    return True


def settle_runs(runs: Sequence[StripMemory], expected: bytes) -> bool:
    """Blocking. Check strips in memory that was just filled, as ``are_right`` does, and zero the gaps between them."""
    good = are_right(runs, expected)
    if good:
        for data, strips in runs:
            strips.zero_gaps(data)
    return good


def wrong_slabs(slabs: range, where: str) -> DataLoss:
    """Return the error for slabs of which some strip is not right. ``where``: "on the device", say."""
    words = f"slabs {slabs.start}..{slabs.stop} {where} fail their check"
    return DataLoss(words, reason="checksum", slab=slabs.start)
