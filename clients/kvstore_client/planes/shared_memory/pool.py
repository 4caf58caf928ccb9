"""The sidecar's pool on a device, mapped here: copies from it into tensors on the same device stay on the device.

A copy counts as any other of mapped memory: if its generation is unchanged after it has ended. The header of a chunk is
always read in the sidecar's memory, which has each chunk that the pool has: what other clients of a device may write is
not asked what it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from kvstore.chunk import ChunkLayout, Part, part_places, slab_parts
from kvstore.handoff.messages import DeviceAnswer
from kvstore.seams.mapping import Bytes, SharedMap
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.arrays import Tensor, dtype_of, torch_module
from kvstore_client.planes.shared_memory.chunk import Chunk

HOST = "cpu"
POOL = -1
"""Stands in place of a region's index for the pool."""


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
    def whole(self) -> Tensor:
        """All of the run, as one-byte integers."""
        return self._tensor[self._begin : self._begin + self.size].view(dtype_of("int8"))

    def view(self, shape: Sequence[int], strides: Sequence[int], offset: int, size: int) -> Tensor:
        """Return a view as integers of ``size`` bytes, from byte ``offset`` on. ``strides``: in bytes, multiples of
        ``size``."""
        reach = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True)) + size
        assert offset + reach <= self.size, "a view beyond the chunk"
        items = self._tensor.view(dtype_of({1: "int8", 2: "int16", 4: "int32"}[size]))
        return items.as_strided(shape, [stride // size for stride in strides], (self._begin + offset) // size)


def parts_of(
    layout: ChunkLayout, slab_index: int, memory: Bytes, chunk_count: int = 1, stride: int = 0
) -> Sequence[Part]:
    """Return ``kvstore.chunk.slab_parts`` of memory of the host, or of a device: then the arrays are its tensors."""
    if isinstance(memory, np.ndarray):
        return slab_parts(layout, slab_index, memory, chunk_count, stride)
    return [
        Part(each.which, each.token_start, each.token_stop,
             memory.view(each.shape, each.strides, each.offset, layout.item_size))
        for each in part_places(layout, slab_index, chunk_count, stride)
    ]  # fmt: skip


class DevicePool(Protocol):
    """The pool, as fetches use it."""

    def completed(self, copy: Callable[[], None]) -> None:
        """Run copies out of the pool; return when all of them have ended."""

    def found(self, chunk: Chunk, place: pb.DevicePlace) -> Chunk | None:
        """Return the copy of a chunk at a place in the pool; None where no chunk of this layout can lie."""

    def is_current(self, copy: Chunk) -> bool:
        """Return True when all that was read of a copy before the last ``fence`` was the chunk's."""


class MappedPool:
    """A pool, whatever device it is on: its memory, and the page of generations in the host's."""

    def __init__(self, memory: Bytes, generations: Bytes) -> None:
        self._memory = memory
        self._generations: NDArray[np.uint64] = generations.view(np.uint64)

    def found(self, chunk: Chunk, place: pb.DevicePlace) -> Chunk | None:
        """See ``DevicePool.found``."""
        stop = place.offset + place.byte_count
        if place.byte_count != chunk.layout.total_bytes or stop > self._memory.size:
            return None
        return replace(
            chunk, extents=[self._memory[place.offset : stop]], slot=place.generation_slot,
            generation=place.generation, home=(self._memory, POOL, place.offset),
        )  # fmt: skip

    def is_current(self, copy: Chunk) -> bool:
        """See ``DevicePool.is_current``."""
        return copy.slot < len(self._generations) and bool(self._generations[copy.slot] == copy.generation)


class PoolOnHost(MappedPool):
    """A pool in the host's memory."""

    def completed(self, copy: Callable[[], None]) -> None:
        """See ``DevicePool.completed``."""
        copy()


class PoolOnCuda(MappedPool):
    """A pool on a CUDA device. Copies run on streams of its own, one for each thread that copies."""

    def __init__(self, region: Any, ordinal: int, byte_count: int, generations: Bytes) -> None:
        """``region``: has ``__cuda_array_interface__``."""
        self._device = torch_module().device("cuda", ordinal)
        tensor = torch_module().as_tensor(region, device=self._device)
        super().__init__(cast(Bytes, DeviceBytes(tensor, 0, byte_count)), generations)
        self._own = threading.local()

    def completed(self, copy: Callable[[], None]) -> None:
        """See ``DevicePool.completed``. The generation is read, and the layer handed out, only when the device has done
        the copies."""
        torch = torch_module()
        stream = getattr(self._own, "stream", None)
        if stream is None:
            stream = self._own.stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            try:
                copy()
            finally:
                stream.synchronize()


def is_same_device(answer: DeviceAnswer, device: str) -> bool:
    """Return True when the pool lies on a device of this process (``cpu``, ``cuda:N``). Raises Unavailable where the
    driver does not tell."""
    if HOST in (answer.device, device):
        return answer.device == device
    from kvstore.seams.devices.cuda import device_identity, ordinal_of  # only where there is a GPU

    return device_identity(ordinal_of(device)) == answer.device


def opened_pool(answer: DeviceAnswer, descriptors: Sequence[int], device: str) -> DevicePool:
    """Map the pool that an answer names; the caller closes the descriptors. Raises Unavailable."""
    generations = SharedMap(descriptors[0], answer.generations_bytes, writable=False).bytes
    if device == HOST:
        return PoolOnHost(SharedMap(descriptors[1], answer.byte_count, writable=False).bytes, generations)
    from kvstore.seams.devices.cuda import MappedRegion, ordinal_of  # as above

    number = ordinal_of(device)
    return PoolOnCuda(MappedRegion(number, descriptors[1], answer.byte_count), number, answer.byte_count, generations)
