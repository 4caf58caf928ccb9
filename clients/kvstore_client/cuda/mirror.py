"""Runs of the sidecar's memory, and the same bytes on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.seams.mapping import Bytes, address_of
from kvstore_client.arrays import Tensor, dtype_of, torch_module
from kvstore_client.copying import SIGNED_TYPES
from kvstore_client.cuda.pinned import pin
from kvstore_client.cuda.runtime import PITCH_MAX, TO_DEVICE, TO_HOST, runtime


class HostRows(NamedTuple):
    """Equally long runs of bytes at one distance. ``memory`` begins with the first; each next one begins ``pitch``
    bytes further. ``width``: bytes of a row."""

    memory: Bytes
    pitch: int
    width: int
    row_count: int


class Mirror:
    """Scratch on a GPU for some rows, all of one width, which lie there one right behind the other."""

    def __init__(self, rows: Sequence[HostRows], gpu: Any) -> None:
        torch = torch_module()
        self._rows = rows
        self.width = rows[0].width
        self.row_count = sum(each.row_count for each in rows)
        self._items: dict[int, Tensor] = {}
        self._bytes = torch.empty(self.row_count * self.width, dtype=torch.uint8, device=gpu)

    def load(self) -> None:
        """Queue the copy of the rows to the GPU, on the current stream."""
        self._copy(TO_DEVICE)

    def save(self) -> None:
        """Queue the copy back to the rows, on the current stream."""
        self._copy(TO_HOST)

    def _copy(self, direction: int) -> None:
        begin = 0
        for rows in self._rows:
            self._copy_rows(rows, begin, direction)
            begin += rows.row_count * rows.width

    def _copy_rows(self, rows: HostRows, begin: int, direction: int) -> None:
        here = self._bytes
        library = runtime() if here.is_cuda and rows.pitch <= PITCH_MAX else None
        if library is None:
            for number in range(rows.row_count):
                host = torch_module().from_numpy(rows.memory[number * rows.pitch :][: rows.width])
                there = here[begin + number * rows.width : begin + (number + 1) * rows.width]
                both = (there, host) if direction == TO_DEVICE else (host, there)
                both[0].copy_(both[1], non_blocking=True)
            return
        pin(rows.memory)
        host, pitch = address_of(rows.memory), max(rows.pitch, rows.width)
        stream = torch_module().cuda.current_stream(here.device).cuda_stream
        if direction == TO_DEVICE:
            sides = (here.data_ptr() + begin, rows.width, host, pitch)
        else:
            sides = (host, pitch, here.data_ptr() + begin, rows.width)
        library.copy_rows(*sides, rows.width, rows.row_count, direction, stream)

    @property
    def addresses(self) -> NDArray[np.int64]:
        """The address of each row on the GPU, [rows]."""
        return np.arange(self.row_count, dtype=np.int64) * self.width + int(self._bytes.data_ptr())

    def view(self, shape: Sequence[int], strides: Sequence[int], offset: int, size: int) -> Tensor:
        """Return what lies at byte ``offset`` of each row, as integers of ``size`` bytes: [rows, *shape]. ``strides``:
        of ``shape``, in bytes."""
        assert 0 <= offset < self.width, "it begins in the first row"
        steps = (self.width // size, *(step // size for step in strides))
        items = self._items.get(size)
        if items is None:
            items = self._items[size] = self._bytes.view(dtype_of(SIGNED_TYPES[size]))
        return items.as_strided((self.row_count, *shape), steps, offset // size)


class DeviceBytes:
    """A run of bytes of a device, sliced as an array of the host's bytes is. ``tensor``: all bytes of the pool."""

    def __init__(self, tensor: Tensor, begin: int, stop: int) -> None:
        self._tensor = tensor
        self._begin = begin
        self.size = stop - begin

    def __getitem__(self, part: slice) -> DeviceBytes:
        start, stop, _ = part.indices(self.size)
        return DeviceBytes(self._tensor, self._begin + start, self._begin + max(start, stop))

    @property
    def address(self) -> int:
        """The address of the first byte on the device."""
        return int(self._tensor.data_ptr()) + self._begin

    def view(self, shape: Sequence[int], strides: Sequence[int], offset: int, size: int) -> Tensor:
        """Return a view as integers of ``size`` bytes, from byte ``offset`` on. ``strides``: in bytes, multiples of
        ``size``."""
        reach = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True)) + size
        assert offset + reach <= self.size, "a view beyond the chunk"
        items = self._tensor.view(dtype_of(SIGNED_TYPES[size]))
        return items.as_strided(shape, [stride // size for stride in strides], (self._begin + offset) // size)
