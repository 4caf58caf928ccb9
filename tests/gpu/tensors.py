"""Tensors on the device under test: of random bits, poisoned, and in the odd forms that engines have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
import torch

from kvstore.spec import ModelSpec
from tests.specs import UNSIGNED, bits, random_cache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POISON = 0xDB
SLEEP_CYCLES = 200_000_000
"""A tenth of a second of a GPU's clock: far longer than a store or fetch of some MiB takes to begin."""
seeds = count(1000)
"""Each test takes new ones: nothing that it stores was stored before."""

Pair = tuple[torch.Tensor, torch.Tensor]


def on(device: str, array: Any, dtype: str) -> torch.Tensor:
    """An array of unsigned integers as a tensor of this dtype on the device, with the same bits."""
    signed = torch.from_numpy(array.copy().view(f"i{array.itemsize}"))
    return signed.view(getattr(torch, dtype)).to(device)


def unsigned(tensor: torch.Tensor) -> Any:
    """A tensor's bits, on the host."""
    return bits(tensor.detach().cpu())


def cache_on(device: str, spec: ModelSpec, token_count: int, seed: int) -> tuple[list[Pair], list[Any]]:
    """A cache of random bits, on the device and as arrays."""
    cache = random_cache(spec, token_count, seed)
    return [(on(device, k, spec.cache_dtype), on(device, v, spec.cache_dtype)) for k, v in cache], cache


def poisoned(device: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    size = getattr(torch, dtype).itemsize
    return torch.full((*shape[:-1], shape[-1] * size), POISON, dtype=torch.uint8, device=device).view(
        getattr(torch, dtype)
    )


def is_poison(tensor: torch.Tensor) -> bool:
    """Whether nothing was written there."""
    found = unsigned(tensor)
    return bool((np.ascontiguousarray(found).view(np.uint8) == POISON).all())


def same(found: Any, expected: Any) -> None:
    """Each plane of each layer has these bits."""
    for number, (pair, kept) in enumerate(zip(found, expected, strict=True)):
        for plane, array, name in zip(pair, kept, "KV", strict=True):
            there = unsigned(plane)
            assert there.shape == array.shape, (number, name, there.shape, array.shape)
            wrong = np.argwhere(there != array.view(UNSIGNED[array.itemsize]))
            assert not len(wrong), f"layer {number}, {name}: {len(wrong)} wrong items, the first at {wrong[0]}"


# ---------------------------------------------------------------- forms of dense planes

Form = Callable[[str, tuple[int, ...], str], tuple[torch.Tensor, torch.Tensor]]
"""Returns (a plane of this shape [heads, tokens, dim], all other items of its memory as one tensor)."""


def contiguous(device: str, shape: tuple[int, ...], dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    whole = poisoned(device, shape, dtype)
    return whole, whole[:0]


def tokens_first(device: str, shape: tuple[int, ...], dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    heads, tokens, dim = shape
    whole = poisoned(device, (tokens, heads, dim), dtype)
    return whole.transpose(0, 1), whole[:0]


def with_room(device: str, shape: tuple[int, ...], dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    heads, tokens, dim = shape
    whole = poisoned(device, (heads, tokens + 5, dim), dtype)
    return whole[:, :tokens], whole[:, tokens:]


def half_of_a_row(device: str, shape: tuple[int, ...], dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    heads, tokens, dim = shape
    whole = poisoned(device, (heads, tokens, 2 * dim), dtype)
    return whole[..., dim:], whole[..., :dim]


def every_other_item(device: str, shape: tuple[int, ...], dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    heads, tokens, dim = shape
    whole = poisoned(device, (heads, tokens, 2 * dim), dtype)
    return whole[..., ::2], whole[..., 1::2]


FORMS: dict[str, Form] = {
    "contiguous": contiguous, "tokens first": tokens_first, "with room": with_room, "half of a row": half_of_a_row,
    "every other item": every_other_item,
}  # fmt: skip


# ---------------------------------------------------------------- streams


def long_kernel(device: str) -> None:
    """Occupy the current stream for a while; what is launched behind it begins later."""
    if device == "cuda":
        torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]  # torch gives it no types


@contextmanager
def own_stream(device: str) -> Iterator[None]:
    """Run a test's code on a stream that is not the default one, and wait for it in the end."""
    if device != "cuda":
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
