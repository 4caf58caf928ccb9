"""Tensors in and out. Inside, a cache is unsigned integers of its item size. Torch is used when the process already has
it, and never imported only for this."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InvalidRequest
from kvstore.spec import item_size

_UNSIGNED: dict[int, np.dtype[np.generic]] = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32)}
_NUMPY_TYPES: dict[str, np.dtype[np.generic]] = {"float16": np.dtype(np.float16), "float32": np.dtype(np.float32)}
MADV_HUGEPAGE = 14
Tensor: TypeAlias = Any
"""A tensor or an array. Any: types are checked without torch, too."""
Layer: TypeAlias = Any
"""One layer of a cache in the caller's form: (K, V), or E where a spec keeps E in the place of KV."""
Buffer: TypeAlias = Any
"""Bytes, or a contiguous array or CPU tensor; where a call says so, a list of these that are one run."""


def torch_module() -> Any:
    """Return torch if this process has imported it, else None."""
    return sys.modules.get("torch")


def is_tensor(value: object) -> bool:
    torch: Any = sys.modules.get("torch")  # as ``torch_module``, a call less: each tensor of a fetch may be asked for
    return torch is not None and isinstance(value, torch.Tensor)


def tell_graphs(tensors: Sequence[Tensor]) -> None:
    """Tell torch that these tensors are written by others than torch: a graph that needs what they held refuses to
    compute a gradient, as after torch's own copies."""
    torch_module().autograd.graph.increment_version(tensors)


def is_array(value: object) -> bool:
    """Return True for a numpy array or a torch tensor."""
    return isinstance(value, np.ndarray) or is_tensor(value)


def checked(value: Tensor, shape: tuple[int, ...], dtype: str, name: str) -> Tensor:
    """Return ``value`` if it is a tensor or array of this shape and dtype. Raises InvalidRequest naming the
    argument."""
    check_memory(value, name)
    check_dtype(value, dtype, name)
    if tuple(value.shape) != shape:
        raise InvalidRequest(f"{name} has shape {tuple(value.shape)}, expected {shape}")
    return value


def kind_of(value: Tensor) -> tuple[object, ...] | None:
    """Return all properties that ``checked`` looks at of a plain tensor: another tensor of the same kind is as right or
    wrong. None for anything else, which needs its own check."""
    torch = torch_module()
    if torch is None or type(value) is not torch.Tensor:
        return None
    return value.shape, value.dtype, value.layout, value.is_cpu, value.is_cuda, value.is_neg(), value.is_conj()


def check_memory(value: Tensor, name: str) -> None:
    """Raise InvalidRequest for anything but a tensor or array with plain memory of its own."""
    if isinstance(value, np.ndarray):
        if isinstance(value, np.ma.MaskedArray):
            raise InvalidRequest(f"{name} is a masked array, whose mask would be lost: give a plain array")
        return
    if not is_tensor(value):
        raise InvalidRequest(f"{name} must be a torch tensor or a numpy array, not {type(value).__name__}")
    if value.layout is not torch_module().strided:
        raise InvalidRequest(f"{name} is {value.layout}: give a strided tensor, as to_dense() makes")
    if not (value.is_cuda or value.is_cpu):
        raise InvalidRequest(f"{name} is on the device {value.device}: give a tensor of the CPU or of a CUDA device")
    if value.is_neg() or value.is_conj():
        raise InvalidRequest(f"{name} is not yet negated (or conjugated): give its resolve_neg() or resolve_conj()")


def check_dtype(value: Tensor, dtype: str, name: str) -> None:
    """Raise InvalidRequest for items of another dtype than the cache's, naming both.

    numpy has no bfloat16 or float8: pass such arrays as unsigned integers of the same size, or with a dtype of that
    name.
    """
    if dtype_name(value) == dtype:
        return
    unsigned = _UNSIGNED[item_size(dtype)]
    if not (isinstance(value, np.ndarray) and value.dtype == unsigned):
        raise InvalidRequest(
            f"{name} is {dtype_name(value)}, the model's cache is {dtype}: give {dtype}, or a numpy array of {unsigned}"
        )


def dtype_name(value: Tensor) -> str:
    """Return one name for torch's and numpy's dtypes; arrays of another byte order keep numpy's name ('>f4')."""
    return _name_of(value.dtype)


@lru_cache(maxsize=64)
def _name_of(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def is_writable(value: Tensor) -> bool:
    """Return True when copies into ``value`` reach its memory. Read-only arrays, and arrays that torch cannot share,
    would be copied, and the bytes would land in that copy."""
    return is_tensor(value) or (value.flags.writeable and is_shareable(value))


def is_shareable(array: NDArray[np.generic]) -> bool:
    """Return True when torch can share an array's memory: it runs forwards, in steps of whole items."""
    return all(step >= 0 and step % array.itemsize == 0 for step in array.strides)


def settle_device(planes: Sequence[Tensor]) -> None:
    """Wait until the caller's stream is done with its GPU tensors: the copies run on streams of other threads."""
    torch = torch_module()
    for device in {plane.device for plane in planes if is_tensor(plane) and plane.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def destination(byte_count: int) -> NDArray[np.uint8]:
    """Return new owned memory. Large runs are anonymous maps that ask for huge pages: first touch costs a tenth."""
    if byte_count < 4 << 20:
        return np.empty(byte_count, np.uint8)
    mapping = mmap.mmap(-1, byte_count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        mapping.madvise(MADV_HUGEPAGE)
    except OSError:
        pass  # a kernel without huge pages: slower first touch, same bytes
    return np.frombuffer(mapping, np.uint8)


def memory_at(address: int, byte_count: int) -> NDArray[np.uint8]:
    """Return bytes of this process that an engine has allocated: nothing keeps them but the engine."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * byte_count).from_address(address))


def presented(array: NDArray[np.generic], dtype: str) -> Tensor:
    """Return the caller's view of an unsigned array: a torch tensor when the process uses torch, else numpy."""
    torch = torch_module()
    if torch is not None:
        return as_tensor(array, dtype)
    return array.view(_NUMPY_TYPES[dtype]) if dtype in _NUMPY_TYPES else array


def as_tensor(array: NDArray[np.generic], dtype: str) -> Tensor:
    """Return a tensor over an unsigned array, zero copy."""
    integers = array.view(f"i{array.itemsize}") if array.itemsize > 1 else array
    return torch_module().from_numpy(integers).view(dtype_of(dtype))


@lru_cache(maxsize=64)
def dtype_of(name: str) -> Any:
    """Return torch's dtype of this name."""
    return getattr(torch_module(), name)


def raw_array(value: Tensor) -> NDArray[np.generic]:
    """Return an unsigned view of a numpy array."""
    array: NDArray[np.generic] = value.view(_UNSIGNED[value.itemsize])
    return array


class _Alias:
    """Carries an array interface and keeps its owner alive."""

    def __init__(self, interface: Mapping[str, object], owner: object) -> None:
        self.__array_interface__ = interface
        self.owner = owner


def fresh_message(byte_count: int) -> tuple[bytes, NDArray[np.uint8]]:
    """Return a new message (bytes), and a writable view to fill it before anybody else sees it. gRPC takes bytes only,
    and filling another buffer would cost a copy of all of it."""
    message = bytes(byte_count)
    view = np.frombuffer(message, np.uint8)
    interface = {**view.__array_interface__, "data": (view.__array_interface__["data"][0], False)}
    return message, np.asarray(_Alias(interface, message))
