"""Destinations of a prefix: owned memory or the caller's tensors, and the copies into it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import chain
from typing import TypeAlias

from kvstore.chunk import ChunkLayout, slab_parts
from kvstore.seams import FaultPoints
from kvstore.seams.memory import Bytes
from kvstore_client.arrays import Layer, Tensor, is_tensor, presented, tell_graphs
from kvstore_client.copying import copy, copy_small, plane_run, raw, whole
from kvstore_client.cuda import common_gpu
from kvstore_client.cuda.fetching import copy_checked_on, fetch_in_turn, fetched_on
from kvstore_client.cuda.planes import GpuPlanes
from kvstore_client.fetch.fused import Fused, Planes, copies_of
from kvstore_client.fetch.given import Given, given_planes
from kvstore_client.fetch.owned import OwnedHalves, owned_layers, owned_rows
from kvstore_client.fetch.paged import Paged, PagedTarget, Pages
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.halves import shown
from kvstore_client.planes.prefix import LandedRange, Target
from kvstore_client.planes.shared_memory.chunk import MappedRun
from kvstore_client.planes.stream.strips import Strips

Into: TypeAlias = Sequence[Layer] | Paged | None
Places = Callable[[int], Target]
"""Returns the destination of so many tokens. Raises InvalidRequest when the caller's memory is too short."""


