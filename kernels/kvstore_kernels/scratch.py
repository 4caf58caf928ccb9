"""Scratch memory of the CPU paths. Each thread keeps a few runs, because touching fresh memory costs as much as the
work done in it."""

from __future__ import annotations

import math
import threading

import torch


class Scratch(threading.local):
    """One run of bytes per thread, as large as the largest request."""

    def __init__(self) -> None:
        self._run = torch.empty(0, dtype=torch.uint8)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor of any content. It is the caller's until this thread's next call. On a device it is fresh,
        because the allocators there keep memory themselves."""
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        count = math.prod(shape)
        if len(self._run) < count * dtype.itemsize:
            with torch.inference_mode(False):  # else only calls in inference mode could write to it
                self._run = torch.empty(count * dtype.itemsize, dtype=torch.uint8)
        return self._run[: count * dtype.itemsize].view(dtype).view(shape)
