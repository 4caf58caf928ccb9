"""What a caller may give in the place of a tensor: every dtype of numpy and torch, shapes, steps, orders, devices and
memory that is not its own. Each says whether it is right to store from, and to fetch into."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvstore.spec import DTYPES
from tests.specs import UNSIGNED

NUMPY_DTYPES = [
    "?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "g", "F", "D", "G", "O", "V1", "V2", "V4",
    "S2", "U1", "M8[s]", "m8[s]", ">u2", ">u4", ">u8", ">i2", ">f2", ">f4", ">f8", "u1,u1", "u2,u2",
]  # fmt: skip
TORCH_DTYPES = [each for each in vars(torch).values() if isinstance(each, torch.dtype)]
Make = Callable[[tuple[int, ...], str], Any]


@dataclass(frozen=True)
class Odd:
    """One thing to give. ``words``: what a refusal says."""

    name: str
    make: Make
    as_source: bool
    as_target: bool
    words: tuple[str, ...] = ()


def noise(shape: tuple[int, ...], item_size: int) -> Any:
    """Random bits, unsigned."""
    data = np.random.default_rng(7).integers(0, 256, (*shape, item_size), np.uint8)
    return data.view(UNSIGNED[item_size])[..., 0] if item_size > 1 else data[..., 0]


def plain(shape: tuple[int, ...], dtype: str) -> Any:
    """What numpy users give: unsigned integers of the right size."""
    return np.ascontiguousarray(noise(shape, DTYPES[dtype]))


def tensor(shape: tuple[int, ...], dtype: str) -> Any:
    """What torch users give."""
    array = plain(shape, dtype)
    array = array if array.itemsize == 1 else array.view(f"i{array.itemsize}")
    return torch.from_numpy(array).view(getattr(torch, dtype))


def odd_arrays(dtype: str) -> Iterator[Odd]:
    """All of them, for a cache of this dtype."""
    yield from _numpy_dtypes(dtype)
    yield from _torch_dtypes(dtype)
    yield from _shapes()
    yield from _memory()
    yield from _none_at_all()


def _numpy_dtypes(dtype: str) -> Iterator[Odd]:
    for code in NUMPY_DTYPES:
        found = np.dtype(code)
        is_right = str(found) == dtype or found == np.dtype(UNSIGNED[DTYPES[dtype]])

        def make(shape: tuple[int, ...], _: str, found: Any = found) -> Any:
            return np.zeros(shape, found) if found.hasobject else noise_of(shape, found)

        yield Odd(f"numpy {found.str}", make, is_right, is_right, () if is_right else (str(found), dtype))


def noise_of(shape: tuple[int, ...], dtype: Any) -> Any:
    """Random bits of any dtype of numpy that has bits."""
    if dtype.kind == "b":
        return np.random.default_rng(7).integers(0, 2, shape).astype(bool)
    data = np.random.default_rng(7).integers(0, 100, int(np.prod(shape)) * dtype.itemsize, np.uint8)
    return np.frombuffer(data.tobytes(), dtype).reshape(shape).copy()


def _torch_dtypes(dtype: str) -> Iterator[Odd]:
    for found in TORCH_DTYPES:
        name = str(found).removeprefix("torch.")
        try:
            torch.zeros(2, dtype=found)
        except (RuntimeError, NotImplementedError, TypeError):
            continue  # a dtype that has a name only

        def make(shape: tuple[int, ...], right: str, found: Any = found) -> Any:
            if str(found) == f"torch.{right}":
                return tensor(shape, right)
            return torch.zeros(shape, dtype=found)

        yield Odd(f"torch {name}", make, name == dtype, name == dtype, () if name == dtype else (name, dtype))


def _shapes() -> Iterator[Odd]:
    shapes: dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
        "an axis less": lambda shape: shape[1:],
        "an axis more": lambda shape: (1, *shape),
        "no axes": lambda _: (),
        "the last axis short": lambda shape: (*shape[:-1], shape[-1] - 1),
        "the last axis long": lambda shape: (*shape[:-1], shape[-1] + 1),
        "half of the first axis, twice": lambda shape: (2, shape[0] // 2 or 5, *shape[1:]),
        "empty": lambda shape: (0,) * len(shape),
        "no tokens": lambda shape: tuple(0 if size in (10, 20) else size for size in shape),
    }
    for name, change in shapes.items():
        for kind, base in (("numpy", plain), ("torch", tensor)):
            yield Odd(f"{kind}, {name}", lambda shape, dtype, base=base, change=change: base(change(shape), dtype),
                      False, False)  # fmt: skip


def _wide(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-1], shape[-1] * 2)


def _memory() -> Iterator[Odd]:
    """Of the right shape and dtype; how it lies is another matter."""
    both = [("numpy", plain), ("torch", tensor)]
    for kind, base in both:
        yield Odd(f"{kind}, every other item", lambda shape, dtype, base=base: base(_wide(shape), dtype)[..., ::2],
                  True, True)  # fmt: skip
        yield Odd(f"{kind}, axes turned", lambda shape, dtype, base=base: base(shape[::-1], dtype).T
                  if isinstance(base(shape, dtype), np.ndarray) else base(shape[::-1], dtype).permute(*_turned(shape)),
                  True, True)  # fmt: skip
        yield Odd(f"{kind}, part of a larger one", lambda shape, dtype, base=base: base((*shape, 3), dtype)[..., 1],
                  True, True)  # fmt: skip
    yield Odd("numpy, backwards", lambda shape, dtype: plain(shape, dtype)[..., ::-1], True, False)
    yield Odd("numpy, read-only", _read_only, True, False)
    yield Odd("numpy, of a bytes object", _of_bytes, True, False)
    yield Odd("numpy, not aligned", _unaligned, True, True)
    yield Odd("numpy, one row for all", lambda shape, dtype: np.broadcast_to(plain((shape[-1],), dtype), shape),
              True, False)  # fmt: skip
    yield Odd("numpy, rows that overlap", _overlapping, True, False)
    yield Odd("numpy, between items", _between_items, True, False)
    yield Odd("numpy, masked", lambda shape, dtype: np.ma.masked_array(plain(shape, dtype)), False, False, ("masked",))
    yield Odd("torch, one row for all", lambda shape, dtype: tensor((shape[-1],), dtype).expand(shape), True, False)
    yield Odd("torch, rows that overlap", _overlapping_tensor, True, False)
    yield Odd("torch, needs a gradient", lambda shape, dtype: tensor(shape, dtype).requires_grad_(), True, True)
    yield Odd("torch, a parameter", lambda shape, dtype: torch.nn.Parameter(tensor(shape, dtype)), True, True)
    yield Odd("torch, made in inference mode", _inferred, True, True)
    yield Odd("torch, meta", lambda shape, dtype: tensor(shape, dtype).to("meta"), False, False, ("meta", "CPU"))
    yield Odd("torch, sparse", _sparse, False, False)
    yield Odd("torch, to be negated", _negated, False, False)


def _turned(shape: tuple[int, ...]) -> list[int]:
    return list(range(len(shape)))[::-1]


def _read_only(shape: tuple[int, ...], dtype: str) -> Any:
    array = plain(shape, dtype)
    array.flags.writeable = False
    return array


def _of_bytes(shape: tuple[int, ...], dtype: str) -> Any:
    array = plain(shape, dtype)
    return np.frombuffer(array.tobytes(), array.dtype).reshape(shape)


def _unaligned(shape: tuple[int, ...], dtype: str) -> Any:
    array = plain(shape, dtype)
    memory = np.zeros(array.nbytes + 1, np.uint8)
    memory[1:] = array.view(np.uint8).ravel()
    return memory[1:].view(array.dtype).reshape(shape)


def _overlapping(shape: tuple[int, ...], dtype: str) -> Any:
    """Each row begins one item behind the one before."""
    memory = plain((sum(shape),), dtype)
    return np.lib.stride_tricks.as_strided(memory, shape, (memory.itemsize,) * len(shape))


def _overlapping_tensor(shape: tuple[int, ...], dtype: str) -> Any:
    return tensor((sum(shape),), dtype).as_strided(shape, (1,) * len(shape))


def _between_items(shape: tuple[int, ...], dtype: str) -> Any:
    """A field of records: steps that are no whole items."""
    array = plain(shape, dtype)
    records = np.zeros(shape, [("kept", array.dtype), ("other", np.uint8, 5)])
    records["kept"] = array
    # Of one byte every step is of whole items.
    return records["kept"] if array.itemsize > 1 else array[..., ::-1]


def _inferred(shape: tuple[int, ...], dtype: str) -> Any:
    with torch.inference_mode():
        return tensor(shape, dtype).clone()


def _sparse(shape: tuple[int, ...], dtype: str) -> Any:
    return torch.sparse_coo_tensor(torch.zeros((len(shape), 0), dtype=torch.long), torch.zeros(0).to(
        getattr(torch, dtype)), shape)  # fmt: skip


def _negated(shape: tuple[int, ...], dtype: str) -> Any:
    """A view that torch negates when it is read."""
    return torch._neg_view(tensor(shape, dtype))


def _none_at_all() -> Iterator[Odd]:
    for name, value in {
        "None": None, "a number": 7, "text": "kv", "bytes": b"kv", "a list": [[[1.0]]], "an object": object(),
    }.items():  # fmt: skip
        yield Odd(name, lambda *_, value=value: value, False, False)
