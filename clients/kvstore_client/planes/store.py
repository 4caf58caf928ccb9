"""The interface by which a plane takes a store's bytes: the same on each plane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvstore.chunk import ChunkLayout
from kvstore.seams.mapping import Bytes
from kvstore.spec import ModelSpec, StoreState
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.planes.parts import part_layout

UNIT_BYTES_MAX = 64 << 20
"""A chunk larger than this is staged in runs of slabs."""


class StagingRun(NamedTuple):
    """A run of one segment, ours until it is given back."""

    staging_id: int
    offset: int
    byte_count: int
    memory: Bytes
    """The whole segment's bytes."""


class StagingMemory(Protocol):
    """Memory to gather strips in."""

    @property
    def used_bytes(self) -> int:
        """Bytes that were taken and not given back."""

    def take(self, byte_count: int, expected_bytes: int) -> StagingRun | None:
        """Return a run, or None when there is no room. ``expected_bytes``: the bytes that the store still needs. Raises
        Exhausted when the machine has no memory for it."""

    def give_back(self, run: StagingRun) -> None:
        """Free a run that nobody reads any more."""


class Steps(NamedTuple):
    """Copies in steps that any thread may run. ``by_torch``: torch or numpy makes some; else compiled code, all."""

    steps: Sequence[Callable[[], None]]
    by_torch: bool = True


class StoreSource(Protocol):
    """The source of a store's bytes. The parts of a chunk are the cache, and then E of each of the
    ``hidden_layers``."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def token_count(self) -> int: ...

    @property
    def hidden_layers(self) -> tuple[int, ...]: ...

    def copy(
        self, unit: Unit, slab: int, memory: Bytes, *, first: int = 0, stop: int | None = None, count: int = 1,
        stride: int = 0,
    ) -> None:  # fmt: skip
        """Fill ``memory`` with strips ``first .. stop`` of one slab of the unit's chunk, and of the ``count - 1``
        chunks behind it, each ``stride`` bytes further."""

    def fused(self, unit: Unit, memory: Bytes, count: int, stride: int) -> Steps | None:
        """Return all copies of a unit, and of the same slabs of the ``count - 1`` chunks behind it. ``memory`` begins
        with the unit's first slab; each next chunk's lies ``stride`` bytes further. None where slabs are copied one by
        one."""


@dataclass(frozen=True)
class Unit:
    """A run of slabs of one chunk, staged and filled together."""

    chunk: int
    part: int
    token_start: int
    layout: ChunkLayout
    slab_first: int
    slab_stop: int

    @property
    def base(self) -> int:
        return self.layout.slabs[self.slab_first].offset

    @property
    def byte_count(self) -> int:
        last = self.layout.slabs[self.slab_stop - 1]
        return last.offset + last.byte_count - self.base

    def fill(self, run: StagingRun) -> pb.Fill:
        first, last = self.layout.slabs[self.slab_first], self.layout.slabs[self.slab_stop - 1]
        return pb.Fill(
            chunk=self.chunk,
            strip_first=first.strip_first,
            strip_count=last.strip_first + last.strip_count - first.strip_first,
            staging_id=run.staging_id,
            staging_offset=run.offset,
        )


def units_of(source: StoreSource, states: Sequence[int]) -> list[Unit]:
    """Return the units of the chunks and parts that are wanted. ``states``: one per chunk and part."""
    units: list[Unit] = []
    step, part_count = source.spec.chunk_tokens, 1 + len(source.hidden_layers)
    for chunk, state in enumerate(states):
        if state != StoreState.WANTED:
            continue
        part, start = chunk % part_count, chunk // part_count * step
        layout = part_layout(source.spec, source.hidden_layers, part, min(step, source.token_count - start))
        first = size = 0
        for index, slab in enumerate(layout.slabs):
            if size and size + slab.byte_count > UNIT_BYTES_MAX:
                units.append(Unit(chunk, part, start, layout, first, index))
                first, size = index, 0
            size += slab.byte_count
        units.append(Unit(chunk, part, start, layout, first, len(layout.slabs)))
    return units


class Upload(Protocol):
    """The bytes of one store on their way to the sidecar."""

    def put(self, reservation_id: int, units: Sequence[Unit], *, at_once: bool = False) -> None:
        """Take the bytes of these units. Returns when nothing reads the caller's memory any more. ``at_once``: the
        sidecar may take the first ones while others are copied, where the plane can do so. Raises the typed error of a
        failed step."""

    def finish(self) -> list[pb.Fill]:
        """Wait until the bytes are in place; return the fills that are left for the commit. Raises the typed error of a
        failed stream."""

    def free(self) -> None:
        """Free the memory: the commit was taken, and nothing reads it any more."""

    def stop(self) -> list[StagingRun]:
        """End the upload. Afterwards nothing reads the caller's memory; the sidecar may still read the returned
        runs."""
