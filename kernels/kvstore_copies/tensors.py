"""Tells where many tensors lie in one call of compiled code, by DLPack's table of functions."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from kvstore_copies.compiled import compiled_path

ATTRIBUTE, CAPSULE = "__dlpack_c_exchange_api__", b"dlpack_exchange_api"
Tell = Callable[[int, type, list[Any], int, int, list[Any], list[Any], tuple[Any, ...], int], int]


class Questions(NamedTuple):
    """The methods of a class of tensors that tell of one. ``is_odd``: True where its items are not what lies in memory;
    ``storage``: the memory that it is a view of; ``begin`` and ``size``: that memory's address and bytes."""

    is_odd: Callable[[Any], bool]
    storage: Callable[[Any], object]
    begin: Callable[[Any], int]
    size: Callable[[Any], int]


class Alike(NamedTuple):
    """Tensors in columns, those of each alike. ``tensors``: all of them, column after column; ``addresses``: where each
    begins; ``distance``: the smallest distance in bytes between two of these; ``rooms``: per column, the fewest bytes
    that one has from its begin to its storage's end; ``storages`` keep the memory. The last two without ``Questions``
    are worthless."""

    tensors: list[Any]
    addresses: Sequence[int]
    distance: int
    rooms: Sequence[int]
    storages: list[object]

    @property
    def columns(self) -> list[list[Any]]:
        """The tensors of each column."""
        count = len(self.tensors) // len(self.rooms)
        return [self.tensors[start : start + count] for start in range(0, len(self.tensors), count)]


def alike_columns(
    entries: Sequence[Sequence[object]], width: int, kind: type, questions: Questions | tuple[()] = ()
) -> Alike | None:
    """Return the tensors of ``entries``, if each entry is a plain tuple or list of ``width`` of them, all are of the
    class ``kind`` and in the CPU's memory, none is odd, and those of each column have one dtype, shape and strides.
    None where they are not, one has no memory, or it cannot be told: without compiled code, and where the class has
    no ``__dlpack_c_exchange_api__`` (torch has it from 2.10 on)."""
    tell, table = _compiled(), _table_of(kind)
    if tell is None or not table:
        return None
    own = list(entries)  # nobody else shortens it meanwhile
    total = len(own) * width
    tensors: list[Any] = [None] * total
    storages: list[object] = [None] * total
    words = array("q", bytes(8 * (2 * total + 1 + width)))
    try:
        is_alike = tell(
            table, kind, own, len(own), width, tensors, storages, questions, words.buffer_info()[0]
        )  # fmt: skip
    except (RuntimeError, TypeError, ValueError, BufferError):  # the class cannot tell of one of them
        return None
    if not is_alike:
        return None
    return Alike(tensors, words[:total], words[2 * total], words[2 * total + 1 :], storages)


@cache
def _table_of(kind: type) -> int:
    """Return the address of a class's table; 0: it has none."""
    capsule = getattr(kind, ATTRIBUTE, None)
    if capsule is None:
        return 0
    kind_of_function = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    address_of = kind_of_function(("PyCapsule_GetPointer", ctypes.pythonapi))  # that of ``pythonapi`` is everybody's
    try:
        address: int | None = address_of(capsule, CAPSULE)
        return address or 0
    except ValueError:  # another kind of capsule
        return 0


@cache
def _compiled() -> Tell | None:
    """Return the compiled function, whose calls keep Python's lock; None where there is none."""
    path = compiled_path()
    if path is None:
        return None
    try:
        tell = getattr(ctypes.PyDLL(path), "kvstore_alike_4", None)  # None: of another release
    except OSError:
        return None
    if tell is not None:
        number, any_object, address = ctypes.c_uint64, ctypes.py_object, ctypes.c_void_p
        tell.argtypes = [address, any_object, any_object, number, number, *[any_object] * 3, address]
        tell.restype = ctypes.c_int
    return tell
