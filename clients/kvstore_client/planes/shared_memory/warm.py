"""Fetches without a call: reuses the places of chunks that earlier fetches found in memory.

A chunk keeps its place in the sidecar's memory, and the slot and value of its generation, until it leaves; then the
generation changes before anything else does. So a chunk is still where an earlier fetch read it, if the presence table
says that memory has it and its header is unchanged. It is copied without a lease, and the copy counts only if the
generation is unchanged after it. Where a check fails, a call decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from kvstore.seams import FaultPoints
from kvstore.spec import ChunkState, Exactness, MissReason, Tier
from kvstore_client.copying import Copier
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.lookup.presence import ChainName, LookupAnswer
from kvstore_client.planes.prefix import Target
from kvstore_client.planes.shared_memory.chunk import Chunk
from kvstore_client.planes.shared_memory.mapped import MappedMemory
from kvstore_client.planes.shared_memory.resident import ResidentPrefix
from kvstore_client.prompt import EXACTNESSES


class WarmPrefix(ResidentPrefix):
    """A prefix that needed no call, and has no lease: its chunks may leave while they are copied."""

    is_leased = is_provisional = False

    def __init__(
        self, session: MappedMemory, wanted: Wanted, chunks: list[Chunk], exactness: Exactness, tier: Tier,
        reason: MissReason, on_used: Callable[[Sequence[Chunk]], None],
    ) -> None:  # fmt: skip
        super().__init__(session, wanted, chunks, exactness, tier, reason)
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


def warm_prefix(
    session: MappedMemory,
    wanted: Wanted,
    name: ChainName,
    digests: Sequence[bytes],
    seen: LookupAnswer,
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
    is_near = session.pool_for(wanted) is not None
    if is_near and not all(chunk.near for chunk in chunks):  # a call says what lies on the device by now
        return None
    tier = Tier.HBM if is_near else Tier.DRAM
    reason = MissReason.NONE if hits == len(digests) else MissReason(seen.runs[1].reason or MissReason.COLD)
    return WarmPrefix(session, wanted, chunks, EXACTNESSES[name.exactness], tier, reason, on_used)
