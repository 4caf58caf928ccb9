"""Digests of weights, and the detection of changes after the digest.

A digest is over every byte, in pieces. A ``WeightsWatch`` checks a model's tensors at each use: that they are the same
objects at the same address in the same version, a sample of each tensor's bytes, and one piece, the next one each time.
"""

from __future__ import annotations

import os
import weakref
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from blake3 import blake3

from kvstore.errors import InvalidRequest
from kvstore.seams import WorkerThreads
from kvstore.seams.jobs import begun

DOMAIN = b"kvstore/weights/2\0"
PIECE_BYTES = 256 << 10
SAMPLE_ITEMS = 32
"""Sampled numbers of each tensor, evenly spread. A change of a share p of the numbers in each of t tensors goes unseen
with probability (1 - p) ** (32 t). A change of a whole matrix is always seen; of 1 % of one matrix in 1 of 4 cases; of
1 % of each of 32 matrices it is missed once in 30,000. The pieces find a missed change once each had its turn."""
THREADS = 8
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Digested:
    """A digest of a state dict. ``pieces``: by tensor, the joined 32-byte digests of its pieces."""

    digest: str
    pieces: Mapping[str, bytes]


def digested(state: Mapping[str, Any]) -> Digested:
    """BLAKE3 over every tensor: name, dtype, shape, bytes; in order of name.

    Cost: about 4 GB/s per core, on up to eight cores. Raises: InvalidRequest for a value that is no plain tensor, or
    has no bytes."""
    for name, tensor in state.items():
        _check(name, tensor)
    names = sorted(state)
    threads = WorkerThreads(min(THREADS, os.cpu_count() or 1), "kvstore-digest")
    try:
        pieces = [each.result() for each in [begun(threads, lambda name=name: _pieces(state[name])) for name in names]]
    finally:
        threads.close()
    hasher = blake3(DOMAIN)
    for name, each in zip(names, pieces, strict=True):
        head = f"{name}\0{state[name].dtype}\0{tuple(state[name].shape)}\0"
        hasher.update(head.encode() + len(each).to_bytes(8, "little") + each)
    return Digested(hasher.hexdigest(), dict(zip(names, pieces, strict=True)))


def _check(name: str, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or tensor.is_quantized:
        raise InvalidRequest(f"weights: {name} is no plain tensor but a {type(tensor).__name__}: it has no digest")
    if tensor.is_meta:
        raise InvalidRequest(f"weights: {name} is not loaded (device meta), so it has no bytes to digest")


def _pieces(tensor: torch.Tensor) -> bytes:
    data = _bytes(tensor)
    return b"".join(_piece(data, start) for start in range(0, data.numel(), PIECE_BYTES))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _piece(data: torch.Tensor, start: int) -> bytes:
    return blake3(data[start : start + PIECE_BYTES].cpu().numpy().data).digest()


class WeightsWatch:
    """Detects changes of tensors. It keeps none of them alive. Several threads may use it."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take the sample. Make the watch before the digest: a change meanwhile is then seen at the next use."""
        self._refs = [weakref.ref(each) for each in tensors]
        self._versioned = [not each.is_inference() for each in tensors]
        self._stamps = self._stamped(tensors)
        self._places = _places(tensors)
        self._sample = self._sampled(tensors)
        self._pieces: list[bytes] = []
        self._ends: list[int] = []
        self._turn = 0

    def learn(self, pieces: Mapping[int, bytes]) -> None:
        """Take over the digests of the pieces. ``pieces``: by the address of the tensor's bytes."""
        self._pieces = [pieces.get(stamp[0], b"") for stamp in self._stamps]
        self._ends = list(accumulate(len(each) // 32 for each in self._pieces))

    @torch.inference_mode()
    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """True when the tensors, in the order in which they were watched, are unchanged by all checks. Cost: 4 us per
        tensor, and the digest of a piece."""
        if len(tensors) != len(self._refs):
            return False
        if not all(ref() is each for ref, each in zip(self._refs, tensors, strict=True)):
            return False
        if self._stamped(tensors) != self._stamps:
            return False
        same = all(torch.equal(a, b) for a, b in zip(self._sampled(tensors), self._sample, strict=True))
        return same and self._next_piece_holds(tensors)

    def _stamped(self, tensors: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
        return [
            (each.data_ptr(), each.stride(), each.shape, each._version if versioned else 0)
            for each, versioned in zip(tensors, self._versioned, strict=True)
        ]

    @torch.inference_mode()
    def _sampled(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the samples of all tensors, joined per device and dtype, as integers of the same bits."""
        found = []
        for (_, dtype), places in self._places.items():
            parts = [
                tensors[index].as_strided((count,), (step,))
                if is_dense
                else tensors[index].reshape(-1)[: count * step : step]
                for index, count, step, is_dense in places
            ]
            found.append(torch.cat(parts).view(_BITS[dtype.itemsize]) if dtype.itemsize in _BITS else torch.cat(parts))
        return found

    def _next_piece_holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        if not self._ends or not self._ends[-1]:
            return True
        turn = self._turn % self._ends[-1]
        self._turn = turn + 1
        index = bisect_right(self._ends, turn)
        first = self._ends[index - 1] if index else 0
        at = turn - first
        return _piece(_bytes(tensors[index]), at * PIECE_BYTES) == self._pieces[index][32 * at : 32 * (at + 1)]


_Places = dict[tuple[torch.device, torch.dtype], list[tuple[int, int, int, bool]]]


def _places(tensors: Sequence[torch.Tensor]) -> _Places:
    """Return, by device and dtype, a tensor's (index, number of samples, step between them, is contiguous). The step is
    odd, so that the samples fall into different columns of a matrix."""
    found: _Places = {}
    for index, each in enumerate(tensors):
        size = each.numel()
        if size:
            count = min(size, SAMPLE_ITEMS)
            step = 1 if size < 2 * SAMPLE_ITEMS else (size // count - 1) | 1
            found.setdefault((each.device, each.dtype), []).append((index, count, step, each.is_contiguous()))
    return found
