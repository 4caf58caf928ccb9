"""The streams that copies of a thread take turns on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

from kvstore.errors import Internal
from kvstore_client.arrays import Tensor, is_tensor, torch_module
from kvstore_client.copying import plainly

LANES = 2


class _Lanes(threading.local):
    """This thread's streams per device. Threads that copy at once must not wait for each other's copies."""

    def __init__(self) -> None:
        self.of: dict[Any, Sequence[Any]] = {}


_lanes = _Lanes()


def gpu_of(plane: Tensor) -> Any | None:
    """Return the GPU on which a tensor lies; None for one of the CPU, and for an array."""
    return plane.device if is_tensor(plane) and plane.is_cuda else None


def common_gpu(planes: Iterable[Tensor]) -> Any | None:
    """Return the GPU on which all of these tensors lie; None where one lies elsewhere."""
    devices = set(map(gpu_of, planes))
    return devices.pop() if len(devices) == 1 else None


def run_on(device: Any, copies: Iterable[Callable[[], None]]) -> None:
    """Queue copies on a GPU, on two streams in turn, and wait for all of them: afterwards no copy runs, whatever this
    raises. What a copy allocates and drops is used again by the next one on its stream, once that one begins.

    Raises Internal where the GPU fails; the error of a copy that could not be queued.
    """
    torch = torch_module()
    streams = _lanes.of.get(device)
    if streams is None:  # for the CPU in a GPU's place there are none
        count = LANES if device.type == "cuda" else 0
        streams = _lanes.of[device] = [torch.cuda.Stream(device) for _ in range(count)]
    try:
        plainly(_queue, torch, streams, copies)
    except torch.OutOfMemoryError as error:
        raise Internal(
            f"{device} has no memory left for copies: leave some to it that the engine does not take"
        ) from error
    except RuntimeError as error:
        raise Internal(f"{device} failed: {error}") from error


def _queue(torch: Any, streams: Sequence[Any], copies: Iterable[Callable[[], None]]) -> None:
    try:
        for number, copy in enumerate(copies):
            with torch.cuda.stream(streams[number % len(streams)]) if streams else nullcontext():
                copy()
    finally:
        for stream in streams:
            stream.synchronize()
