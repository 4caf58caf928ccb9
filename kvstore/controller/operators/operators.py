"""The front for operators: one method per request."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from functools import partial

from kvstore.catalog import Copies
from kvstore.controller.benefit import HotPrefix
from kvstore.controller.controller import Controller
from kvstore.controller.fetches.lookup import namespaces_of
from kvstore.controller.operators.changes import (
    BATCH_S_MAX,
    BROUGHT,
    IN_MEMORY,
    NO_ROOM,
    NO_SOURCE,
    STAYS,
    Changes,
)
from kvstore.controller.operators.drains import Drains
from kvstore.controller.operators.heartbeats import with_heartbeats, with_reports
from kvstore.controller.operators.listing import Listing, model_id_of
from kvstore.controller.operators.selection import MEMORY_NAMES, Chosen, no_such_tier, tier_names
from kvstore.controller.operators.showing import Showing
from kvstore.controller.operators.turns import Turns
from kvstore.controller.operators.values import ChangeNews, HotEntry, ListPage, Selection, ShownChunk, Tally
from kvstore.controller.parts import Parts
from kvstore.controller.sessions import Session
from kvstore.controller.values import ChainQuery
from kvstore.errors import InvalidRequest
from kvstore.movement import TierAccount, Transit, Writes
from kvstore.seams import Deadline
from kvstore.spec import MissReason

WALKED_AT_ONCE = 1024
"""Chunks of a prompt that are looked up in one step of the loop."""
LAND_S_MAX, LAND_STEP_S = 10.0, 0.05
"""Seconds that a drain waits at most for chunks that were on their way to its tier, and between two looks at them."""
NOT_STORED = "not stored"


class Operators:
    """Answers one tenant's operators. Every method runs on the event loop's thread. Methods raise InvalidRequest for a
    name that fits no model, tier or chunk, or more than one."""

    def __init__(self, parts: Parts, controller: Controller) -> None:
        self._parts = parts
        self._table = parts.catalog.table
        self._controller = controller
        self._started_s = parts.clock.monotonic()
        self._turns = Turns(parts.clock)
        self._listing = Listing(parts, self._turns)
        self._showing = Showing(parts, self._turns, self._listing)
        self._changes = Changes(parts, self._turns)
        self._drains = Drains(parts, controller.claims, controller.reservations, self._turns)

    @property
    def tenant(self) -> str:
        return self._parts.keys.tenant

    def tiers(self) -> list[TierAccount]:
        """Return the account of each tier in use, the fastest first."""
        return self._parts.movement.accounts()

    @property
    def absent(self) -> list[str]:
        """The reasons why configured tiers are not in use, or the service takes no stores."""
        return [*self._parts.movement.absent, *filter(None, [self._drains.problem])]

    def chunks(self, selection: Selection, limit: int) -> AsyncGenerator[ListPage]:
        """Give the first ``limit`` selected chunks, then the totals of all selected ones, by model and tier."""
        return with_heartbeats(self._listing.pages(self._chosen(selection), limit), ListPage())

    async def chunk(self, digest: str, remaining_s: float | None) -> ShownChunk:
        """Return all that is known of the one chunk whose digest begins with ``digest`` (hexadecimal). ``remaining_s``:
        seconds that the caller waits for the header, which is read from a tier."""
        return await self._showing.chunk(digest, self._parts.deadline(remaining_s))

    async def hottest(self, count: int) -> list[HotEntry]:
        """Return the ``count`` prefixes that were fetched most of late, in the order of ``Heat.hottest``."""
        turn = self._turns.begin()
        await turn.next()
        found = [self._hot(each) for each in self._parts.heat.hottest(count)]
        turn.end()
        return found

    def _hot(self, prefix: HotPrefix) -> HotEntry:
        space, fastest = self._parts.catalog.space_of(prefix.row), self._table.fastest(prefix.row)
        return HotEntry(
            prefix.above, self._table.digests[prefix.row], model_id_of(space), space.fingerprint, prefix.token_count,
            prefix.heat, prefix.own_heat, "" if fastest is None else fastest.tier.name,
        )  # fmt: skip

    # ------------------------------------------------------------ what changes something

    def evict(self, selection: Selection, *, dry_run: bool) -> AsyncGenerator[ChangeNews]:
        """Remove chunks from one local tier, or from all of them. See ``Changes.evict``."""
        only = None
        if selection.tier:
            only = self._local(selection.tier)
            if only is None:
                raise InvalidRequest(
                    f"{selection.tier}: other nodes use it, too, and this one knows only some of what is there: for S3 "
                    "use kvstore scan --delete; Redis drops what it needs room for"
                )
        chosen = self._chosen(selection)
        return with_reports(lambda tally: self._changes.evict(tally, chosen, only, dry_run=dry_run))

    def pin(self, selection: Selection, seconds: float, *, dry_run: bool) -> AsyncGenerator[ChangeNews]:
        """Keep chunks where they are for ``seconds``; 0: until they are unpinned, or the service ends. Raises Exhausted
        past limits.pin_bytes_max, and then pins none."""
        chosen = self._chosen(selection)
        return with_reports(lambda tally: self._changes.pin(tally, chosen, seconds, dry_run=dry_run))

    def unpin(self, selection: Selection, *, dry_run: bool) -> AsyncGenerator[ChangeNews]:
        """End pins. Raises InvalidRequest where the selection says more than names: tiers, ages, sizes or uses."""
        if selection != Selection(model=selection.model, digest=selection.digest, chain=selection.chain):
            raise InvalidRequest("pins end by model, digest or prompt: say no tier, age, size or count of uses")
        chosen = self._chosen(selection)
        return with_reports(lambda tally: self._changes.unpin(tally, chosen, dry_run=dry_run))

    def move(self, selection: Selection, tier: str, *, keep: bool, dry_run: bool) -> AsyncGenerator[ChangeNews]:
        """Bring chunks into memory, or write them to a slower tier and have the faster ones give them up; with ``keep``
        the faster ones keep their copies."""
        chosen, copies = self._chosen(selection), self._table.copies
        if tier in MEMORY_NAMES:
            return with_reports(lambda tally: self._changes.bring(tally, chosen, dry_run=dry_run))
        to = self._writes(tier)
        local = self._local(tier)
        leaving = copies if local is None else copies[: copies.index(local)]
        given_up = [] if keep else list(leaving)

        async def moved(tally: Tally) -> None:
            await self._parts.movement.shared_tiers.check(to.target.name)
            await self._changes.send(tally, chosen, [to], given_up, Transit.NOT_TAKEN, dry_run=dry_run)

        return with_reports(moved)

    def verify(self, selection: Selection, *, dry_run: bool) -> AsyncGenerator[ChangeNews]:
        """Read copies again and check every strip."""
        only = MEMORY_NAMES[1] if selection.tier in MEMORY_NAMES else selection.tier
        chosen = self._chosen(selection)
        return with_reports(lambda tally: self._changes.verify(tally, chosen, only, dry_run=dry_run))

    def drain(self, selection: Selection, *, end: bool, service: bool, dry_run: bool) -> AsyncGenerator[ChangeNews]:
        """Have a tier take no more chunks, and empty it into slower ones; ``service``: have the service take no more
        stores, and write all that waits, so that it can be stopped; ``end``: have it take chunks, or stores, again.
        Without either, wait until all tiers have written their backlogs."""
        drained = self._service_drained if service else self._drained
        return with_reports(partial(drained, selection=selection, end=end, dry_run=dry_run))

    async def _service_drained(self, tally: Tally, selection: Selection, *, end: bool, dry_run: bool) -> None:
        if selection != Selection():
            raise InvalidRequest("the service is drained as a whole: select nothing")
        if not end:
            await self._drains.stores(tally, dry_run=dry_run)
        elif not dry_run:
            self._drains.resume()

    async def _drained(self, tally: Tally, selection: Selection, *, end: bool, dry_run: bool) -> None:
        if selection != Selection(tier=selection.tier):
            raise InvalidRequest("a tier is drained of all that it has: name nothing but the tier")
        if not selection.tier:
            await self._drains.settle(tally, dry_run=dry_run)
            return
        to, local = self._writes(selection.tier), self._local(selection.tier)
        if not dry_run:
            to.resume() if end else to.drain()
        if end or local is None:
            return
        if not dry_run:
            until_s = self._parts.clock.monotonic() + LAND_S_MAX
            while to.backlog_count and self._parts.clock.monotonic() < until_s:  # chunks on their way there land
                await self._parts.clock.sleep(LAND_STEP_S)
        all_writes = self._parts.movement.all_writes
        slower = all_writes[all_writes.index(to) + 1 :]
        await self._changes.send(tally, self._chosen(selection), slower, [local], STAYS, dry_run=dry_run)

    def prefetch(self, session: Session, query: ChainQuery, *, dry_run: bool) -> AsyncGenerator[ChangeNews]:
        """Bring a chain's stored prefix into memory, as a fetch would, and give it back. It counts as a use for tiers
        and policies, but neither for heat nor as tokens not computed. Raises as a fetch does."""
        return with_reports(lambda tally: self._prefetched(tally, session, query, dry_run=dry_run))

    async def _prefetched(self, tally: Tally, session: Session, query: ChainQuery, *, dry_run: bool) -> None:
        tally.total_count = len(query.digests)
        model = self._parts.catalog.model(query.fingerprint)
        space = model.seen(None, query.exactness, query.provenance)
        size = space.known_bytes(model.spec.chunk_tokens)
        row = space.index.get(query.digests[-1]) if query.digests else None
        last = space.known_bytes(self._table.token_counts[row]) if row is not None else size  # a partial chunk is known
        if dry_run:
            there, stored, absent = await self._found(query)
            room = self._parts.arena.capacity_bytes // max(1, size)  # 0: too large a chunk, and nothing is stored
            brought = max(0, min(stored, room) - there)
            is_last_there = row is not None and self._parts.movement.memory.have_all([row])
            fate = IN_MEMORY if is_last_there else BROUGHT if there + brought == stored else NO_ROOM
            counts = {IN_MEMORY: there, BROUGHT: brought, NO_ROOM: stored - there - brought}
        else:
            clock = self._parts.clock
            deadline = Deadline.of(clock, None, BATCH_S_MAX)
            result = await self._controller.fetch_wide(session, query._replace(is_ahead=True), deadline)
            try:
                async for _ in self._controller.arrivals(result, deadline):
                    pass  # until all have landed, or were lost
            finally:
                self._controller.release(session, [result.lease_id])
            coming = [chunk.loading for chunk in result.chunks if chunk.loading is not None]
            landed = sum(each.has_landed for each in coming)
            stored, absent = result.hit_count, NO_SOURCE if result.reason is MissReason.UNAVAILABLE else NOT_STORED
            if result.reason is MissReason.OVERLOADED:  # more of it is stored than memory has room for
                _, found, absent = await self._found(query)
                stored = max(stored, found)
            fate = NO_ROOM
            if result.chunks and result.hit_count == stored:
                load = result.chunks[-1].loading
                fate = IN_MEMORY if load is None else BROUGHT if load.has_landed else Transit.FAILED
            counts = {IN_MEMORY: len(result.chunks) - len(coming), BROUGHT: landed}
            counts |= {NO_ROOM: stored - result.hit_count, Transit.FAILED: len(coming) - landed}
            if landed < len(coming):
                tally.problem = "a tier did not give all: see the service's log"
        counts[absent] = len(query.digests) - stored
        _count(tally, counts, size, last, fate if stored == len(query.digests) else absent)
        tally.done_count = tally.total_count

    async def _found(self, query: ChainQuery) -> tuple[int, int, str]:
        """Count the chunks of a stored prefix that memory has, and all of its chunks; return also the word for the
        chunks behind it. This is no lookup: a lookup would count as a use, and after a use tiers may want the
        chunks."""
        catalog, movement, turn = self._parts.catalog, self._parts.movement, self._turns.begin()
        spaces = namespaces_of(catalog, query)
        there = hits = 0
        for start in range(0, len(query.digests), WALKED_AT_ONCE):
            await turn.next()
            found = catalog.walk(spaces, query.digests[start : start + WALKED_AT_ONCE])
            hits += found.hit_count
            there += sum(movement.memory.have_all(chunk) for chunk in zip(*found.chains, strict=True))
            if hits < min(start + WALKED_AT_ONCE, len(query.digests)):
                break
        turn.end()
        more = await movement.shared_tiers.find(spaces, query.digests[hits:], self._parts.deadline(None).left_s)
        return there, hits + len(more.chunks), NOT_STORED if more.is_known else NO_SOURCE

    def _local(self, name: str) -> Copies | None:
        """Return a local tier's copies; None for a shared tier. Raises InvalidRequest for a tier that is not in use."""
        wanted = MEMORY_NAMES[1] if name in MEMORY_NAMES else name
        for copies in self._table.copies:
            if copies.tier.name == wanted:
                return copies
        if wanted not in tier_names(self._parts):
            raise no_such_tier(self._parts, name)
        return None

    def _writes(self, name: str) -> Writes:
        """Return the writes to a tier below memory. Raises InvalidRequest for memory, and for a tier not in use."""
        if name in MEMORY_NAMES:
            raise InvalidRequest("memory cannot be drained: all that is stored comes there first")
        found = next((each for each in self._parts.movement.all_writes if each.target.name == name), None)
        if found is None:
            raise no_such_tier(self._parts, name)
        return found

    def _chosen(self, selection: Selection) -> Chosen:
        return Chosen(self._parts, selection, self._parts.clock.monotonic() - self._started_s)


def _count(tally: Tally, counts: Mapping[str, int], size: int, last: int, fate_of_last: str) -> None:
    """Count the outcomes for a chain, whose chunks count ``size`` bytes each, and the last one ``last``."""
    for what, count in counts.items():
        tally.add(what, count * size - (size - last if what == fate_of_last else 0), count)
