"""Copies of chunks in a device's pool into pages on the same device: in one launch for all layers of a half, where a
kernel serves; else an operation of torch for each layer and half."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import gcd
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from kvstore.seams import FaultPoints
from kvstore_client.arrays import Tensor, torch_module
from kvstore_client.fetch.fused import Fused, PlaneGeometry, plane_geometry
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.planes.shared_memory.chunk import Chunk, MappedRun
from kvstore_client.planes.shared_memory.pool import DeviceBytes, parts_of

if TYPE_CHECKING:
    from kvstore_kernels.runs import ChunksOfHalf, PagesOfHalf

PageRows = tuple[int | slice, slice]
"""Some of the pages of some chunks, where these are [chunks, pages of a chunk]."""


class NearPages(Protocol):
    """Pages on a device. ``on_device``: what is kept of them here."""

    page_size: int
    slots: NDArray[np.int64]
    on_device: dict[tuple[int, int, int], list[tuple[PageRows, Tensor]] | None]

    def plane(self, position: int, which: int) -> Tensor:
        """Return K or V of one wanted layer as plain integers, [pages, page_size, heads, dim]."""

    def places_of(self, begin: int, chunk_tokens: int, count: int) -> list[tuple[PageRows, NDArray[np.intp]]] | None:
        """Return the places of ``count`` chunks of whole pages from token ``begin`` on."""


def put_run(wanted: Wanted, pages: NearPages, position: int, run: MappedRun) -> bool:
    """Copy one wanted layer of the chunks into whole pages, a half in one operation. False where tokens lie in parts of
    pages."""
    first, count = run.chunks[0], len(run.chunks)
    layout = first.layout
    places = None if layout.blocked else _places(pages, first.token_start, layout.token_count, count)
    if places is None:
        return False
    index, heads = layout.slab_of_layer[wanted.layers[position]], slice(wanted.head_start, wanted.head_stop)
    for part in parts_of(layout, index, run.memory(index), count, run.stride):
        strips: Tensor = part.array
        content = strips[:, heads].unflatten(2, (-1, pages.page_size)).permute(0, 2, 3, 1, 4)
        for some, numbers in places:
            pages.plane(position, part.which)[numbers] = content[some]
    return True


def _places(pages: NearPages, begin: int, chunk_tokens: int, count: int) -> list[tuple[PageRows, Tensor]] | None:
    """Return ``Pages.places_of``, with the numbers on the pages' device. Kept: they are the same for each layer."""
    key = begin, chunk_tokens, count
    if key not in pages.on_device:
        found, device = pages.places_of(*key), pages.plane(0, 0).device
        pages.on_device[key] = found and [
            (some, torch_module().from_numpy(np.array(numbers, np.int64)).to(device)) for some, numbers in found
        ]
    return pages.on_device[key]


class _Alike(NamedTuple):
    """Chunks of one layout on the device, and where their layers' planes lie in each."""

    chunks: list[Chunk]
    geometry: PlaneGeometry


def copies_near(
    wanted: Wanted, pages: NearPages, runs: Sequence[MappedRun], positions: range,
    one_by_one: Callable[[FaultPoints], None],
) -> Fused | None:  # fmt: skip
    """Return all copies of these layers from the device into the pages, by a kernel; None where it does not serve.
    ``one_by_one`` makes the same copies, for a kernel that turns out not to run here."""
    layers, found = wanted.layers[positions.start : positions.stop], dict[int, _Alike]()
    for run in runs:
        layout = run.chunks[0].layout
        geometry = plane_geometry(layout, layers) if run.is_on_device and layers else None
        if geometry is None:
            return None
        found.setdefault(id(layout), _Alike([], geometry)).chunks.extend(run.chunks)
    groups = list(found.values())
    if not groups or not _is_served(groups[0]) or not _are_alike(pages, positions):
        return None
    return Fused(partial(_calls, wanted, pages, groups, positions, one_by_one))


def _is_served(group: _Alike) -> bool:
    from kvstore_kernels.runs import serves  # torch, which a process with such pages has

    return serves(_pool_of(group).whole)


