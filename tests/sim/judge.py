"""What clients may be told: as far as was promised, the right bytes, and gone only for a cause."""

from __future__ import annotations

from kvstore.chunk import parse_header
from kvstore.controller import FetchResult, Session
from kvstore.controller.fetches.lookup import namespaces_of
from kvstore.controller.values import Resident
from kvstore.spec import MissReason
from tests.sim.life import Life
from tests.sim.models import (
    Chain,
    body,
)
from tests.sim.oracle import row_of, told


class Judge:
    """Holds what a life's service says and shows against what must be there."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._trace = life.trace

    def check_extent(self, chain: Chain, result: FetchResult) -> None:
        """A chain ends where it was asked to, or where something is gone for a reason."""
        count = result.hit_count
        self._trace.check(len(result.chunks) == count * len(chain.layers), "a fetch with chunks missing")
        if count == len(chain.digests):
            return
        self._trace.check(result.reason is not MissReason.NONE, f"{chain} misses for no reason")
        if result.reason not in (MissReason.OVERLOADED, MissReason.CORRUPT) and not self._did_not_come(chain, result):
            names = [chain.name(count, layer) for layer in chain.layers]
            oracle = self._life.oracle
            gone = any(name not in oracle.must or name in oracle.hidden for name in names) or self._life.nvme is None
            self._trace.check(gone, f"{chain} misses chunk {count}, which was acknowledged: {result.reason.name}")

    def _did_not_come(self, chain: Chain, result: FetchResult) -> bool:
        """True when a chunk that the node knows could not be had, perhaps behind one that a shared tier gives.
        UNAVAILABLE is no excuse for one that it does not know: a miss is called so as long as a shared tier fails."""
        catalog, query = self._life.parts.catalog, chain.query()
        walk = catalog.walk(namespaces_of(catalog, query), query.digests)
        rows = [row_of(self._life, chain.name(result.hit_count, layer)) for layer in chain.layers]
        is_unknown = walk.hit_count <= result.hit_count and walk.reason is MissReason.COLD and None in rows
        return result.reason is MissReason.UNAVAILABLE and not is_unknown

    def check_bytes(
        self,
        session: Session,
        chain: Chain,
        result: FetchResult,
        position: int,
        slabs: range | list[int] | None,
        *,
        is_lost: bool = False,
    ) -> bool:
        """The bytes of these slabs are the chunk's; None: all, and the header. False when the generation says that
        the chunk has gone, for which there is a cause."""
        chunk = result.chunks[position]
        layer = chain.layers[chunk.part]
        name, layout = chain.name(chunk.chain_index, layer), chain.layout(chunk.chain_index, layer)
        place = chunk.placement.slot, chunk.placement.generation
        if not self.is_here(chunk):
            revoked = result.lease_id and result.lease_id not in self._life.parts.leases.of(session)
            known = is_lost or revoked or place in self._life.oracle.gone
            self._trace.check(known, f"{told(name)} went from under its lease")
            return False
        if place in self._life.oracle.tainted:
            return False
        expected = body(name, layout)
        for slab in range(len(expected)) if slabs is None else slabs:
            same = (chunk.placement.pieces[1 + slab] == expected[slab]).all()
            self._trace.check(same, f"{told(name)} slab {slab} has other bytes")
        if slabs is None:
            digest = parse_header(chunk.placement.pieces[0], layout).chain_digest
            self._trace.check(digest == name[1], f"{told(name)} has another chunk's header")
        return True

    def is_here(self, chunk: Resident) -> bool:
        return int(self._life.arena._values[chunk.placement.slot]) == chunk.placement.generation
