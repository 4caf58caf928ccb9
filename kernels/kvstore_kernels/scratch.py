"""Scratch memory of the CPU paths: a few runs per thread that are kept, for to touch fresh memory costs as much as the
work done in it."""

from __future__ import annotations

import math
import threading

import torch


class Scratch(threading.local):
    """One run of bytes per thread, as large as the largest asked for."""

    def __init__(self) -> None:
        self._run = torch.empty(0, dtype=torch.uint8)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor of any content, the caller's until it asks again. On a device, where allocators keep memory
        themselves, a fresh one."""
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        count = math.prod(shape)
        if len(self._run) < count * dtype.itemsize:
            with torch.inference_mode(False):  # else only calls in inference mode could write it
                self._run = torch.empty(count * dtype.itemsize, dtype=torch.uint8)
        return self._run[: count * dtype.itemsize].view(dtype).view(shape)
