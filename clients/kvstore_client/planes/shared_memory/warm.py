"""Fetches without a call: reuses the places of chunks that earlier fetches found in memory.

A chunk keeps its place in the sidecar's memory, and the slot and value of its generation, until it leaves; then the
generation changes before anything else does. So a chunk is still where an earlier fetch read it, if the presence table
says that memory has it and its header is unchanged. It is copied without a lease, and the copy counts only if the
generation is unchanged after it. Where a check fails, a call decides.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import xxhash

from kvstore.seams import FaultPoints
from kvstore.spec import ChunkState, Exactness, MissReason, Tier
from kvstore_client.copying import Copier
from kvstore_client.fetch.fused import Sources
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.lookup.presence import Answer, ChainName
from kvstore_client.planes.prefix import Target
from kvstore_client.planes.shared_memory.chunk import Chunk
from kvstore_client.planes.shared_memory.resident import ResidentPrefix

if TYPE_CHECKING:
    from kvstore_client.planes.shared_memory.session import MappedSession

CHUNK_COUNT_MAX, HEADER_BYTES_MAX = 2048, 32 << 20
"""Limits of one session. A chunk takes as much as its header, some 10 KiB for 32 layers of 8 heads. The least recently
used chunks go first."""


class Known(NamedTuple):
    """A chunk, and the hash of its header's bytes when they were read."""

    chunk: Chunk
    header: int

    @property
    def is_as_it_was(self) -> bool:
        """True when the header is unchanged: memory that went bad there is not taken for the chunk."""
        return _hash_of_header(self.chunk) == self.header


class WarmChunks:
    """The chunks that one session has seen in memory. Safe to share between threads: an entry that another thread
    removed costs a call."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._known: dict[tuple[ChainName, bytes], Known] = {}
        self._header_bytes = 0
        self._is_over = False
        self.sources = Sources()

    def note(self, name: ChainName, digests: Sequence[bytes], chunks: Sequence[Chunk], chunk_tokens: int) -> None:
        """Remember the chunks that a fetch read; they are whole and committed."""
        seen = {
            (name, digests[chunk.token_start // chunk_tokens]): Known(chunk, _hash_of_header(chunk))
            for chunk in chunks[:CHUNK_COUNT_MAX]
        }
        with self._changing:
            if self._is_over:  # the session ended under the fetch: nobody would let go of its memory
                return
            for key, known in seen.items():
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
        found: list[Known] = []
        for number, digest in enumerate(digests):
            known = self._known.get((name, digest))
            if known is None or known.chunk.token_start != number * chunk_tokens:
                return None
            found.append(known)
        if not all(known.is_as_it_was for known in found):
            return None
        with self._changing:
            for digest, known in zip(digests, found, strict=True):
                if self._known.pop((name, digest), None) is not None:
                    self._known[name, digest] = known
        return [known.chunk for known in found]

    def clear(self) -> None:
        """Drop all chunks: the session ends, and its memory goes with the last known chunk."""
        with self._changing:
            self._is_over = True
            self._known.clear()
            self._header_bytes = 0
        self.sources.clear()


def _hash_of_header(chunk: Chunk) -> int:
    return xxhash.xxh3_64_intdigest(chunk.extents[0][: chunk.layout.header_bytes].data)


class WarmPrefix(ResidentPrefix):
    """A prefix that needed no call, and has no lease: its chunks may leave while they are copied."""

    is_leased = is_provisional = False
    tails, tail_lengths = (), b""

    def __init__(
        self, session: MappedSession, wanted: Wanted, chunks: list[Chunk], exactness: Exactness, reason: MissReason,
        on_used: Callable[[Sequence[Chunk]], None],
    ) -> None:  # fmt: skip
        super().__init__(session, wanted, exactness, Tier.DRAM, reason)
        self.chunks = chunks
        self._sources = session.warm.sources
        last = chunks[-1]
        self._stop = last.token_start + last.layout.token_count
        self.token_count = self._stop
        self._on_used = on_used

    def settle(self, bad: set[int]) -> int:
        """Settle as ``ResidentPrefix.settle`` does, and report the use of a prefix that came whole."""
        good = super().settle(bad)
        if good == self.token_count:
            self._on_used(self.chunks)
        return good

    def landing(
        self, target: Target, copier: Copier, faults: FaultPoints, bad: set[int], on_copied: Callable[[], None]
    ) -> NoReturn:
        raise AssertionError("what is taken layer by layer may take long: it has a lease")

    def received(self) -> NoReturn:
        raise AssertionError("what is read at leisure has a lease")

    def close(self) -> None:
        """Do nothing: it holds no lease."""

    cancel = abandon = close


def warm_prefix(
    session: MappedSession,
    wanted: Wanted,
    name: ChainName,
    digests: Sequence[bytes],
    seen: Answer,
    exactness: Exactness,
    on_used: Callable[[Sequence[Chunk]], None],
) -> WarmPrefix | None:
    """Return the prefix that a lookup has just shown, if all of it is in memory at known places. None where a call is
    needed. ``seen``: the presence table's answer for these digests. ``on_used`` gets the chunks of a prefix that came
    whole."""
    hits = seen.hit_count
    first = seen.runs[0] if seen.runs else None
    if first is None or first.state != ChunkState.HIT or first.tier != Tier.DRAM or first.count != hits:
        return None
    if wanted.hidden_layers or (seen.has_tails and hits < len(digests)):
        return None
    chunks = session.warm.of(name, digests[:hits], wanted.spec.chunk_tokens)
    if chunks is None:
        return None
    reason = MissReason.NONE if hits == len(digests) else MissReason(seen.runs[1].reason or MissReason.COLD)
    return WarmPrefix(session, wanted, chunks, exactness, reason, on_used)
