"""Chunks in mapped memory: copies them, and checks that the copies are good."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import call
from typing import Self

from kvstore.seams import FaultPoints
from kvstore.seams.fence import fence
from kvstore.spec import Exactness, MissReason, Tier
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.copying import CALL_BYTES, Copier
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.planes.prefix import Target
from kvstore_client.planes.shared_memory.chunk import Chunk, MappedRun, runs_of
from kvstore_client.planes.shared_memory.landing import MappedLanding
from kvstore_client.planes.shared_memory.mapped import MappedMemory

PIECE_BYTES, PIECES_MAX = 2 << 20, 32
"""Two threads share large fetches of torch's or numpy's in pieces: the last one is what a thread may wait for."""


class ResidentPrefix:
    """A prefix in mapped memory (``planes.prefix.Prefix``), whose ``chunks`` are all there from the beginning."""

    tails: Sequence[pb.PartialTail] = ()
    tail_lengths = b""

    def __init__(
        self, session: MappedMemory, wanted: Wanted, chunks: list[Chunk], exactness: Exactness, tier: Tier,
        reason: MissReason,
    ) -> None:  # fmt: skip
        self.session = session
        self.wanted = wanted
        self.exactness = exactness
        self.tier = tier
        self.reason = reason
        self.chunks = chunks
        self.token_count = self._stop = chunks[-1].token_start + chunks[-1].layout.token_count if chunks else 0
        self._generations = session.generations
        self._pool = session.pool_for(wanted)

    def runs(self, part: int) -> list[MappedRun]:
        """Return the chunks of one part, grouped for copying: the cache from the device that it goes to, where it is
        there."""
        chunks = [chunk for chunk in self.chunks if chunk.part == part]
        return runs_of(chunks if part or self._pool is None else [chunk.near or chunk for chunk in chunks])

    def copy_all(self, target: Target, copier: Copier, faults: FaultPoints, bad: set[int], timeout_s: float) -> None:
        """Copy every requested layer of the chunks in memory; two threads share large ones."""
        cache = self.runs(0)
        fused = None if self.wanted.hidden_layers else target.fused(cache)
        byte_count = self.wanted.byte_count(self.token_count)
        if fused is not None and not fused.by_torch:
            for piece in fused.pieces(faults, max(1, byte_count // CALL_BYTES)):
                piece()
            return
        if fused is not None:
            count = min(PIECES_MAX, max(2, byte_count // PIECE_BYTES))
            copier.share(call, fused.pieces(faults, count), byte_count, timeout_s)
            return
        work = [partial(target.copy_layer, each, cache, bad, faults) for each in range(len(self.wanted.layers))]
        for part, layer in enumerate(self.wanted.hidden_layers, start=1):
            work.append(partial(target.copy_hidden, layer, self.runs(part), bad))
        copier.share(call, work, byte_count, timeout_s)

    def landing(
        self, target: Target, copier: Copier, faults: FaultPoints, bad: set[int], on_copied: Callable[[], None]
    ) -> MappedLanding:
        """Copy the chunks in memory at once, layer by layer, and others as they land."""
        return MappedLanding(self, target, copier, faults, bad, on_copied)

    def advance(self) -> bool:
        """Return False: nothing is on its way."""
        return False

    def arrived(self, part: int, slab: int) -> list[Chunk] | None:
        """Return nothing: nothing was on its way."""
        return []

    def received(self) -> Self:
        """Return itself, once everything is in memory."""
        return self

    def cancel(self) -> None:
        """Do nothing: nothing is on its way."""

    abandon = cancel

    def settle(self, bad: set[int]) -> int:
        """Return the number of leading tokens whose copies are good: generations unchanged, no bad checksum (``bad``:
        ids of chunks). Sets ``reason`` when that is not all of them."""
        good, pool = self._stop, self._pool
        fence()  # the copies' loads come before the generations'
        for chunk in self.chunks:
            current = self._is_current(chunk.slot, chunk.generation)
            current = current and (pool is None or chunk.near is None or pool.is_current(chunk.near))
            if chunk.token_start < good and not (current and id(chunk) not in bad):
                good = chunk.token_start
                self.reason = MissReason.CORRUPT if current else MissReason.STALE
        return good

    def _is_current(self, slot: int, generation: int) -> bool:
        """Return True when all bytes read from a chunk before the last ``fence`` were the chunk's. A slot that does not
        exist has no chunk."""
        return slot < len(self._generations) and bool(self._generations[slot] == generation)
