"""The sidecar's pool on a device, mapped here: copies from it into tensors on the same device stay on the device.

A copy counts as any other of mapped memory: if its generation is unchanged after it has ended. The header of a chunk is
always read in the sidecar's memory, which has each chunk that the pool has: what other clients of a device may write is
not asked what it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from kvstore.chunk import STRIP_ALIGNMENT
from kvstore.handoff.messages import DeviceAnswer
from kvstore.seams.mapping import Bytes, SharedMap
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.arrays import torch_module
from kvstore_client.cuda.mirror import DeviceBytes
from kvstore_client.planes.shared_memory.chunk import Chunk

HOST = "cpu"
POOL = -1
"""Stands in place of a region's index for the pool."""


class DevicePool:
    """The pool, whatever device it is on: its memory, and the page of generations in the host's."""

    def __init__(self, memory: Bytes, generations: Bytes) -> None:
        self._memory = memory
        self._generations: NDArray[np.uint64] = generations.view(np.uint64)

    def found(self, chunk: Chunk, place: pb.DevicePlace) -> Chunk | None:
        """Return the copy of a chunk at a place in the pool; None where no chunk of this layout can lie."""
        stop = place.offset + place.byte_count
        if place.byte_count != chunk.layout.total_bytes or stop > self._memory.size:
            return None
        if place.offset % STRIP_ALIGNMENT:  # a load from half of an item ends CUDA in this process
            return None
        return replace(
            chunk, extents=[self._memory[place.offset : stop]], slot=place.generation_slot,
            generation=place.generation, home=(self._memory, POOL, place.offset),
        )  # fmt: skip

    def is_current(self, copy: Chunk) -> bool:
        """Return True when all that was read of a copy before the last ``fence`` was the chunk's."""
        return copy.slot < len(self._generations) and bool(self._generations[copy.slot] == copy.generation)


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
        return DevicePool(SharedMap(descriptors[1], answer.byte_count, writable=False).bytes, generations)
    from kvstore.seams.devices.cuda import MappedRegion, ordinal_of  # as above

    number = ordinal_of(device)
    region = MappedRegion(number, descriptors[1], answer.byte_count)
    tensor = torch_module().as_tensor(region, device=torch_module().device("cuda", number))
    return DevicePool(cast(Bytes, DeviceBytes(tensor, 0, answer.byte_count)), generations)
