"""Copies of chunks in the sidecar's pool on a GPU into pages there: one launch for all layers and chunks of a half."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore_client.arrays import Tensor, torch_module
from kvstore_client.cuda.mirror import DeviceBytes
from kvstore_client.fetch.fused import PlaneGeometry, plane_geometry
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.planes.shared_memory.chunk import Chunk, MappedRun

if TYPE_CHECKING:
    from kvstore_kernels.gpu.chunks import ChunksOfHalf, PagesOfHalf


class _Alike(NamedTuple):
    """Chunks of one layout in the pool, and where their layers' planes lie in each."""

    pool: DeviceBytes
    chunks: list[Chunk]
    geometry: PlaneGeometry


class NearPages:
    """Pages on a GPU as the destination of chunks in a pool there. ``plane``: returns K or V of one wanted layer as
    plain integers, [pages, page_size, heads, dim]. ``slots``: [tokens], negative where a token has none."""

    def __init__(
        self, wanted: Wanted, plane: Callable[[int, int], Tensor], slots: NDArray[np.int64], device: Any
    ) -> None:
        self._wanted = wanted
        self._plane = plane
        self._host_slots = slots
        self._device = device

    @cached_property
    def _slots(self) -> Tensor:
        return torch_module().from_numpy(self._host_slots).to(self._device)

    def copy(self, runs: Iterable[MappedRun], positions: Sequence[int]) -> bool:
        """Queue the copies of the layers at ``positions``, of all chunks of the runs. False where a kernel does not
        serve, or memory lies irregularly: what was queued then is to be copied again."""
        from kvstore_kernels.gpu.chunks import copy_chunks  # torch, which a process with such pages has

        groups = _grouped(runs, tuple(self._wanted.layers[position] for position in positions))
        halves = [[self._plane(position, which) for position in positions] for which in (0, 1)]
        if not groups or not all(map(_are_alike, halves)):
            return False
        addresses = self._rows([[plane.data_ptr() for plane in half] for half in halves])
        for group in groups:
            homes = [chunk.home[2] for chunk in group.chunks if chunk.home is not None]
            places = self._rows([homes, [chunk.token_start for chunk in group.chunks]])
            for which, half in enumerate(halves):
                chunks = self._chunks_of_half(group, which, positions, places, gcd(16, *homes))
                if not copy_chunks(chunks, self._pages_of_half(half, addresses[which])):
                    return False
        return True

    def _rows(self, rows: Sequence[list[int]]) -> Sequence[Tensor]:
        """Return rows of numbers on the GPU, each at a multiple of 16 bytes: elsewhere the kernel would be compiled
        anew."""
        count = len(rows[0])
        table = torch_module().tensor([row + [0] * (count % 2) for row in rows]).to(self._device)
        return [row[:count] for row in table]

    def _chunks_of_half(
        self, group: _Alike, which: int, positions: Sequence[int], places: Sequence[Tensor], alignment: int
    ) -> ChunksOfHalf:
        from kvstore_kernels.gpu.chunks import ChunksOfHalf

        wanted, geometry, layout = self._wanted, group.geometry, group.chunks[0].layout
        size = layout.item_size
        before = sum(geometry.dims[:which]) * layout.token_count
        begin = (geometry.begin + wanted.head_start * geometry.strip_step + before) * size
        return ChunksOfHalf(
            memory=group.pool.whole[begin:], offsets=places[0], alignment=alignment, starts=places[1],
            layer_step=geometry.layer_step * size, head_step=geometry.strip_step * size, layer_count=len(positions),
            head_count=wanted.heads_of(wanted.layers[positions[0]]), token_count=layout.token_count,
            row_bytes=geometry.dims[which] * size,
        )  # fmt: skip

    def _pages_of_half(self, half: Sequence[Tensor], addresses: Tensor) -> PagesOfHalf:
        from kvstore_kernels.gpu.chunks import PagesOfHalf

        first, size = half[0], half[0].element_size()
        page_count, page_size = first.shape[:2]
        page_step, slot_step, head_step, _ = (step * size for step in first.stride())
        return PagesOfHalf(
            addresses=addresses, alignment=gcd(16, *(plane.data_ptr() for plane in half)), slots=self._slots,
            slot_stop=page_count * page_size, page_size=page_size, page_step=page_step, slot_step=slot_step,
            head_step=head_step,
        )  # fmt: skip


def _grouped(runs: Iterable[MappedRun], layers: tuple[int, ...]) -> list[_Alike]:
    """Return the chunks by layout. None of them where one is not in the pool, or its slabs lie irregularly."""
    found: dict[int, _Alike] = {}
    for run in runs:
        first = run.chunks[0]
        memory = None if first.home is None else first.home[0]
        geometry = plane_geometry(first.layout, layers) if layers else None
        if not isinstance(memory, DeviceBytes) or geometry is None:
            return []
        found.setdefault(id(first.layout), _Alike(memory, [], geometry)).chunks.extend(run.chunks)
    return list(found.values())


def _are_alike(half: Sequence[Tensor]) -> bool:
    """Return True when the pages of all layers have one shape and stride, and a row's items lie side by side."""
    return len({(plane.shape, plane.stride()) for plane in half}) == 1 and half[0].stride(3) == 1
