"""The chunks that a session has seen in memory: where each lies, for fetches without a call."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvstore_client.lookup.presence import ChainName
from kvstore_client.planes.shared_memory.chunk import Chunk

CHUNK_COUNT_MAX, HEADER_BYTES_MAX = 2048, 32 << 20
"""Limits of one session. A chunk takes as much as its header, some 10 KiB for 32 layers of 8 heads. The least recently
used chunks go first."""


class Known(NamedTuple):
    """A chunk, its header's bytes, and their hash when they were read."""

    chunk: Chunk
    header: memoryview
    hash: int

    @staticmethod
    def of(chunk: Chunk) -> Known:
        """Return a chunk with what its header has now."""
        header = chunk.extents[0][: chunk.layout.header_bytes].data
        return Known(chunk, header, xxh3_64_intdigest(header))


class KnownChunks:
    """The chunks that one session has seen in memory. Safe to share between threads: an entry that another thread
    removed costs a call."""

    def __init__(self) -> None:
        self._changing = threading.RLock()  # a signal handler may close a client in the midst of a call
        self._known: dict[tuple[ChainName, bytes], Known] = {}
        self._header_bytes = 0
        self._is_over = False

    def note(self, name: ChainName, digests: Sequence[bytes], chunks: Sequence[Chunk], chunk_tokens: int) -> None:
        """Remember the chunks that a fetch read; they are whole and committed."""
        seen = {
            (name, digests[chunk.token_start // chunk_tokens]): Known.of(chunk) for chunk in chunks[:CHUNK_COUNT_MAX]
        }
        with self._changing:
            for key, known in seen.items():
                if self._is_over:  # the session ended under the fetch: nobody would let go of its memory
                    return
                self._forget(key)
                self._known[key] = known
                self._header_bytes += known.chunk.layout.header_bytes
            while len(self._known) > CHUNK_COUNT_MAX or self._header_bytes > HEADER_BYTES_MAX:
                self._forget(next(iter(self._known)))

    def _forget(self, key: tuple[ChainName, bytes]) -> None:
        known = self._known.pop(key, None)
        if known is not None:
            self._header_bytes -= known.chunk.layout.header_bytes

    def of(self, name: ChainName, digests: Sequence[bytes], chunk_tokens: int) -> list[Chunk] | None:
        """Return all of these chunks. None when one of them is unknown, changed, or at another place in its prompt: an
        engine's own hashes may name the same chunk at another start."""
        found: dict[tuple[ChainName, bytes], Known] = {}
        for number, digest in enumerate(digests):
            known = self._known.get((name, digest))
            if known is None or known.chunk.token_start != number * chunk_tokens:
                return None
            if xxh3_64_intdigest(known.header) != known.hash:  # memory that went bad there is not the chunk's
                return None
            found[name, digest] = known
        with self._changing:
            for key, known in found.items():
                if self._known.pop(key, None) is not None:
                    self._known[key] = known
        return [known.chunk for known in found.values()]

    def clear(self) -> None:
        """Drop all chunks: the session ends, and its memory goes with the last known chunk."""
        with self._changing:
            self._is_over = True
            self._known.clear()
            self._header_bytes = 0
