"""One launch for all parts of many chunks: part by part, a launch and its views cost as much as 1 MB on the bus.

The kernel is Triton's and is compiled at its first use, which takes a second or more: by a thread of its own. Until it
is there, and where there is none, torch copies part by part.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import cached_property, partial
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import Unavailable
from kvstore.seams.scheduler import start_thread
from kvstore_client.arrays import Tensor, torch_module
from kvstore_client.cuda.pages import GpuSlots
from kvstore_client.cuda.slabs import Slabs

ARRIVE, GATHER = "arrive", "gather"
_log = logging.getLogger("kvstore.client")
_lock = threading.Lock()
_ready: dict[tuple[object, ...], bool] = {}
"""The kinds of launch that were asked for: True once the kernel is compiled."""


class Launches:
    """The launches that put a fetch's chunks in an engine's planes on one GPU, or take a store's from them."""

    def __init__(self, gpu: Any, planes: Sequence[Sequence[Tensor]], slots: GpuSlots | None) -> None:
        self._gpu = gpu
        self._planes = planes
        self._slots = slots

    @cached_property
    def _addresses(self) -> NDArray[np.int64] | None:
        """The planes' addresses, [layers, halves]; None where planes differ, or nothing can be launched."""
        flat = [plane for each in self._planes for plane in each]
        kinds = {(plane.shape, plane.stride(), plane.dtype) for plane in flat}
        counts = {len(each) for each in self._planes}
        if len(kinds) != 1 or len(counts) != 1 or not can_launch(self._gpu):
            return None
        return np.array([[plane.data_ptr() for plane in each] for each in self._planes], np.int64)

    def run(
        self, program: str, positions: Sequence[int], slabs: Slabs, addresses: NDArray[np.int64],
        tokens: NDArray[np.int64],
    ) -> bool:  # fmt: skip
        """See ``GpuPlanes.put_all``."""
        planes = self._addresses
        parts = slabs.parts()
        shapes = {(part.shape[1], part.shape[3]) for _, part in parts}
        if planes is None or len(shapes) != 1:
            return False
        from kvstore_kernels.gpu.strips import TableLaunch

        plane = self._planes[0][0]
        heads, dim = shapes.pop()
        if dim != plane.shape[-1]:
            return False
        table = _table(planes, positions, parts, addresses, tokens, plane.element_size())
        if not len(table):
            return True
        launch = TableLaunch.of(
            program, plane, heads, max(part.token_stop - part.token_start for _, part in parts),
            np.bitwise_or.reduce(table[:, 0]) | np.bitwise_or.reduce(table[:, 2] * plane.element_size()),
            np.bitwise_or.reduce(table[:, 1]),
        )  # fmt: skip
        if not self._is_ready(launch):
            return False
        lines = torch_module().from_numpy(table).to(self._gpu, non_blocking=True)
        launch.run(lines, None if self._slots is None else self._slots.flat)
        return True

    def _is_ready(self, launch: Any) -> bool:
        """Return True when the kernel is compiled. At the first question a thread begins to compile it."""
        key = (str(self._gpu), self._slots is not None, launch.kind)
        found = _ready.get(key)
        if found is None:
            with _lock:
                if key in _ready:
                    return _ready[key]
                _ready[key] = False
            try:
                start_thread(partial(_compile, key, launch, self._gpu), "kvstore-compile")
            except Unavailable:  # no thread is to be had now
                del _ready[key]
        return bool(found)


def _compile(key: tuple[object, ...], launch: Any, gpu: Any) -> None:
    """Launch the kernel once with a strip of no tokens, which moves nothing."""
    torch = torch_module()
    try:
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream(gpu)):
            launch.run(torch.zeros(1, 6, dtype=torch.int64, device=gpu), torch.zeros(1, dtype=torch.int64, device=gpu))
            torch.cuda.current_stream(gpu).synchronize()
        _ready[key] = True
    except Exception as error:  # noqa: BLE001 - Triton, its compilers and the driver raise errors of many kinds
        _log.warning("the kernel for copies on the GPU cannot be compiled, torch serves instead: %r", error)


def are_compiled() -> bool:
    """Return True when every kernel that was asked for is compiled: benchmarks wait for it."""
    return all(_ready.values())


def can_launch(gpu: Any) -> bool:
    """Return True when kernels can be launched on a device."""
    return gpu.type == "cuda" and find_spec("triton") is not None and find_spec("kvstore_kernels") is not None


def _table(
    planes: NDArray[np.int64], positions: Sequence[int], parts: Sequence[tuple[int, Any]], addresses: NDArray[np.int64],
    tokens: NDArray[np.int64], size: int,
) -> NDArray[np.int64]:  # fmt: skip
    """Return a line per chunk and part, as the kernels read it: [lines, 6]."""
    rows = np.array([
        (part.offset, planes[positions[place], part.which], part.strides[1] // size, part.token_start,
         part.token_stop - part.token_start, 0)
        for place, part in parts
    ], np.int64)  # fmt: skip
    table = np.repeat(rows[None], len(addresses), axis=0)
    table[:, :, 0] += addresses[:, None]
    table[:, :, 3] += tokens[:, None]
    return table.reshape(-1, 6)
