"""Copies memory and digests the copy in the same pass."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore_copies.batch import address_of
from kvstore_copies.compiled import library

Bytes = NDArray[np.uint8]
STRIPE_BYTES, PIECE_BYTES_MIN = 64, 256
"""Pieces are whole stripes of the digest; shorter ones are digested otherwise, and come from the library."""
STREAM_BYTES = 1 << 20
"""From so many bytes on, stores pass the processor's caches by: the copy is not read soon."""
DIGEST_BYTES = 16


def copy_checked(
    target: Bytes, source: Bytes, starts: NDArray[np.int64], stops: NDArray[np.int64], seeds: Sequence[int]
) -> bytes | None:
    """Copy pieces of a source to the same places of a target, and return XXH3-128 of each copy with its seed, 16 bytes
    each: of what was written, whoever writes the source meanwhile. The source is read once.

    ``starts``, ``stops`` [pieces]: byte offsets. None, and nothing is copied, where there is no compiled code, the
    processor has no AVX2, or a piece is not whole stripes."""
    copy = _copy_checked()
    if copy is None or not starts.size or not _is_regular(starts, stops):
        return None
    if not target.flags.c_contiguous or not source.flags.c_contiguous:
        return None
    count, end = starts.size, int(stops.max())
    if int(starts.min()) < 0 or end > min(target.size, source.size) or len(seeds) != count:  # also under ``python -O``
        raise AssertionError("pieces lie in both memories, and have a seed each")
    starts, stops = np.ascontiguousarray(starts, np.int64), np.ascontiguousarray(stops, np.int64)
    numbers, digests = np.array(seeds, np.uint64), np.empty(count * DIGEST_BYTES, np.uint8)
    at = address_of(target)
    streams = end >= STREAM_BYTES and not (at % STRIPE_BYTES or (starts % STRIPE_BYTES).any())
    copy(at, address_of(source), count, *(address_of(each) for each in (starts, stops, numbers, digests)), streams)
    return digests.tobytes()


def _is_regular(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> bool:
    lengths = stops - starts
    return bool(lengths.min() >= PIECE_BYTES_MIN) and not (lengths % STRIPE_BYTES).any()


@cache
def _copy_checked() -> Any:
    """Return the compiled function; None where there is none, or this processor cannot run it."""
    function = getattr(library(), "kvstore_copy_checked_1", None)  # None: of another release, or another processor's
    if function is None or not library().kvstore_checks_1():  # type: ignore[union-attr]  # it has the function
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_uint64
    function.argtypes, function.restype = [pointer, pointer, number, *[pointer] * 4, number], None
    return function