def _pool_of(group: _Alike) -> DeviceBytes:
    home = group.chunks[0].home
    assert home is not None, "a copy in the pool lies in one extent"
    return cast(DeviceBytes, home[0])


def _are_alike(pages: NearPages, positions: range) -> bool:
    """Return True when the pages of all layers have one stride, for K and for V, and items that lie side by side."""
    for which in (0, 1):
        planes = [pages.plane(position, which) for position in positions]
        if len({plane.stride() for plane in planes}) != 1 or planes[0].stride(3) != 1:
            return False
    return True


def _calls(
    wanted: Wanted, pages: NearPages, groups: Sequence[_Alike], positions: range,
    one_by_one: Callable[[FaultPoints], None], faults: FaultPoints, _count: int,
) -> Iterator[Callable[[], None]]:  # fmt: skip
    """Yield one call that makes all copies, whatever the number asked for: a device shares its work by itself."""
    yield partial(_launch_all, wanted, pages, groups, positions, one_by_one, faults)


def _launch_all(
    wanted: Wanted, pages: NearPages, groups: Sequence[_Alike], positions: range,
    one_by_one: Callable[[FaultPoints], None], faults: FaultPoints,
) -> None:  # fmt: skip
    from kvstore_kernels.runs import copy_chunks

    torch = torch_module()
    device = pages.plane(positions.start, 0).device
    slots = torch.from_numpy(pages.slots).to(device)
    halves = [[pages.plane(position, which) for position in positions] for which in (0, 1)]
    addresses = _on(device, [[plane.data_ptr() for plane in half] for half in halves])
    for group in groups:
        homes = [chunk.home[2] for chunk in group.chunks if chunk.home is not None]
        places = _on(device, [homes, [chunk.token_start for chunk in group.chunks]])
        for which, half in enumerate(halves):
            chunks = _chunks_of_half(wanted, group, which, positions, places, gcd(16, *homes))
            if not copy_chunks(chunks, _pages_of_half(half, addresses[which], slots)):
                one_by_one(faults)
                return
    faults.reach("fetch.copy.middle")


def _on(device: object, rows: Sequence[list[int]]) -> Sequence[Tensor]:
    """Return rows of numbers on the device, each at a multiple of 16 bytes: elsewhere the kernel would be compiled
    anew."""
    count = len(rows[0])
    table = torch_module().tensor([row + [0] * (count % 2) for row in rows]).to(device)
    return [row[:count] for row in table]


def _chunks_of_half(
    wanted: Wanted, group: _Alike, which: int, positions: range, places: Sequence[Tensor], alignment: int
) -> ChunksOfHalf:  # fmt: skip
    from kvstore_kernels.runs import ChunksOfHalf

    geometry, layout = group.geometry, group.chunks[0].layout
    size = layout.item_size
    before = sum(geometry.dims[:which]) * layout.token_count
    begin = (geometry.begin + wanted.head_start * geometry.strip_step + before) * size
    return ChunksOfHalf(
        memory=_pool_of(group).whole[begin:], offsets=places[0], alignment=alignment, starts=places[1],
        layer_step=geometry.layer_step * size, head_step=geometry.strip_step * size, layer_count=len(positions),
        head_count=wanted.heads_of(wanted.layers[positions.start]), token_count=layout.token_count,
        row_bytes=geometry.dims[which] * size,
    )  # fmt: skip


def _pages_of_half(half: Sequence[Tensor], addresses: Tensor, slots: Tensor) -> PagesOfHalf:
    from kvstore_kernels.runs import PagesOfHalf

    first, size = half[0], half[0].element_size()
    page_count, page_size = first.shape[:2]
    page_step, slot_step, head_step, _ = (step * size for step in first.stride())
    return PagesOfHalf(
        addresses=addresses, alignment=gcd(16, *(plane.data_ptr() for plane in half)), slots=slots,
        slot_stop=page_count * page_size, page_size=page_size, page_step=page_step, slot_step=slot_step,
        head_step=head_step,
    )  # fmt: skip
