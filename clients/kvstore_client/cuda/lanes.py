"""The streams that copies of a thread take turns on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from itertools import cycle
from typing import Any, NamedTuple

from kvstore.errors import Internal
from kvstore_client.arrays import Tensor, is_tensor, torch_module
from kvstore_client.copying import plainly

LANES = 2
STEPS_AHEAD = 2
"""Steps that are queued behind the one that is waited for: the GPU is never without a copy."""


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
    common: Any | None = None
    for plane in planes:
        gpu = gpu_of(plane)
        if gpu is None or common not in (None, gpu):
            return None  # the CPU's first tensor decides: small fetches ask, too
        common = gpu
    return common


class QueuedStep(NamedTuple):
    """Copies of which ``landed`` is to be called once all of them have ended."""

    copies: Iterable[Callable[[], None]]
    landed: Callable[[], object]


def run_on(device: Any, copies: Iterable[Callable[[], None]]) -> None:
    """Queue copies on a GPU, and wait for all of them, as ``run_in_turn``."""
    run_in_turn(device, [QueuedStep(copies, lambda: None)])


def run_in_turn(device: Any, steps: Iterable[QueuedStep]) -> None:
    """Queue the copies of the steps on a GPU, on two streams in turn, and call each step's ``landed`` while later ones
    are copied. Afterwards no copy runs, whatever this raises. What a copy allocates and drops is used again by the next
    one on its stream, once that one begins.

    Raises Internal where the GPU fails; the error of a copy that could not be queued.
    """
    torch = torch_module()
    streams = _lanes.of.get(device)
    if streams is None:  # for the CPU in a GPU's place there are none
        count = LANES if device.type == "cuda" else 0
        streams = _lanes.of[device] = [torch.cuda.Stream(device) for _ in range(count)]
    try:
        # To enter a stream of another device is to set this thread's own one in the end, which makes a context on it.
        with torch.cuda.device(device) if streams else nullcontext():
            plainly(_queue, torch, streams, steps)
    except torch.OutOfMemoryError as error:
        found = f"{device} has no memory left for copies"
        raise Internal(f"{found}: leave {LANES * 32} MiB to it that the engine does not take") from error
    except RuntimeError as error:
        raise Internal(f"{device} failed: {error}") from error


def _queue(torch: Any, streams: Sequence[Any], steps: Iterable[QueuedStep]) -> None:
    turn = cycle(streams or [None])
    coming: deque[tuple[list[Any], Callable[[], object]]] = deque()
    try:
        for step in steps:
            for copy in step.copies:
                stream = next(turn)
                with nullcontext() if stream is None else torch.cuda.stream(stream):
                    copy()
            coming.append(([stream.record_event() for stream in streams], step.landed))
            if len(coming) > STEPS_AHEAD:
                _land(*coming.popleft())
        while coming:
            _land(*coming.popleft())
    finally:
        _settle(streams)


def _settle(streams: Iterable[Any]) -> None:
    """Wait for all streams, also where the caller is interrupted: they may write to memory that is given back."""
    interrupt: KeyboardInterrupt | None = None
    for stream in streams:
        while True:
            try:
                stream.synchronize()
                break
            except KeyboardInterrupt as error:
                interrupt = error
    if interrupt is not None:
        raise interrupt


def _land(events: Iterable[Any], landed: Callable[[], object]) -> None:
    for event in events:
        event.synchronize()
    landed()
