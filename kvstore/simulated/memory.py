"""Memory that is shared with nobody."""

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
    """Process-private twin: what is freed is poisoned, so that a late reader sees it."""

    def read_only_to_others(self, name: str, byte_count: int, *, is_moved: bool = True) -> Mapping:
        return _BytearrayMapping(byte_count)

    def writable_by_others(self, name: str, byte_count: int) -> Mapping:
        return _BytearrayMapping(byte_count)
