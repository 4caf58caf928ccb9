"""Memory of one process, in the place of shared memory."""

from __future__ import annotations

import numpy as np

from kvstore.seams.memory import Bytes, Mapping

POISON = 0xDB


class _BytearrayMapping:
    descriptor = -1

    def __init__(self, byte_count: int) -> None:
        self.bytes: Bytes = np.full(byte_count, POISON, np.uint8)

    def prefault(self, offset: int, byte_count: int) -> None:
        return None

    def forget(self, offset: int, byte_count: int) -> None:
        self.bytes[offset : offset + byte_count] = POISON

    def close(self) -> None:
        self.bytes[:] = POISON


class BytearrayMemory:
    """The process-private twin: freed bytes are poisoned, so that a late reader sees that they are gone."""

    def read_only_to_others(self, name: str, byte_count: int, *, is_moved: bool = True) -> Mapping:
        return _BytearrayMapping(byte_count)

    def writable_by_others(self, name: str, byte_count: int) -> Mapping:
        return _BytearrayMapping(byte_count)