class DenseTarget:
    """A dense destination of a prefix (``planes.prefix.Target``): one run of owned memory, or the caller's tensors."""

    def __init__(self, wanted: Wanted, given: Given | None, token_count: int) -> None:
        """``given``: the caller's planes, from ``given_planes``. Raises InvalidRequest when one of them is too
        short."""
        self._wanted = wanted
        self._token_count = token_count
        self.is_callers = given is not None
        self._are_tensors = given is not None and given.are_tensors
        self._alike = None if given is None else given.alike
        self._layers: Sequence[Sequence[Tensor]]
        self._owned = OwnedHalves.of(wanted, token_count) if given is None else None
        if given is not None:
            self._layers = given.layers
            given.check_room(token_count)
        elif self._owned is not None:
            self._layers, self._are_tensors = self._owned.layers, True
        else:
            self._layers = owned_layers(wanted, token_count)
        gpu = None if given is None or given.alike else common_gpu(chain.from_iterable(given.layers))
        self._gpu = None if gpu is None else GpuPlanes(gpu, self._raw)
        self.hidden = owned_rows(wanted, token_count)
        self._raw_hidden = {layer: raw(plane) for layer, plane in self.hidden.items()}

    def layer(self, position: int, token_count: int) -> Layer:
        """Return a requested layer in the caller's form: its own tensors, or the first ``token_count`` tokens of
        ours."""
        spec, planes = self._wanted.spec, self._layers[position]
        if self._owned is not None:
            planes = self._owned.shown(position, token_count, spec.cache_dtype)
        elif not self.is_callers:
            planes = [presented(plane, spec.cache_dtype)[:, :token_count] for plane in planes]
        return shown(spec, planes)

    def layers(self, token_count: int) -> Iterable[Layer]:
        if self.is_callers and not self._wanted.spec.keeps_e:
            return map(tuple, self._layers)
        return (self.layer(position, token_count) for position in range(len(self._layers)))

    def places(self, token_count: int) -> tuple[Iterator[Tensor], None]:
        """Return the memory of the first ``token_count`` tokens: views of the caller's planes, or all of ours. Views
        are made one by one, when asked for, because most fetches ask for none."""
        planes: Iterator[Tensor] = (plane for planes in self._layers for plane in planes)
        if self._owned is not None:
            planes = self._owned.arrays()
        return chain(
            (plane[:, :token_count] for plane in planes) if self.is_callers else planes, self.hidden.values()
        ), None

    def rows(self, layer: int, token_count: int) -> Tensor:
        return presented(self.hidden[layer], self._wanted.spec.hidden_dtype)[0, :token_count]

    def copy_layer(self, position: int, runs: Sequence[MappedRun], bad: set[int], faults: FaultPoints) -> None:
        if self._gpu is not None:
            copy_checked_on(self._gpu, self._wanted, runs, position, bad, faults)
            return
        layer = self._wanted.layers[position]
        for run in runs:
            faults.reach("fetch.copy.middle")
            index = run.chunks[0].layout.slab_of_layer[layer]
            if self._wanted.verify:
                self._copy_checked(run, index, self._whole[position], bad)
            else:
                self._copy_run(run, index, self._raw[position])

    def fused(self, runs: Sequence[MappedRun], positions: range | None = None) -> Fused | None:
        wanted = self._wanted
        if self._gpu is not None and not wanted.verify:
            return fetched_on(self._gpu, wanted, runs, positions or range(len(wanted.layers)))
        if wanted.verify or wanted.spec.keeps_e or not wanted.layers:
            return None
        planes, layers = self._planes(), wanted.layers
        if positions is not None:
            planes, layers = planes.at(positions), layers[positions.start : positions.stop]
        heads = range(wanted.head_start, wanted.head_start + wanted.heads_of(layers[0]))
        return copies_of(planes, self._token_count, runs, layers, heads)

    def in_turn(
        self, runs: Sequence[MappedRun], positions: Sequence[range], faults: FaultPoints, landed: LandedRange
    ) -> Callable[[], None] | None:
        """Return a call for a GPU's planes: its copies need no second thread."""
        if self._gpu is None or self._wanted.verify:
            return None
        return partial(fetch_in_turn, self._gpu, self._wanted, runs, positions, faults, landed)

    def _planes(self) -> Planes:
        if self._owned is not None:
            return Planes([half[:1] for half in self._owned.halves], halves=self._owned.halves)
        if self._alike is not None:
            return self._alike
        return Planes(list(zip(*(self._layers if self._are_tensors else self._raw), strict=True)))

    def copy_hidden(self, layer: int, runs: Sequence[MappedRun], bad: set[int]) -> None:
        for run in runs:
            if self._wanted.verify:
                self._copy_checked(run, 0, [whole(self._raw_hidden[layer])], bad)
            else:
                self._copy_run(run, 0, [self._raw_hidden[layer]])

    def copy_strips(self, position: int, strips: Strips) -> None:
        self._copy_strips(self._whole[position], strips)

    def copy_hidden_strips(self, layer: int, strips: Strips) -> None:
        self._copy_strips([whole(self._raw_hidden[layer])], strips)

    @cached_property
    def _raw(self) -> list[list[Tensor]]:
        return [[raw(plane) for plane in planes] for planes in self._layers]

    @cached_property
    def _whole(self) -> list[list[Tensor]]:
        if self.is_callers and (tensors := [each for planes in self._layers for each in planes if is_tensor(each)]):
            tell_graphs(tensors)
        return [[whole(plane) for plane in planes] for planes in self._raw]

    def _copy_strips(self, planes: list[Tensor], strips: Strips) -> None:
        chunk, extent = strips.chunk, strips.extent
        self._put(planes, chunk.token_start, chunk.layout, extent.slab, strips.memory, extent.first, extent.stop)

    def _copy_checked(self, run: MappedRun, index: int, planes: list[Tensor], bad: set[int]) -> None:
        """Check and copy chunk by chunk: hashed bytes are copied while they are in the processor's cache."""
        wanted = self._wanted
        for chunk in run.chunks:
            if not chunk.is_intact(index, wanted.head_start, wanted.head_stop):
                bad.add(id(chunk))
                continue
            layout = chunk.layout
            first, stop = (0, None) if layout.blocked else (wanted.head_start, wanted.head_stop)
            slab = layout.slabs[index]
            memory = chunk.slab(index)[int(layout.strip_offsets[slab.strip_first + first]) - slab.offset :]
            self._put(planes, chunk.token_start, layout, index, memory, first, stop)

    def _put(
        self, planes: list[Tensor], token_start: int, layout: ChunkLayout, slab: int, memory: Bytes, first: int,
        stop: int | None,
    ) -> None:  # fmt: skip
        """Copy the strips ``first .. stop`` of one chunk's slab, which lie at the start of ``memory``."""
        head = 0 if layout.blocked else first - self._wanted.head_start
        for part in slab_parts(layout, slab, memory, first=first, stop=stop):
            source = part.array[0]
            start = token_start + part.token_start
            copy_small(planes[part.which][head : head + len(source), start : start + source.shape[1]], source)

    def _copy_run(self, run: MappedRun, index: int, planes: list[Tensor]) -> None:
        wanted, first = self._wanted, run.chunks[0]
        layout = first.layout
        start, stop = (0, None) if layout.blocked else (wanted.head_start, wanted.head_stop)
        for part in slab_parts(layout, index, run.memory(index), len(run.chunks), run.stride):
            target = plane_run(planes[part.which], first.token_start, layout.token_count, len(run.chunks), part)
            copy(target, raw(part.array[:, start:stop]))


def device_of(into: Into) -> str:
    """Return the device of a destination, as torch names it: that of all its tensors; empty where these differ."""
    entries = into.layers if isinstance(into, Paged) else into
    first: Tensor = next(iter(entries), None) if entries else None  # an engine's dict of caches has values, no first
    if isinstance(first, tuple | list):
        first = first[0] if first else None
    if not is_tensor(first) or first.is_cpu:  # the usual case, in which no more is asked
        return "cpu"
    flat = (plane for each in entries or () for plane in (each if isinstance(each, tuple | list) else (each,)))
    return str(first.device) if all(plane.device == first.device for plane in flat) else ""


def given_places(wanted: Wanted, into: Into) -> Places:
    """Check ``into`` (planes, pages, or None for owned memory) before anything is sent. Returns a function that gives
    the destination of so many tokens. Raises InvalidRequest."""
    if isinstance(into, Paged):
        return partial(PagedTarget, wanted, Pages(wanted, into))
    return partial(DenseTarget, wanted, given_planes(wanted, into))
