"""Jobs and answers as packets. Memory (writable uint8 arrays) crosses as (map, offset, size), files as numbers; both
processes keep a table of these numbers. Everything else crosses by value.

The packets are pickles: they only ever pass between a process and its own forks, over sockets nobody else has.
"""

from __future__ import annotations

import io
import pickle  # seam: between a process and its own forks
import struct
from bisect import bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from kvstore.seams.mapping import Bytes, address_of

_NUMBER = struct.Struct("<Q")
_address = attrgetter("address")


class File(int):
    """A descriptor that jobs may name: the same file in every mover process."""


@dataclass(frozen=True, order=True, slots=True)
class _Lent:
    """Shared memory that the movers map, too."""

    address: int
    byte_count: int
    number: int


class NotLent(Exception):
    """A job names memory that only this process has: only a thread of this process can do the job."""


class Packer:
    """Writes jobs, on the service's side. The numbers of files and maps are never reused."""

    def __init__(self) -> None:
        self._maps: list[_Lent] = []
        self._files: dict[int, int] = {}

    def add_map(self, number: int, memory: Bytes) -> None:
        insort(self._maps, _Lent(memory.ctypes.data, memory.size, number))

    def drop_map(self, number: int) -> None:
        self._maps = [each for each in self._maps if each.number != number]

    def add_file(self, number: int, descriptor: int) -> None:
        self._files[descriptor] = number

    def drop_file(self, descriptor: int) -> int:
        return self._files.pop(descriptor)

    def pack(self, number: int, function: Callable[..., Any], args: tuple[object, ...]) -> bytes:
        """Return the job ``number`` as a packet. Raises NotLent."""
        buffer = io.BytesIO(_NUMBER.pack(number))
        buffer.seek(_NUMBER.size)
        _Pickler(buffer, self).dump((function, args))
        return buffer.getvalue()

    def place(self, memory: Bytes) -> tuple[int, int, int]:
        """Return (map, offset, bytes) of lent memory. Raises NotLent."""
        address = address_of(memory)
        index = bisect_right(self._maps, address, key=_address) - 1
        if index >= 0 and memory.flags.c_contiguous and memory.ndim == 1:
            lent = self._maps[index]
            offset = address - lent.address
            if offset + memory.size <= lent.byte_count:
                return lent.number, offset, memory.size
        raise NotLent

    def file(self, descriptor: int) -> int:
        return self._files[descriptor]


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, packer: Packer) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self._packer = packer

    def reducer_override(self, found: Any) -> Any:
        if type(found) is np.ndarray and found.dtype == np.uint8 and found.flags.writeable:
            return shared_bytes, self._packer.place(found)
        if type(found) is File:
            return shared_file, (self._packer.file(found),)
        return NotImplemented


# ---------------------------------------------------------------- a mover's side

_bytes_of: Callable[[int, int, int], Bytes]
_file_of: Callable[[int], int]


def resolve_with(bytes_of: Callable[[int, int, int], Bytes], file_of: Callable[[int], int]) -> None:
    """Set, in a mover process, the functions that turn numbers into memory and files."""
    global _bytes_of, _file_of
    _bytes_of, _file_of = bytes_of, file_of


def shared_bytes(number: int, offset: int, byte_count: int) -> Bytes:
    """Return an array by its numbers. Packets name this function in place of a shared array."""
    return _bytes_of(number, offset, byte_count)


def shared_file(number: int) -> int:
    """Return a file by its number. Packets name this function in place of a file."""
    return _file_of(number)


@dataclass(frozen=True, slots=True)
class Failure:
    """The error that a job raised."""

    error: BaseException


def number_of(packet: bytes) -> int:
    """Return the number of a job's packet, or of its answer's."""
    return int(_NUMBER.unpack_from(packet)[0])


def unpack(packet: bytes) -> Any:
    """Return a job's (function, arguments), or an answer's result."""
    return _loads(memoryview(packet)[_NUMBER.size :])


def pack_answer(number: int, result: object) -> bytes:
    return _NUMBER.pack(number) + _dumps(result)


def pack_order(*order: object) -> bytes:
    return _dumps(order)


def unpack_order(packet: bytes) -> Any:
    return _loads(packet)


def _dumps(found: object) -> bytes:
    return pickle.dumps(found, protocol=pickle.HIGHEST_PROTOCOL)


def _loads(packet: bytes | memoryview) -> Any:
    return pickle.loads(packet)  # noqa: S301  # seam: between a process and its own forks
