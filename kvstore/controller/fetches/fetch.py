"""The stored prefix of a chain, under a lease."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from kvstore.catalog import ROOT_ROW, Namespace, Walk
from kvstore.controller.fetches.lookup import namespaces_of, tails_after
from kvstore.controller.fetches.tickets import Tickets
from kvstore.controller.parts import Parts
from kvstore.controller.sessions import Session
from kvstore.controller.values import ChainQuery, FetchResult, Resident, UsedChain
from kvstore.errors import DataLoss, Exhausted, InvalidRequest, Unavailable
from kvstore.movement import Loading
from kvstore.seams import Deadline
from kvstore.spec import MissReason, Tier

TOLD_CHUNKS_MAX = 4096
"""Chunks that count as used from one packet of a client. The packet is only a hint, and walking more chunks would keep
other requests waiting."""
PLACES_MAX = 256
"""Extents of a ticket's chunks whose places are told; a chunk has one at least. To tell more would keep other requests
waiting, and the copies of more chunks take so long that a call is nothing."""
COUNTED_CHUNKS_MAX = 1 << 20
"""Chunks of one chain in one packet that are counted: a client may say any number, and counters have 64 bits."""


class Fetches:
    """Fetches of one tenant: a lease holds the chunks while their reader copies them, and movement brings in the chunks
    that memory lacks."""

    def __init__(self, parts: Parts, tickets: Tickets) -> None:
        self._parts = parts
        self._catalog = parts.catalog
        self._movement = parts.movement
        self._tickets = tickets

    async def redeem(
        self, session: Session, ticket_id: bytes, layers: tuple[int, ...], deadline: Deadline, *, on_device: bool
    ) -> FetchResult:
        """Fetch the prefix of a ticket. Raises InvalidRequest for a ticket that is not open; DataLoss when a chunk was
        lost after all, or is not in the shared tier that was said to have it; Exhausted when the chunks cannot be
        brought into memory now."""
        query = self._tickets.query(ticket_id)._replace(layers=layers, on_device=on_device)
        result = await self.fetch_wide(session, query, deadline)
        is_whole = result.hit_count == len(query.digests)
        if is_whole and self._tickets.find(ticket_id):
            self._tickets.redeemed(ticket_id)
            return result
        self._parts.leases.release(session, [result.lease_id])
        self._tickets.query(ticket_id)  # it may have ended while shared tiers were asked
        if result.reason in (MissReason.OVERLOADED, MissReason.UNAVAILABLE):
            raise Exhausted(f"the ticket's chunks cannot be brought into memory now: {result.reason.name}")
        raise DataLoss(f"a chunk of this ticket was lost: {result.reason.name}", reason=result.reason.name)

    async def fetch_wide(self, session: Session, query: ChainQuery, deadline: Deadline) -> FetchResult:
        """As ``fetch``; where the chain goes on beyond the node, ask the shared tiers, and bring in their chunks, too.
        Raises Unavailable when the session ends meanwhile."""
        if not self._movement.shared_tiers.tiers:
            return self.fetch(session, query)
        with self._catalog.use(query.fingerprint):
            return await self._fetch_wide(session, query, deadline)

    async def _fetch_wide(self, session: Session, query: ChainQuery, deadline: Deadline) -> FetchResult:
        shared = self._movement.shared_tiers
        spaces = namespaces_of(self._catalog, query)
        start = self._catalog.walk(spaces, query.digests).hit_count
        found, is_known = await shared.find(spaces, query.digests[start:], deadline.left_s)
        if not session.is_open:  # nobody could give back what it would lease
            raise Unavailable("the session ended while its fetch asked shared tiers")
        if not found:
            return _told(self.fetch(session, query), is_known=is_known)
        try:
            spaces = namespaces_of(self._catalog, query, for_store=True)
        except Exhausted:  # what others have finds no namespace here: a miss, and no failure of the fetch
            return self.fetch(session, query)
        walk = self._catalog.walk(spaces, query.digests)
        if walk.hit_count < start:  # some of the node's chunks left meanwhile: chunks after a gap are of no use
            return self._fetch(session, query, spaces, walk)
        more = shared.rows(spaces, query.digests, start, found)
        try:
            return _told(self._fetch(session, query, spaces, walk.onwards(start, more)), is_known=is_known)
        finally:
            shared.release(more)

    def fetch(self, session: Session, query: ChainQuery) -> FetchResult:
        """Lease the prefix that the node has; movement brings in the chunks that memory lacks.

        Raises Exhausted past limits.leased_bytes_max or lease_count_max.
        """
        spaces = namespaces_of(self._catalog, query)
        return self._fetch(session, query, spaces, self._catalog.walk(spaces, query.digests))

    def _fetch(self, session: Session, query: ChainQuery, spaces: Sequence[Namespace], walk: Walk) -> FetchResult:
        self._parts.counters.add("fetch_calls")
        chains, loadings, reason = self._bring_in(walk, frozenset(query.layers))
        count = len(chains[0])
        self._parts.counters.add("fetch_miss_chunks", len(query.digests) - count)
        tails, lengths = tails_after(self._catalog, spaces, query, count)
        if not count:
            return FetchResult(0, 0, Tier.NONE, reason, (), tails, lengths)
        chunks = tuple(self._residents(chains, loadings, on_device=query.on_device))
        byte_count = sum(chunk.placement.byte_count for chunk in chunks)
        lease = self._parts.leases.grant(session, tuple(row for chain in chains for row in chain), byte_count)
        device_count = sum(chunk.on_device is not None for chunk in chunks)
        self._account(spaces, chains, loadings, byte_count, device_count)
        if not (query.is_ahead or session.is_operator):
            self._note(spaces[0], chains[0])
        if query.on_device and self._movement.hbm is not None:
            self._movement.hbm.wants(chains[0])  # hidden states go to the client's own memory
        slowest = max((each.source for each in loadings.values()), key=lambda source: source.rank, default=None)
        tier = slowest.kind if slowest else Tier.HBM if device_count == len(chunks) else self._movement.memory.kind
        return FetchResult(lease.lease_id, count, tier, reason, chunks, tails, lengths)

    def places(self, ticket_id: bytes) -> tuple[Resident, ...]:
        """Return where the chunks of a ticket lie; nothing unless all of them are in memory, and few. A reader that
        maps them copies them without a call, and then says that it ``copied`` them."""
        ticket = self._tickets.find(ticket_id)
        if ticket is None or ticket.query.hidden_layers or len(ticket.rows) != len(ticket.query.digests):
            return ()
        if len(ticket.rows) > PLACES_MAX or not self._movement.memory.have_all(ticket.rows):
            return ()
        found = tuple(self._residents([ticket.rows], {}))
        return found if sum(len(each.placement.extents) for each in found) <= PLACES_MAX else ()

    def copied(self, ticket_id: bytes) -> None:
        """Count a reader that copied a ticket's chunks from their ``places``. A ticket that has ended counts no more:
        the chunks may have left since."""
        ticket = self._tickets.find(ticket_id)
        if ticket is None:
            return
        spaces = namespaces_of(self._catalog, ticket.query)
        if ticket.rows and self._catalog.walk(spaces, ticket.query.digests).chains == [list(ticket.rows)]:
            self._parts.counters.add("fetch_calls")
            self._account(spaces, [ticket.rows], {}, self._tickets.byte_count(ticket.rows))
            self._note(spaces[0], ticket.rows)
        self._tickets.redeemed(ticket_id)

    def _account(
        self, spaces: Sequence[Namespace], chains: Sequence[Sequence[int]], loadings: Mapping[int, Loading],
        byte_count: int, device_count: int = 0,
    ) -> None:  # fmt: skip
        """Count a fetch of these chains, one per part: for what leaves memory first, and in the counters, each part by
        kind and by tier. ``device_count``: the parts that it was given from the device."""
        for chain in chains:
            self._movement.used(chain)
        counters, memory, count = self._parts.counters, self._movement.memory.tier.name, len(chains[0])
        counters.add("fetch_bytes", byte_count)
        counters.add("fetch_hit_chunks", count)
        for space in spaces:
            counters.add(f"fetched_{space.kind.value}_chunks", count)
        for loading in loadings.values():
            counters.add_of(loading.source.name, "fetched_chunks")
        if self._movement.hbm is not None:
            counters.add_of(self._movement.hbm.tier.name, "fetched_chunks", device_count)
        counters.add_of(memory, "fetched_chunks", count * len(spaces) - len(loadings) - device_count)

    def _note(self, space: Namespace, chain: Sequence[int]) -> None:
        """Count a prefix that an engine fetched: its heat, and the tokens that were not computed. All of its chunks but
        the last are full."""
        table, last = self._catalog.table, chain[-1]
        self._parts.heat.add(space, table.digests[last])
        self._parts.served.add(space, (len(chain) - 1) * space.spec.chunk_tokens + table.token_counts[last])

    def used(self, queries: Iterable[UsedChain]) -> None:
        """Count chains that clients copied without a call as used, the last chain as the most recent. Chains that are
        not stored any more do not count. Past ``TOLD_CHUNKS_MAX`` chunks, policies do not hear of the first chains."""
        left, parents = TOLD_CHUNKS_MAX, self._catalog.table.parents
        chains: dict[int, list[int]] = {}
        for used in reversed(list(queries)):
            try:
                (space,) = namespaces_of(self._catalog, used.query)
            except InvalidRequest:  # a model that this server does not know any more
                continue
            last = row = space.index.get(used.query.digests[-1], ROOT_ROW)
            if row != ROOT_ROW and used.fetch_count:
                self._parts.heat.add(space, used.query.digests[-1], used.fetch_count)
                self._parts.served.add(space, used.token_count, used.fetch_count)
                count = min(-(-used.token_count // space.spec.chunk_tokens), COUNTED_CHUNKS_MAX)  # of all its fetches
                self._parts.counters.add(f"fetched_{space.kind.value}_chunks", count)
                self._parts.counters.add_of(self._movement.memory.tier.name, "fetched_chunks", count)
            if last in chains or not left:
                continue
            chain: list[int] = []
            while row != ROOT_ROW and left:  # what is walked counts, whatever comes of it
                chain.append(row)
                row, left = parents[row], left - 1
            if row == ROOT_ROW:
                chains[last] = chain[::-1]
        for chain in reversed(chains.values()):
            if chain:
                self._movement.used(chain)

    def _bring_in(self, walk: Walk, layers: frozenset[int]) -> tuple[list[list[int]], dict[int, Loading], MissReason]:
        """Have chunks that are not in memory brought in. Return the chains, cut before the first chunk that cannot be
        had now, the loadings under way by row, and why the chunk after them is missing."""
        if all(map(self._movement.memory.have_all, walk.chains)):
            return walk.chains, {}, walk.reason
        keep = frozenset(row for chain in walk.chains for row in chain)
        order = [row for chunk in zip(*walk.chains, strict=True) for row in chunk]
        found, reason = self._movement.loads.begin(order, keep, layers)
        whole = len(found) // len(walk.chains)
        brought = order[: whole * len(walk.chains)]  # behind them, some parts of a chunk come, and others do not
        loadings = {row: loading for row, loading in zip(brought, found, strict=False) if loading is not None}
        return [chain[:whole] for chain in walk.chains], loadings, reason or walk.reason

    def _residents(
        self, chains: Sequence[Sequence[int]], loadings: Mapping[int, Loading], *, on_device: bool = False
    ) -> Iterator[Resident]:
        table, hbm = self._catalog.table, self._movement.hbm if on_device else None
        for part, chain in enumerate(chains):
            for index, row in enumerate(chain):
                loading = loadings.get(row)
                placement = loading.placement if loading else self._movement.memory.placement(row)
                extent = hbm.extent(row) if hbm is not None and loading is None else None
                yield Resident(index, part, table.token_counts[row], placement, loading, extent)


def _told(result: FetchResult, *, is_known: bool) -> FetchResult:
    """Return a result whose next chunk is not called cold where a tier did not say (``is_known``) if it has it."""
    is_cold = result.reason is MissReason.COLD
    return replace(result, reason=MissReason.UNAVAILABLE) if is_cold and not is_known else result
