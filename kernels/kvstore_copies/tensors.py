"""Tells where many tensors lie in one call of compiled code, by DLPack's table of functions."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from kvstore_copies.compiled import compiled_path

ATTRIBUTE, CAPSULE = "__dlpack_c_exchange_api__", b"dlpack_exchange_api"
Tell = Callable[[int, list[object], int, int, int, int], int]


def alike_addresses(tensors: Sequence[object], kinds: int = 1) -> tuple[array[int], int] | None:
    """Return where tensors of one class begin, and the smallest distance in bytes between two of them, if all are in
    the CPU's memory, and have the dtype, shape and strides of the first of their kind: there are ``kinds``, one after
    the other, and as many tensors of each. None where they are not, one has no memory, or it cannot be told: without
    compiled code, and where the class has no ``__dlpack_c_exchange_api__`` (torch has it from 2.10 on)."""
    kind: Any = type(tensors[0]) if tensors else None
    tell, table = _compiled(), _table_of(kind)
    if tell is None or not table:
        return None
    own = list(tensors)  # nobody else shortens it meanwhile
    count = len(own)
    words = array("q", bytes(16 * count + 8))
    place = words.buffer_info()[0]
    try:
        is_alike = tell(table, own, count, count // kinds, place, place + 16 * count)
    except (RuntimeError, TypeError, ValueError, BufferError):  # the class cannot tell of one of them
        return None
    return (words[:count], words[-1]) if is_alike else None


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
        tell = getattr(ctypes.PyDLL(path), "kvstore_alike_3", None)  # None: of another release
    except OSError:
        return None
    if tell is not None:
        tell.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.c_uint64, ctypes.c_uint64] + [ctypes.c_void_p] * 2
        tell.restype = ctypes.c_int
    return tell
