"""The caller's CUDA streams, in the threads that work for it. Each thread of torch has current streams of its own: a
wait for the GPU on another thread would be a wait for another stream than the one that the caller computes on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

from kvstore_client.arrays import torch_module

Result = TypeVar("Result")


def within_streams(function: Callable[[], Result]) -> Callable[[], Result]:
    """Return a function that runs in another thread on the caller's current device and streams. Cost: about a
    microsecond per GPU; nothing where the process has not begun to use one. A GPU that is merely there is not entered:
    that would make a context on it, of some 500 MiB. Where the caller is on its default stream, so is every thread."""
    torch = torch_module()
    if torch is None or not torch.cuda.is_initialized():
        return function
    cuda: Any = torch.cuda
    own = cuda.current_device()
    streams = [cuda.current_stream(each) for each in range(cuda.device_count()) if each != own]
    streams = [each for each in streams if each != cuda.default_stream(each.device)]
    streams.append(cuda.current_stream(own))

    def run() -> Result:
        with cuda.device(own), ExitStack() as stack:
            for stream in streams:  # the caller's device last: it is then the current one
                stack.enter_context(cuda.stream(stream))
            return function()

    return run
