"""One launch for all parts of many chunks: part by part, a launch and its views cost as much as 1 MB on the bus.

The kernel is Triton's. Where there is none, or it cannot be compiled, torch copies part by part. It is compiled at its
first use, which takes up to a second, once on a machine, and not beside it: a thread that compiles while the process
ends, or forks, takes the process with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property, lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.chunk import PartPlace
from kvstore_client.arrays import Tensor, torch_module
from kvstore_client.cuda.pages import GpuSlots
from kvstore_client.cuda.slabs import Slabs

ARRIVE, GATHER = "arrive", "gather"


class _Parts(NamedTuple):
    """The parts of some slabs: the lines of one chunk, [parts, 6], without addresses of planes; of each part the place
    of its slab, and its half; the most tokens of a part. ``heads`` and ``dim``: of all parts."""

    lines: NDArray[np.int64]
    places: NDArray[np.int64]
    halves: NDArray[np.int64]
    tokens: int
    heads: int
    dim: int


class Launches:
    """The launches that put a fetch's chunks in an engine's planes on one GPU, or take a store's from them."""

    def __init__(self, gpu: Any, planes: Sequence[Sequence[Tensor]], slots: GpuSlots | None) -> None:
        self._gpu = gpu
        self._planes = planes
        self._slots = slots

    @cached_property
    def _addresses(self) -> NDArray[np.int64] | None:
        """The planes' addresses, [layers, halves]; None where planes differ, or nothing can be launched."""
        if not can_launch(self._gpu):
            return None
        kinds = {(plane.shape, plane.stride(), plane.dtype) for each in self._planes for plane in each}
        if len(kinds) != 1 or len({len(each) for each in self._planes}) != 1:
            return None
        return np.array([[plane.data_ptr() for plane in each] for each in self._planes], np.int64)

    def run(
        self, program: str, positions: Sequence[int], slabs: Slabs, addresses: NDArray[np.int64],
        tokens: NDArray[np.int64],
    ) -> bool:  # fmt: skip
        """Write all parts of ``slabs``, the layers at ``positions``, in one launch (``ARRIVE``), or read them
        (``GATHER``). False where that cannot be: then part by part. ``addresses`` [chunks]: of the first wanted byte of
        each chunk, on the GPU; ``tokens`` [chunks]: the first token of each."""
        planes = self._addresses
        if planes is None or not len(addresses):
            return planes is not None
        plane = self._planes[0][0]
        size = plane.element_size()
        parts = _parts_of(slabs, size)
        if parts is None or parts.dim != plane.shape[-1]:
            return False
        from kvstore_kernels.gpu import attempt, tell_graphs
        from kvstore_kernels.gpu.strips import TableLaunch

        table = np.repeat(parts.lines[None], len(addresses), axis=0)
        table[:, :, 0] += addresses[:, None]
        table[:, :, 1] = planes[np.asarray(positions)[parts.places], parts.halves]
        table[:, :, 3] += tokens[:, None]
        strips = np.bitwise_or.reduce(table[:, :, 0] | table[:, :, 2] * size, axis=None)
        launch = TableLaunch.of(
            program, plane, parts.heads, parts.tokens, int(strips), int(np.bitwise_or.reduce(planes, axis=None))
        )
        lines = torch_module().from_numpy(table.reshape(-1, 6))
        if self._gpu.type == "cuda":  # from other memory CUDA may copy only when the stream has done all else
            lines = lines.pin_memory().to(self._gpu, non_blocking=True)
        slots = None if self._slots is None else self._slots.flat
        if not attempt(f"{program} of tables", lambda: launch.run(lines, slots)):
            return False
        if program == ARRIVE:
            tell_graphs([plane for position in positions for plane in self._planes[position]])
        return True


@cache
def can_launch(gpu: Any) -> bool:
    """Return True when kernels can be launched on a device."""
    return gpu.type == "cuda" and find_spec("triton") is not None and find_spec("kvstore_kernels") is not None


@lru_cache(maxsize=256)
def _parts_of(slabs: Slabs, size: int) -> _Parts | None:
    """Return the parts of some slabs; None where they differ in heads or dims."""
    found: Sequence[tuple[int, PartPlace]] = slabs.parts()
    kinds = {(part.shape[1], part.shape[3]) for _, part in found}
    if len(kinds) != 1:
        return None
    heads, dim = kinds.pop()
    lines = [
        (part.offset, 0, part.strides[1] // size, part.token_start, part.token_stop - part.token_start, 0)
        for _, part in found
    ]
    return _Parts(
        np.array(lines, np.int64), np.array([place for place, _ in found]), np.array([part.which for _, part in found]),
        max(line[4] for line in lines), heads, dim,
    )  # fmt: skip
