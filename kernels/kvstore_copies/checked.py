"""Digests memory, while it copies it or where it lies; and makes many seeds at once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore_copies.batch import address_of
from kvstore_copies.compiled import compiled_code

Bytes = NDArray[np.uint8]
Offsets = NDArray[np.int64]
STRIPE_BYTES, PIECE_BYTES_MIN = 64, 256
"""Pieces are whole stripes of the digest; shorter ones are digested otherwise, and come from the library."""
STREAM_BYTES = 1 << 20
"""From so many bytes on, stores pass the processor's caches by: the copy is not read soon."""
DIGEST_BYTES, KEY_BYTES = 16, 32


def copy_checked(target: Bytes, source: Bytes, starts: Offsets, stops: Offsets, seeds: Sequence[int]) -> bytes | None:
    """Copy pieces of a source to the same places of a target, and return XXH3-128 of each copy with its seed, 16 bytes
    each: of what was written, whoever writes the source meanwhile. The source is read once.

    ``starts``, ``stops`` [pieces]: byte offsets. None, and nothing is copied, where there is no compiled code, no
    AVX2, or a piece or the memory is not as that code needs it."""
    copy = _compiled("kvstore_copy_checked_1")
    if copy is None or not _are_regular(target, source, starts, stops, seeds):
        return None
    at = address_of(target)
    streams = int(stops.max()) >= STREAM_BYTES and not (at % STRIPE_BYTES or (starts % STRIPE_BYTES).any())
    digests = np.empty(len(seeds) * DIGEST_BYTES, np.uint8)
    kept = _kept(starts, stops, seeds, digests)
    copy(at, address_of(source), len(seeds), *map(address_of, kept), streams)
    return digests.tobytes()


def digests_of(data: Bytes, starts: Offsets, stops: Offsets, seeds: Sequence[int]) -> bytes | None:
    """Return XXH3-128 of each piece with its seed, 16 bytes each. Arguments, and None, as for ``copy_checked``."""
    digest = _compiled("kvstore_digest_1")
    if digest is None or not _are_regular(data, data, starts, stops, seeds, is_written=False):
        return None
    digests = np.empty(len(seeds) * DIGEST_BYTES, np.uint8)
    kept = _kept(starts, stops, seeds, digests)
    digest(address_of(data), len(seeds), *map(address_of, kept))
    return digests.tobytes()


def is_checked_compiled() -> bool:
    """Return True when ``copy_checked`` copies."""
    return _compiled("kvstore_copy_checked_1") is not None


def keyed_words(key: bytes, messages: NDArray[Any]) -> list[int] | None:
    """Return the first eight bytes of BLAKE3 of each message, keyed, as numbers. ``messages``: eight bytes per row.
    None where there is no compiled code, or no AVX2."""
    make = _compiled("kvstore_keyed_words_1")
    if make is None:
        return None
    if messages.nbytes != 8 * len(messages) or len(key) != KEY_BYTES:  # also under ``python -O``
        raise AssertionError("messages have eight bytes, and keys 32")
    rows, words = np.ascontiguousarray(messages), np.empty(len(messages), np.uint64)
    make(key, len(rows), address_of(rows), address_of(words))
    return words.tolist()


def _kept(starts: Offsets, stops: Offsets, seeds: Sequence[int], digests: Bytes) -> tuple[NDArray[Any], ...]:
    """Return the arrays that compiled code reads and writes, in its order."""
    offsets = np.ascontiguousarray(starts, np.int64), np.ascontiguousarray(stops, np.int64)
    return *offsets, np.array(seeds, np.uint64), digests


def _are_regular(
    target: Bytes, source: Bytes, starts: Offsets, stops: Offsets, seeds: Sequence[int], *, is_written: bool = True
) -> bool:
    """Return True for pieces that the compiled code takes. Raises AssertionError for what no caller may give."""
    if not starts.size or not all(each.flags.c_contiguous for each in (target, source)):
        return False
    if starts.shape != stops.shape or (is_written and not target.flags.writeable):  # also under ``python -O``
        raise AssertionError("a piece starts and stops, and the target may be written")
    lengths = stops - starts
    if int(lengths.min()) < PIECE_BYTES_MIN or (lengths % STRIPE_BYTES).any():
        return False
    end = int(stops.max())
    if int(starts.min()) < 0 or end > min(target.size, source.size) or len(seeds) != starts.size:
        raise AssertionError("pieces lie in both memories, and have a seed each")
    return True


@cache
def _compiled(name: str) -> Any:
    """Return a compiled function; None where there is none, or this processor cannot run it."""
    code = compiled_code()
    function = getattr(code, name, None)  # None: of another release, or another processor's
    if code is None or function is None or not code.kvstore_checks_1():
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_uint64
    function.restype = None
    function.argtypes = {
        "kvstore_copy_checked_1": [pointer, pointer, number, *[pointer] * 4, number],
        "kvstore_digest_1": [pointer, number, *[pointer] * 4],
        "kvstore_keyed_words_1": [ctypes.c_char_p, number, pointer, pointer],
    }[name]
    return function
