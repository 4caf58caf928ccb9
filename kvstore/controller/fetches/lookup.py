"""Lookups: the length and the places of a chain's stored prefix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from kvstore.catalog import Catalog, ChainRun, Namespace, Walk, absent_runs, joined_runs
from kvstore.controller.fetches.tickets import Tickets
from kvstore.controller.parts import Parts
from kvstore.controller.values import ChainQuery, LookupResult, Tail
from kvstore.errors import InvalidRequest
from kvstore.keys import ROOT_DIGEST
from kvstore.movement import Beyond, ChunkHint
from kvstore.seams import Deadline, Pauses
from kvstore.spec import ChunkState, Encoding, MissReason

STEP_CHUNKS = 4096
"""Chunks of a chain, times their parts, that are walked between two pauses."""


def _unavailable(run: ChainRun) -> ChainRun:
    """Return a run of cold misses as one of which a tier did not say if it has them; any other run as it is."""
    return run._replace(reason=MissReason.UNAVAILABLE) if run.reason is MissReason.COLD else run


def namespaces_of(catalog: Catalog, query: ChainQuery, *, for_store: bool = False) -> list[Namespace]:
    """Return the namespaces that a query's chunks must be in, one per part. Only a store makes a missing namespace.
    Raises InvalidRequest for an unknown model or layer; Exhausted past limits.namespace_count_max."""
    model = catalog.model(query.fingerprint)
    layers: list[int | None] = [] if query.hidden_only else [None]
    layers.extend(query.hidden_layers)
    if not layers:
        raise InvalidRequest("hidden_only without hidden_layers asks for nothing")
    if len(set(layers)) != len(layers):
        raise InvalidRequest("hidden_layers names a layer twice")
    if not for_store:
        return [model.seen(layer, query.exactness, query.provenance) for layer in layers]
    found: list[Namespace] = []
    for layer in layers:
        found.append(model.namespace(layer, query.exactness, query.provenance, found))
    return found


def tails_after(
    catalog: Catalog, spaces: Sequence[Namespace], query: ChainQuery, hit_count: int
) -> tuple[tuple[Tail, ...], int]:
    """Return the partial chunks after the last hit. Where there are too many to name, return some, and as a bitmap the
    lengths of all; else the bitmap is 0."""
    parent = query.digests[hit_count - 1] if hit_count else ROOT_DIGEST
    found, table = catalog.tails(spaces, parent), catalog.table
    return tuple(Tail(table.token_counts[row], table.digests[row]) for row in found.rows), found.lengths


def cut_runs(runs: Sequence[ChainRun], start: int, stop: int | None = None) -> Iterator[ChainRun]:
    """Give the runs of the chunks ``start`` to ``stop`` (exclusive; None: to the end), cut at both ends."""
    first = 0
    for run in runs:
        last = first + run.chunk_count
        count = (last if stop is None else min(last, stop)) - max(first, start)
        if count > 0:
            yield run._replace(chunk_count=count)
        first = last


class Lookups:
    """Lookups of one tenant. A lookup counts as a use of its hits: shared tiers may get or keep them for that. It holds
    them only where a ticket is asked for."""

    def __init__(self, parts: Parts, tickets: Tickets) -> None:
        self._parts = parts
        self._catalog = parts.catalog
        self._tickets = tickets

    def lookup(self, query: ChainQuery, readers: int = 0) -> LookupResult:
        """Return how far the node has a chain. With ``readers`` a ticket holds the hits for so many fetches."""
        spaces = namespaces_of(self._catalog, query)
        return self._found(query, spaces, self._catalog.walk(spaces, query.digests), readers)

    def _found(self, query: ChainQuery, spaces: Sequence[Namespace], walk: Walk, readers: int) -> LookupResult:
        """Count the uses that a walk shows, and return its result."""
        for chain in walk.chains:
            self._parts.movement.uses.count(chain)
        self._parts.counters.add("lookup_hit_chunks", walk.hit_count)
        self._parts.counters.add("lookup_miss_chunks", len(query.digests) - walk.hit_count)
        tails, lengths = tails_after(self._catalog, spaces, query, walk.hit_count)
        return self._held(query, LookupResult(walk.hit_count, walk.runs, tails, lengths), walk.chains, readers)

    def held(self, query: ChainQuery, readers: int) -> LookupResult:
        """Issue a ticket for a chain that is all hits. It holds the chunks that the node has; shared tiers are said to
        have the others. Raises as ``Tickets.issue``."""
        spaces = namespaces_of(self._catalog, query)
        walk = self._catalog.walk(spaces, query.digests)
        return self._held(query, LookupResult(len(query.digests), walk.runs, ()), walk.chains, readers)

    def _held(
        self, query: ChainQuery, found: LookupResult, chains: Sequence[Sequence[int]], readers: int
    ) -> LookupResult:
        """Return ``found``, with a ticket for all hits if there are ``readers``. The ticket holds the rows of
        ``chains``, which are the hits that the node has."""
        if not readers or not found.hit_count:
            return found
        held = query._replace(digests=query.digests[: found.hit_count])
        rows = tuple(row for chain in chains for row in chain)
        ticket = self._tickets.issue(held, rows, readers)
        return found._replace(ticket=ticket.ticket_id, ticket_s=self._parts.limits.ticket_age_s_max)

    async def lookup_long(self, query: ChainQuery, readers: int = 0) -> LookupResult:
        """As ``lookup``, in steps where the chain is long."""
        if len(query.digests) * (len(query.hidden_layers) + 1) <= STEP_CHUNKS:
            return self.lookup(query, readers)
        return await self.in_steps(query, readers, self._parts.long_work.begin())

    async def lookup_wide(self, query: ChainQuery, readers: int, deadline: Deadline) -> LookupResult:
        """As ``lookup_long``; where the chain goes on beyond the node, ask the shared tiers. A chunk that they are said
        to have is a hit of their tier: only the fetch shows whether it is there. A ticket cannot hold it."""
        if not self._parts.movement.shared_tiers.tiers:
            return await self.lookup_long(query, readers)
        with self._catalog.use(query.fingerprint):
            return await self._lookup_wide(query, readers, deadline)

    async def _lookup_wide(self, query: ChainQuery, readers: int, deadline: Deadline) -> LookupResult:
        shared = self._parts.movement.shared_tiers
        found = await self.lookup_long(query)
        here_count = found.hit_count
        spaces = namespaces_of(self._catalog, query)
        more = await shared.find(spaces, query.digests[found.hit_count :], deadline.left_s)
        found = self._onwards(query, spaces, found, more)
        if not readers:
            return found
        walk = self._catalog.walk(spaces, query.digests[: found.hit_count])
        if walk.hit_count < here_count:  # some of it left meanwhile: a ticket is for what is here
            return await self.lookup_long(query, readers)
        return self._held(query, found, walk.chains, readers)

    async def segments(self, queries: Sequence[ChainQuery], deadline: Deadline) -> list[LookupResult]:
        """Look each chain up by itself, here and in the shared tiers, which are asked once for all chains."""
        pauses, shared = self._parts.long_work.begin(), self._parts.movement.shared_tiers
        found = [await self.in_steps(query, 0, pauses) for query in queries]
        if not shared.tiers:
            return found
        spaces = [namespaces_of(self._catalog, query) for query in queries]
        chains = [
            (each, query.digests[here.hit_count :]) for each, query, here in zip(spaces, queries, found, strict=True)
        ]
        more = await shared.find_all(chains, deadline.left_s)
        return list(map(self._onwards, queries, spaces, found, more))

    def _onwards(
        self, query: ChainQuery, spaces: Sequence[Namespace], found: LookupResult, beyond: Beyond
    ) -> LookupResult:
        """Return the node's hits ``found``, followed by the chunks that shared tiers are said to have. Where one did
        not answer, the misses behind them are not cold."""
        more = beyond.chunks
        if not beyond.is_known:
            found = found._replace(runs=tuple(map(_unavailable, found.runs)))
        if not more:
            return found
        self._parts.counters.add("lookup_hinted_chunks", len(more))
        start, hits = found.hit_count, found.hit_count + len(more)
        hinted: list[ChainRun] = []
        for where, alike in groupby(more):
            stop = start + sum(1 for _ in alike)
            hinted += self._hinted(spaces, query.digests[start:stop], where)
            start = stop
        runs = joined_runs((*cut_runs(found.runs, 0, found.hit_count), *hinted, *cut_runs(found.runs, hits)))
        return LookupResult(hits, tuple(runs), *tails_after(self._catalog, spaces, query, hits))

    def _hinted(self, spaces: Sequence[Namespace], digests: Sequence[bytes], where: ChunkHint) -> list[ChainRun]:
        """Return the runs of hinted chunks. Where the hint names no tier, the node has the chunks itself, behind a
        gap."""
        if where.kind is None:
            return [self._catalog.walk(spaces, [digest]).runs[0] for digest in digests]
        return [ChainRun(len(digests), ChunkState.HIT, MissReason.NONE, where.kind, Encoding.NONE)]

    async def in_steps(self, query: ChainQuery, readers: int, pauses: Pauses) -> LookupResult:
        """As ``lookup``, in steps between which others are answered: a long chain takes long to walk. A chunk that
        leaves meanwhile is a miss; a chunk that comes meanwhile may be a miss."""
        with self._catalog.use(query.fingerprint):
            return await self._in_steps(query, readers, pauses)

    async def _in_steps(self, query: ChainQuery, readers: int, pauses: Pauses) -> LookupResult:
        catalog, spaces = self._catalog, namespaces_of(self._catalog, query)
        step, withdrawn_count = max(1, STEP_CHUNKS // len(spaces)), catalog.withdrawn_count
        hits, runs = 0, list[ChainRun]()
        chains: list[list[int]] = [[] for _ in spaces]
        for start in range(0, len(query.digests), step):
            digests = query.digests[start : start + step]
            if hits == start:
                walk = catalog.walk(spaces, digests)
                hits += walk.hit_count
                runs += walk.runs
                for chain, rows in zip(chains, walk.chains, strict=True):
                    chain += rows
            else:
                runs += absent_runs(spaces, digests)
            await pauses.between()
        if catalog.withdrawn_count == withdrawn_count:
            return self._found(query, spaces, Walk(hits, tuple(joined_runs(runs)), chains), readers)
        again = catalog.walk(spaces, query.digests[:hits])  # rows of chunks that left may be others' by now
        return self._found(
            query, spaces, again._replace(runs=tuple(joined_runs((*again.runs, *cut_runs(runs, hits))))), readers
        )

    async def first_stored(self, query: ChainQuery, digests: Sequence[bytes], pauses: Pauses) -> int:
        """Return the position, from 1 on, of the first of ``digests`` that all parts of the query have, whatever comes
        before it in a chain; 0: none."""
        spaces = namespaces_of(self._catalog, query)
        step = max(1, STEP_CHUNKS // len(spaces))
        for start in range(0, len(digests), step):
            found = self._catalog.first_of(spaces, digests[start : start + step])
            if found:
                return start + found
            await pauses.between()
        return 0

    def stored(self, query: ChainQuery) -> list[list[int]]:
        """Return the rows of the stored prefix, one chain per part of the query."""
        return self._catalog.walk(namespaces_of(self._catalog, query), query.digests).chains
