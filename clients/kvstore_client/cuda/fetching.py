"""Fetches into tensors of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.chunk import PartPlace
from kvstore.seams import FaultPoints
from kvstore_client.arrays import Tensor
from kvstore_client.cuda.lanes import QueuedStep, run_in_turn, run_on
from kvstore_client.cuda.mirror import DeviceBytes, Mirror
from kvstore_client.cuda.slabs import Slabs, pieces
from kvstore_client.fetch.fused import Fused
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.planes.shared_memory.chunk import MappedRun, runs_of

Put = Callable[[int, MappedRun, PartPlace, Tensor], None]
"""Puts a part of a wanted layer, given by its position, of a run's chunks in its place. The tensor, on the GPU, has the
part's content: integers, [chunks, heads, tokens, dim]."""


AtOnce = Callable[[Sequence[MappedRun], Sequence[int]], bool]
"""Puts the wanted layers at these positions, of all chunks of the runs, in their places, where all of them are in the
sidecar's pool on the GPU. False where it cannot: then each part is put."""


def fetched_on(
    gpu: Any, wanted: Wanted, runs: Sequence[MappedRun], positions: range, put: Put, at_once: AtOnce | None = None
) -> Fused:
    """Return the copies of the layers at ``positions``, of all chunks of the runs: in one piece, because the GPU makes
    them side by side by itself."""
    return Fused(partial(_in_one, gpu, wanted, runs, positions, put, at_once), by_torch=False)


def with_slots(runs: Sequence[MappedRun], slots: NDArray[np.int64]) -> list[MappedRun]:
    """Leave out chunks of which no token has a slot."""
    chunks = chain.from_iterable(run.chunks for run in runs)
    return runs_of([
        each for each in chunks if (slots[each.token_start : each.token_start + each.layout.token_count] >= 0).any()
    ])  # fmt: skip


def _in_one(
    gpu: Any, wanted: Wanted, runs: Sequence[MappedRun], positions: range, put: Put, at_once: AtOnce | None,
    faults: FaultPoints, _count: int,
) -> Iterator[Callable[[], None]]:  # fmt: skip
    yield partial(run_on, gpu, _copies(gpu, wanted, runs, positions, put, faults, at_once))


def copy_checked_on(
    gpu: Any, wanted: Wanted, runs: Sequence[MappedRun], position: int, bad: set[int], put: Put, faults: FaultPoints
) -> None:
    """Copy one layer of all chunks of the runs. With verify, a chunk whose strips fail, in the sidecar's memory, joins
    ``bad`` and is left out."""
    if wanted.verify:
        good = []
        for chunk in chain.from_iterable(run.chunks for run in runs):
            slab = chunk.layout.slab_of_layer[wanted.layers[position]]
            if chunk.is_intact(slab, wanted.head_start, wanted.head_stop):
                good.append(chunk)
            else:
                bad.add(id(chunk))
        runs = runs_of(good)
    run_on(gpu, _copies(gpu, wanted, runs, range(position, position + 1), put, faults))


def fetch_in_turn(
    gpu: Any, wanted: Wanted, runs: Sequence[MappedRun], positions: Sequence[range], put: Put, faults: FaultPoints,
    landed: Callable[[range], bool], at_once: AtOnce | None = None,
) -> None:  # fmt: skip
    """Copy layers, those of a range together, and call ``landed`` with each range that has come; nothing more is queued
    once it returns False."""
    is_wanted = True

    def tell(some: range) -> None:
        nonlocal is_wanted
        is_wanted = landed(some)

    def steps() -> Iterator[QueuedStep]:
        for some in positions:
            if is_wanted:
                yield QueuedStep(_copies(gpu, wanted, runs, some, put, faults, at_once), partial(tell, some))

    run_in_turn(gpu, steps())


def _copies(
    gpu: Any, wanted: Wanted, runs: Sequence[MappedRun], positions: range, put: Put, faults: FaultPoints,
    at_once: AtOnce | None = None,
) -> Iterator[Callable[[], None]]:  # fmt: skip
    if at_once is None or not runs or not all(map(_is_on_device, runs)):
        yield from _parts(gpu, wanted, runs, positions, put, faults)
        return

    def all_of_them() -> None:
        if not at_once(runs, positions):
            for copy in _parts(gpu, wanted, runs, positions, put, faults):
                copy()

    yield all_of_them


def _is_on_device(run: MappedRun) -> bool:
    """Return True for chunks of the sidecar's pool on a GPU."""
    home = run.chunks[0].home
    return home is not None and isinstance(home[0], DeviceBytes)


def _parts(
    gpu: Any, wanted: Wanted, runs: Sequence[MappedRun], positions: range, put: Put, faults: FaultPoints
) -> Iterator[Callable[[], None]]:
    for run in runs:
        layout = run.chunks[0].layout
        numbers = [layout.slab_of_layer[wanted.layers[position]] for position in positions]
        alone = run.chunks[0].home is None or (wanted.head_stop is not None and not layout.blocked)
        for places, chunks in pieces(layout, numbers, len(run.chunks), alone=alone):
            some = run.chunks[chunks.start : chunks.stop]
            shorter = MappedRun(some, run.stride if len(some) > 1 else 0)
            of = [positions[place] for place in places]
            yield partial(_copy, gpu, wanted, shorter, of, [numbers[place] for place in places], put, faults)


def _copy(
    gpu: Any, wanted: Wanted, run: MappedRun, positions: Sequence[int], numbers: Sequence[int], put: Put,
    faults: FaultPoints,
) -> None:  # fmt: skip
    """Queue the copies of some layers of some chunks."""
    layout = run.chunks[0].layout
    first, stop = (0, None) if layout.blocked else (wanted.head_start, wanted.head_stop)
    slab = layout.slabs[numbers[0]]
    skipped = int(layout.strip_offsets[slab.strip_first + first]) - slab.offset
    slabs = Slabs(layout, numbers, run.memory(numbers[0])[skipped:], len(run.chunks), run.stride, first, stop)
    on_gpu: Mirror | DeviceBytes
    if isinstance(slabs.memory, DeviceBytes):  # a chunk of the sidecar's pool on this GPU
        on_gpu = slabs.memory
    else:
        on_gpu = slabs.mirror(gpu)
        on_gpu.load()
    for place, part, content in slabs.parts(on_gpu):
        put(positions[place], run, part, content)
    faults.reach("fetch.copy.middle")
