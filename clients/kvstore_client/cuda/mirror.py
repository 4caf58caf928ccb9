"""Runs of the sidecar's memory, and the same bytes on a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.seams.mapping import Bytes, address_of
from kvstore_client.arrays import Tensor, dtype_of, torch_module
from kvstore_client.cuda.pinned import pin
from kvstore_client.cuda.runtime import PITCH_MAX, TO_DEVICE, TO_HOST, runtime

_SIGNED = {1: "int8", 2: "int16", 4: "int32"}


class HostRows(NamedTuple):
    """Equally long runs of bytes at one distance. ``memory`` begins with the first; each next one begins ``pitch``
    bytes further. ``width``: bytes of a row."""

    memory: Bytes
    pitch: int
    width: int
    row_count: int


class Mirror:
    """Scratch on a GPU for some rows, which lie there one right behind the other."""

    def __init__(self, rows: HostRows, device: Any) -> None:
        self._rows = rows
        self._bytes = torch_module().empty(rows.row_count * rows.width, dtype=torch_module().uint8, device=device)

    def load(self) -> None:
        """Queue the copy of the rows to the GPU, on the current stream."""
        self._copy(TO_DEVICE)

    def save(self) -> None:
        """Queue the copy back to the rows, on the current stream."""
        self._copy(TO_HOST)

    def _copy(self, direction: int) -> None:
        rows, here = self._rows, self._bytes
        library = runtime() if here.is_cuda and rows.pitch <= PITCH_MAX else None
        if library is None:
            for number in range(rows.row_count):
                host = torch_module().from_numpy(rows.memory[number * rows.pitch :][: rows.width])
                there = here[number * rows.width : (number + 1) * rows.width]
                both = (there, host) if direction == TO_DEVICE else (host, there)
                both[0].copy_(both[1], non_blocking=True)
            return
        pin(rows.memory)
        host, pitch = address_of(rows.memory), max(rows.pitch, rows.width)
        stream = torch_module().cuda.current_stream(here.device).cuda_stream
        if direction == TO_DEVICE:
            sides = (here.data_ptr(), rows.width, host, pitch)
        else:
            sides = (host, pitch, here.data_ptr(), rows.width)
        library.copy_rows(*sides, rows.width, rows.row_count, direction, stream)

    def view(self, array: NDArray[np.generic]) -> Tensor:
        """Return the mirrored memory of an array that lies within the rows, as integers of its item size. Its first
        axis goes from row to row."""
        size = array.itemsize
        offset = array.__array_interface__["data"][0] - address_of(self._rows.memory)
        assert 0 <= offset < self._rows.width, "the array begins in the first row"
        steps = (self._rows.width // size, *(step // size for step in array.strides[1:]))
        items = self._bytes.view(dtype_of(_SIGNED[size]))
        return items.as_strided(array.shape, steps, offset // size)
