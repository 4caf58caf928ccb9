"""The kernels on a GPU, in Triton: what the torch paths of the room above do, in one pass and without waiting for the
device.

Nothing here is needed: without Triton, or where a kernel cannot be compiled, ``attempt`` returns None and the caller
takes the torch path. A kernel that failed once is not tried again in this process. Triton is imported by the first
launch. A first launch of a shape's kind compiles for a second or more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from importlib.util import find_spec
from typing import TypeVar

import torch

T = TypeVar("T")

failures: dict[str, str] = {}
"""Kernels that could not be compiled or started here, and why."""

_log = logging.getLogger(__name__)


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Return True when Triton is installed."""
    return find_spec("triton") is not None


def serves(*tensors: torch.Tensor | None) -> bool:
    """Return True when kernels can take these tensors: on one CUDA device, and no gradient is wanted."""
    given = [each for each in tensors if each is not None]
    first = given[0]
    if not first.is_cuda or not has_triton() or any(each.device != first.device for each in given):
        return False
    return not (torch.is_grad_enabled() and any(each.requires_grad for each in given))


def attempt(name: str, launch: Callable[[], T]) -> T | None:
    """Return what a launch returns; None where it cannot be made. Raises: what a device that ran out of memory does."""
    if name in failures:
        return None
    try:
        return launch()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - Triton, its compilers and the driver raise errors of many kinds
        failures[name] = f"{type(error).__name__}: {error}"
        _log.warning("the %s kernel does not run here, torch serves instead: %s", name, failures[name])
        return None


def tell_graphs(written: Sequence[torch.Tensor]) -> None:
    """Tell torch that a kernel wrote to these tensors: a graph that needs what they held refuses to compute a gradient,
    as after torch's own copies. Tensors of inference mode are in no graph."""
    known = [each for each in written if not each.is_inference()]
    if known:
        torch.autograd.graph.increment_version(known)


def on_device(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Return the context in which launches go to the tensor's device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def power_of_two(count: int) -> int:
    """Return the least power of two that is not below ``count``; 1 for 0."""
    return 1 << max(0, count - 1).bit_length()


def alignment(addresses: list[int], strides: list[int], item_size: int) -> int:
    """Return the bytes, up to 16, that divide all these addresses, and the strides, which count items."""
    most = 16
    for value in (*addresses, *(stride * item_size for stride in strides)):
        while value % most:
            most //= 2
    return most
