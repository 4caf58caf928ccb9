"""Fetches into tensors of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.seams import FaultPoints
from kvstore_client.cuda.lanes import QueuedStep, run_in_turn, run_on
from kvstore_client.cuda.launches import ARRIVE
from kvstore_client.cuda.mirror import DeviceBytes, HostRows, Mirror
from kvstore_client.cuda.planes import GpuPlanes
from kvstore_client.cuda.slabs import Slabs, pieces
from kvstore_client.fetch.fused import Fused
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.planes.prefix import LandedRange
from kvstore_client.planes.shared_memory.chunk import MappedRun, runs_of

LINES_MAX = 1 << 16
"""Parts of chunks in the pool that go in one launch: their table takes 3 MiB."""


def fetched_on(target: GpuPlanes, wanted: Wanted, runs: Sequence[MappedRun], positions: range) -> Fused:
    """Return the copies of the layers at ``positions``, of all chunks of the runs: in one piece, because the GPU makes
    them side by side by itself."""
    return Fused(partial(_in_one, target, wanted, runs, positions), by_torch=False)


def with_slots(runs: Sequence[MappedRun], slots: NDArray[np.int64]) -> list[MappedRun]:
    """Leave out chunks of which no token has a slot."""
    chunks = chain.from_iterable(run.chunks for run in runs)
    return runs_of([
        each for each in chunks if (slots[each.token_start : each.token_start + each.layout.token_count] >= 0).any()
    ])  # fmt: skip


def _in_one(
    target: GpuPlanes, wanted: Wanted, runs: Sequence[MappedRun], positions: range, faults: FaultPoints, _count: int
) -> Iterator[Callable[[], None]]:
    yield partial(run_on, target.gpu, _copies(target, wanted, runs, positions, faults))


def copy_checked_on(
    target: GpuPlanes, wanted: Wanted, runs: Sequence[MappedRun], position: int, bad: set[int], faults: FaultPoints
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
    run_on(target.gpu, _copies(target, wanted, runs, range(position, position + 1), faults))


def fetch_in_turn(
    target: GpuPlanes, wanted: Wanted, runs: Sequence[MappedRun], positions: Sequence[range], faults: FaultPoints,
    landed: LandedRange,
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
                yield QueuedStep(_copies(target, wanted, runs, some, faults), partial(tell, some))

    run_in_turn(target.gpu, steps())


def _copies(
    target: GpuPlanes, wanted: Wanted, runs: Sequence[MappedRun], positions: range, faults: FaultPoints
) -> Iterator[Callable[[], None]]:
    for some in _alike(runs):
        first, last = some[0].chunks[0], some[-1].chunks[-1]
        target.check_room(last.token_start + last.layout.token_count)
        layout, count = first.layout, sum(len(run.chunks) for run in some)
        numbers = [layout.slab_of_layer[wanted.layers[position]] for position in positions]
        alone = first.home is None or (wanted.head_stop is not None and not layout.blocked)
        cut: Iterable[tuple[range, range]] = pieces(layout, numbers, count, alone=alone)
        if _is_near(some[0]) and not alone:  # it needs no scratch memory
            step = max(1, LINES_MAX // (2 * len(numbers)))
            cut = [(range(len(numbers)), range(at, min(count, at + step))) for at in range(0, count, step)]
        for places, chunks in cut:
            start, stop = (0, None) if layout.blocked else (wanted.head_start, wanted.head_stop)
            slabs = Slabs(layout, tuple(numbers[place] for place in places), start, stop)
            of = [positions[place] for place in places]
            yield partial(_copy, target, slabs, _cut(some, chunks), of, faults)


def _alike(runs: Sequence[MappedRun]) -> Iterator[list[MappedRun]]:
    """Yield runs that are put in their places together: their chunks have one layout, follow on each other, and all lie
    in the sidecar's memory, or all in its pool on the GPU."""
    group: list[MappedRun] = []
    for run in runs:
        if group:
            last, first = group[-1].chunks[-1], run.chunks[0]
            is_next = last.layout is first.layout and last.token_start + last.layout.token_count == first.token_start
            if not is_next or _is_near(group[0]) != _is_near(run) or None in (last.home, first.home):
                yield group
                group = []
        group.append(run)
    if group:
        yield group


def _is_near(run: MappedRun) -> bool:
    return isinstance(run.chunks[0].extents[0], DeviceBytes)


def _cut(runs: Sequence[MappedRun], chunks: range) -> list[MappedRun]:
    """Return the chunks of these numbers, counted over all runs."""
    found: list[MappedRun] = []
    begin = 0
    for run in runs:
        some = run.chunks[max(0, chunks.start - begin) : max(0, chunks.stop - begin)]
        begin += len(run.chunks)
        if some:
            found.append(MappedRun(some, run.stride if len(some) > 1 else 0))
    return found


def _copy(
    target: GpuPlanes, slabs: Slabs, runs: Sequence[MappedRun], positions: Sequence[int], faults: FaultPoints
) -> None:
    """Queue the copies of some layers of some chunks."""
    skipped = slabs.begin - slabs.layout.slabs[slabs.numbers[0]].offset
    memories = [run.memory(slabs.numbers[0])[skipped:] for run in runs]
    if _is_near(runs[0]):
        _put_near(target, slabs, runs, positions, memories)
    else:
        both = zip(memories, runs, strict=True)
        mirror = Mirror([HostRows(at, run.stride, slabs.width, len(run.chunks)) for at, run in both], target.gpu)
        mirror.load()
        if not target.launches.run(ARRIVE, positions, slabs, mirror.addresses, _tokens(runs)):
            for place, part in slabs.parts():
                content = mirror.view(part.shape[1:], part.strides[1:], part.offset, slabs.layout.item_size)
                target.put(positions[place], part, content, runs[0].chunks[0].token_start, slabs.layout.token_count)
    faults.reach("fetch.copy.middle")


def _put_near(
    target: GpuPlanes, slabs: Slabs, runs: Sequence[MappedRun], positions: Sequence[int], memories: Sequence[Any]
) -> None:
    """Put chunks of the sidecar's pool on this GPU in their places."""
    addresses = np.concatenate([
        memory.address + run.stride * np.arange(len(run.chunks), dtype=np.int64)
        for memory, run in zip(memories, runs, strict=True)
    ])  # fmt: skip
    if target.launches.run(ARRIVE, positions, slabs, addresses, _tokens(runs)):
        return
    for memory, run in zip(memories, runs, strict=True):
        for place, part in slabs.parts():
            shape, strides = (len(run.chunks), *part.shape[1:]), (run.stride, *part.strides[1:])
            content = memory.view(shape, strides, part.offset, slabs.layout.item_size)
            target.put(positions[place], part, content, run.chunks[0].token_start, slabs.layout.token_count)


def _tokens(runs: Sequence[MappedRun]) -> NDArray[np.int64]:
    return np.array([chunk.token_start for run in runs for chunk in run.chunks], np.int64)
