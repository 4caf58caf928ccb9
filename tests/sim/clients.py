"""What clients do. Every answer is checked on the spot; every call ends in its time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from kvstore.controller import FetchResult, Fill, ReserveRequest, Resident, Session, StoreResult
from kvstore.errors import DataLoss, DeadlineExceeded, Exhausted, Internal, InvalidRequest, KVStoreError, Unavailable
from kvstore.spec import Durability, Exactness, MissReason, StoreState, Tier
from tests.presence.shown import answer, is_the_same
from tests.sim.judge import Judge
from tests.sim.knowledge import Knowledge
from tests.sim.life import DEADLINE_S, Life
from tests.sim.models import (
    KEYS,
    SPECS,
    STRANGERS,
    VALUE_LAYOUT,
    Chain,
    body,
    value_body,
    value_name,
    value_query,
)
from tests.sim.oracle import row_of, told
from tests.sim.warm import WarmReader

SETTLE_S = 40.0
OpCall = Callable[[], Awaitable[str]]
TOLERATED = (Exhausted, Unavailable, DeadlineExceeded)


class Client:
    """One client process, a session at a time."""

    def __init__(self, name: str, life: Life, chance: random.Random, known: Knowledge) -> None:
        self.name = name
        self._life = life
        self._chance = chance
        self._known = known
        self._controller = life.controller
        self._trace = life.trace
        self._judge = Judge(life)
        self.warm = WarmReader(life, random.Random(f"{life.seed} {name}"))
        self.session: Session = self._controller.open_session()
        self._leases: list[tuple[int, Chain, FetchResult]] = []
        self._tickets: list[tuple[bytes, Chain, tuple[Resident, ...]]] = []

    async def run(self, stopping: asyncio.Event) -> None:
        """Until told to stop; then give everything back."""
        try:
            while not stopping.is_set() and not self._life.is_over:
                await self._act(*self._drawn())
                await asyncio.sleep(self._chance.choice((0.0, 0.001, 0.01, 0.3)))
            await self._leave()
        except asyncio.CancelledError:
            if not self._life.is_over and not stopping.is_set():
                self._trace.fail(f"{self.name} was cancelled by nobody")
                self._life.over.set()
            raise
        except BaseException as error:
            if not self._life.is_over:
                self._trace.failure = self._trace.failure or error
                self._trace.add("FAILURE", f"{self.name}: {error!r}")
                self._life.over.set()

    def _drawn(self) -> tuple[str, float, OpCall]:
        chance, chain = self._chance, self._known.pick(self._chance)
        fresh, key = self._known.fresh(chance), chance.choice(KEYS)
        ops: list[tuple[int, str, float, OpCall]] = [
            (8, f"store {fresh}", 2.5 + 2 * DEADLINE_S + SETTLE_S, lambda: self._store(fresh)),
            (4, f"store {chain}", 2.5 + 2 * DEADLINE_S + SETTLE_S, lambda: self._store(chain)),
            (12, f"fetch {chain}", 2 * DEADLINE_S + 0.1, lambda: self.fetch(chain)),
            (4, f"lookup {chain}", 0.0001, lambda: self._lookup(chain)),
            (6, f"put {key}", 2 * DEADLINE_S + SETTLE_S + 2.5, lambda: self.put_value(key)),
            (5, f"get {key}", 2 * DEADLINE_S + 0.1, lambda: self.get_value(key)),
            (2, f"settle {chain}", SETTLE_S + 0.1, lambda: self._settle(chain)),
            (3, "release", 0.0001, self._release),
            (1, f"hold {chain}", 0.0001, lambda: self._hold(chain)),
            (2, "let go", 0.0001, self._let_go),
            (1, "die", DEADLINE_S + 0.1, lambda: self._die(chain)),
            (1, "register", 0.0001, self._register),
            (1, "idle", 20.0, self._idle),
        ]
        _, name, limit_s, call = chance.choices(ops, [op[0] for op in ops])[0]
        return name, limit_s, call

    async def _act(self, name: str, limit_s: float, call: OpCall) -> None:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        try:
            async with asyncio.timeout(limit_s + 1.0):
                outcome = await call()
        except TOLERATED as error:
            outcome = type(error).__name__
        except InvalidRequest as error:
            outcome = self._life.registered_again(error)
            self._trace.check(bool(outcome) or " ended" in error.message, f"{name}: {error}")
            outcome = outcome or "its reservation ended"
        except (Internal, DataLoss) as error:
            raise self._trace.fail(f"{name}: {error!r}") from error
        took_s = loop.time() - started_s
        self._trace.add(self.name, f"{name} -> {outcome} ({took_s:.6f} s)")
        self._trace.check(took_s <= limit_s, f"{name} took {took_s} s, at most {limit_s}")
        self._life.oracle.totals["calls"] += 1

    # ------------------------------------------------------------ store

    async def _store(self, chain: Chain) -> str:
        chance, session = self._chance, self.session
        cloud = self._life.cloud
        wanted = Durability.NONE if cloud is None else cloud.drawn_level()
        request = ReserveRequest(chain.query(), chain.token_digests, chain.tail, durability=wanted)
        result = await self._controller.reserve(session, request)
        way = chance.choices(("whole", "pieces", "partial", "abort", "leave"), (10, 4, 2, 1, 1))[0]
        if way == "leave":
            return "left reserved"
        await asyncio.sleep(chance.choice((0.0, 0.0, 0.002, 0.5)))
        if way == "abort":
            await self._controller.abort(session, result.reservation_id)
            return "aborted"
        fills, staging_id = self._stage(session, chain, result, whole=way != "partial")
        try:
            if way == "pieces" and fills:
                cut = chance.randrange(len(fills))
                at_once = chance.random() < 0.5
                await self._controller.fill(session, result.reservation_id, fills[:cut], at_once=at_once)
                await asyncio.sleep(chance.choice((0.0, 0.001)))
                fills = fills[cut:]
            done = await self._controller.commit(session, result.reservation_id, fills)
        finally:
            if staging_id and session.is_open:
                await self._close_staging(session, staging_id)
        self._known.chains.append(chain)
        return await self._committed(chain, done, way)

    async def _committed(self, chain: Chain, done: StoreResult, way: str) -> str:
        said = f"{way}: {done.committed_count} of {len(chain.digests)} {done.durability.name}"
        if not self._life.setup.is_write_through:
            for name in chain.names(done.committed_count):
                self._trace.check(row_of(self._life, name) is not None, f"{told(name)} is committed and not there")
        elif done.durability is Durability.LOCAL:
            self._life.oracle.claimed_local(self._life, chain.names(done.committed_count))
        if self._chance.random() < 0.5:
            said += ", " + await self._settle(chain)
        return said

    async def put(self, chain: Chain) -> Durability:
        """Store all of a chain and wait for the device. The level that all of it reached: NONE where not all fitted."""
        request = ReserveRequest(chain.query(), chain.token_digests, chain.tail)
        result = await self._controller.reserve(self.session, request)
        fills, staging_id = self._stage(self.session, chain, result, whole=True)
        await self._controller.commit(self.session, result.reservation_id, fills)
        if staging_id:
            await self._close_staging(self.session, staging_id)
        settled = await self._controller.settle(chain.query(), SETTLE_S)
        if settled.durability is Durability.LOCAL:
            self._life.oracle.claimed_local(self._life, chain.names(settled.chunk_count))
        return settled.durability if settled.chunk_count == len(chain.digests) else Durability.NONE

    def _stage(self, session: Session, chain: Chain, result: StoreResult, *, whole: bool) -> tuple[list[Fill], int]:
        """The wanted chunks in fresh staging, some cut in two; not ``whole``: without some of them."""
        chance = self._chance
        parts = [(index, layer) for index in range(len(chain.digests)) for layer in chain.layers]
        wanted = [number for number, state in enumerate(result.states) if state is StoreState.WANTED]
        if not wanted:
            return [], 0
        room = [chain.layout(*parts[number]).body_bytes for number in wanted]
        staging = self._controller.create_staging(session, sum(room))
        fills: list[Fill] = []
        at = 0
        for number, byte_count in zip(wanted, room, strict=True):
            layout = chain.layout(*parts[number])
            place = at
            for slab in body(chain.name(*parts[number]), layout):
                staging.mapping.bytes[place : place + slab.size] = slab
                place += slab.size
            cut = chance.randrange(layout.strip_count)
            runs = [(0, cut), (cut, layout.strip_count)] if cut else [(0, layout.strip_count)]
            for first, stop in runs:
                if whole or chance.random() < 0.7:
                    offset = at + int(layout.strip_offsets[first])
                    fills.append(Fill(number, first, stop - first, staging.staging_id, offset))
            at += byte_count
        return fills, staging.staging_id

    async def _close_staging(self, session: Session, staging_id: int) -> None:
        for _ in range(100):
            try:
                self._controller.close_staging(session, staging_id)
                return
            except InvalidRequest:
                await asyncio.sleep(0.01)
        raise self._trace.fail("staging stays busy")

    async def _settle(self, chain: Chain) -> str:
        timeout_s, cloud = self._chance.choice((0.1, 5.0, SETTLE_S)), self._life.cloud
        began_s = asyncio.get_running_loop().time()
        wanted = Durability.LOCAL if cloud is None else cloud.drawn_level()
        settled = await self._controller.settle(chain.query(), timeout_s, wanted)
        if cloud is not None and settled.chunk_count:
            self._life.oracle.claimed_beyond(cloud, settled, chain.whole(settled.chunk_count), began_s)
        if settled.durability is Durability.LOCAL:
            self._life.oracle.claimed_local(self._life, chain.names(settled.chunk_count))
        else:
            self._trace.check(settled.reason, f"{chain} is {settled.durability.name} for no reason")
        if settled.durability is not Durability.NONE:
            self._life.oracle.claimed_here(self._life, chain.names(settled.chunk_count))
        return f"{settled.chunk_count} {settled.durability.name} {settled.reason[:40]}"

    # ------------------------------------------------------------ fetch

    async def fetch(self, chain: Chain) -> str:
        if self._life.cloud is None:
            result = self._controller.fetches.fetch(self.session, chain.query())
        else:
            result = await self._controller.fetch_wide(self.session, chain.query())
        self._judge.check_extent(chain, result)
        await self.warm.note(chain, result)
        lost: set[int] = set()
        for position, chunk in enumerate(result.chunks):
            if chunk.loading is None:
                self._judge.check_bytes(self.session, chain, result, position, range(len(chunk.placement.pieces) - 1))
        cold = sum(chunk.loading is not None for chunk in result.chunks)
        if cold:
            lost = await self._arrived(chain, result)
        whole = 0
        for position in range(len(result.chunks)):
            if position not in lost and self._judge.check_bytes(self.session, chain, result, position, None):
                whole += 1
        self._life.oracle.totals["fetched"] += whole
        self._life.oracle.totals["promoted"] += cold - len(lost)
        if result.lease_id and self._chance.random() < 0.3:
            self._leases.append((result.lease_id, chain, result))
        else:
            self._controller.release(self.session, [result.lease_id])
        reason = result.reason.name
        return f"{result.hit_count} of {len(chain.digests)} {reason}, {cold} cold, {len(lost)} lost, {whole} whole"

    async def _arrived(self, chain: Chain, result: FetchResult) -> set[int]:
        """Take what lands, checking it as it does. Returns the positions that were lost."""
        chance, lost = self._chance, set()
        have = {position: 0 for position, chunk in enumerate(result.chunks) if chunk.loading}
        pauses = [chance.choice((0.0, 0.0, 0.0003, 4.0))] * 2  # more would take longer than the service may
        async for news in self._controller.arrivals(result, None):
            for arrival in news:
                position, landed = arrival.position, arrival.landed
                self._trace.check(landed & have[position] == have[position], "a slab landed and went")
                fresh = [slab for slab in range(landed.bit_length()) if landed >> slab & 1]
                if arrival.lost:
                    lost.add(position)
                self._judge.check_bytes(self.session, chain, result, position, fresh, is_lost=bool(arrival.lost))
                have[position] = landed
            if pauses and (pause_s := pauses.pop()):
                await asyncio.sleep(pause_s)
        for position, landed in have.items():
            slabs = len(result.chunks[position].placement.pieces) - 1
            self._trace.check(position in lost or landed == (1 << slabs) - 1, f"{chain}: arrivals ended early")
        return lost

    # ------------------------------------------------------------ values

    async def put_value(self, key: str) -> str:
        """In the place of what the key holds; some are given up half way."""
        chance, session, oracle = self._chance, self.session, self._life.oracle
        name, query = value_name(key), value_query(key)
        oracle.is_replaced(name)
        request = ReserveRequest(query, query.digests, replaces=query.digests)
        result = await self._controller.reserve(session, request)
        if list(result.states) != [StoreState.WANTED]:
            await self._controller.abort(session, result.reservation_id)
            return "no room"
        version = oracle.replaced(self._life, name)
        if chance.random() < 0.1:
            await self._controller.abort(session, result.reservation_id)
            return f"version {version} aborted"
        staging = self._controller.create_staging(session, VALUE_LAYOUT.body_bytes)
        staging.mapping.bytes[: VALUE_LAYOUT.body_bytes] = value_body(name, version)
        fill = Fill(0, 0, VALUE_LAYOUT.strip_count, staging.staging_id, 0)
        try:
            await self._controller.commit(session, result.reservation_id, [fill])
        finally:
            if session.is_open:
                await self._close_staging(session, staging.staging_id)
        if chance.random() < 0.4:
            return f"version {version}"
        settled = await self._controller.settle(query, chance.choice((0.1, SETTLE_S)))
        if settled.durability is Durability.LOCAL:
            oracle.claimed_local(self._life, [name])
        return f"version {version} {settled.durability.name}"

    async def get_value(self, key: str) -> str:
        oracle, name = self._life.oracle, value_name(key)
        oldest = oracle.oldest.get(name, 0)
        result = self._controller.fetches.fetch(self.session, value_query(key))
        lost = False
        async for news in self._controller.arrivals(result, None):
            lost |= any(arrival.lost for arrival in news)
        said = result.reason.name
        if result.chunks and not lost:
            chunk = result.chunks[0]
            place = chunk.placement.slot, chunk.placement.generation
            if self._judge.is_here(chunk) and place not in oracle.tainted:
                said = f"version {oracle.served(name, oldest, chunk.placement.pieces[1:])}"
        elif not result.chunks and result.reason not in (
            MissReason.OVERLOADED, MissReason.UNAVAILABLE, MissReason.CORRUPT,
        ):  # fmt: skip
            there = name in oracle.must and name not in oracle.hidden and self._life.nvme is not None
            self._trace.check(not there, f"{key} was acknowledged and misses: {said}")
        self._controller.release(self.session, [result.lease_id])
        return said

    # ------------------------------------------------------------ the rest

    async def _lookup(self, chain: Chain) -> str:
        result = self._controller.lookups.lookup(chain.query())
        self._trace.check(sum(run.chunk_count for run in result.runs) == len(chain.digests), "runs do not cover")
        if not chain.hidden and self._life.cloud is None:  # else clients call: what is not here may be elsewhere
            catalog, fingerprint = self._controller.parts.catalog, chain.query().fingerprint
            seen = answer(catalog, catalog.model(fingerprint).namespace(None, Exactness.EXACT), chain.digests)
            self._trace.check(is_the_same(seen, result), f"a client sees {seen}, a lookup says {result}")
        return f"{result.hit_count} of {len(chain.digests)}"

    async def _release(self) -> str:
        if not self._leases:
            return "nothing"
        lease_id, chain, result = self._leases.pop(self._chance.randrange(len(self._leases)))
        whole = 0
        for position, chunk in enumerate(result.chunks):
            if chunk.loading is None or (chunk.loading.is_done and not chunk.loading.lost):
                whole += self._judge.check_bytes(self.session, chain, result, position, None)
        self._controller.release(self.session, [lease_id])
        return f"{lease_id}, {whole} still whole"

    async def _hold(self, chain: Chain) -> str:
        result = self._controller.lookups.lookup(chain.query(), readers=1)
        if result.ticket:
            self._tickets.append((result.ticket, chain, self._controller.places(result.ticket)))
        return str(result.hit_count)

    async def _let_go(self) -> str:
        if not self._tickets:
            return "nothing"
        ticket, chain, places = self._tickets.pop()
        if not places:
            self._controller.release_ticket(ticket)
            return "a ticket"
        is_open = self._controller.tickets.find(ticket) is not None
        found = FetchResult(0, len(places), Tier.DRAM, MissReason.NONE, places, ())
        whole = sum(
            self._judge.check_bytes(self.session, chain, found, position, None, is_lost=not is_open)
            for position in range(len(places))
        )
        self._controller.copied(ticket)
        return f"a ticket, {whole} at their places"

    async def _register(self) -> str:
        if self._life.is_crowded:
            self._controller.register_model(self._chance.choice(STRANGERS))
            return "a stranger"
        for spec in SPECS:
            self._controller.register_model(spec)
        return "known"

    async def _idle(self) -> str:
        await asyncio.sleep(self._chance.choice((0.5, 3.0, 12.0)))
        return "idle"

    async def _die(self, chain: Chain) -> str:
        """In the middle of things."""
        session = self.session
        try:
            request = ReserveRequest(chain.query(), chain.token_digests, chain.tail)
            result = await self._controller.reserve(session, request)
            fills, _ = self._stage(session, chain, result, whole=True)
            filling = asyncio.get_running_loop().create_task(
                self._controller.fill(session, result.reservation_id, fills)
            )
            await asyncio.sleep(0)
            filling.cancel()
            self._controller.fetches.fetch(session, chain.query())
        except KVStoreError:
            pass
        self._leases.clear()
        self.warm.leave()
        await self._controller.close_session(session)
        self.session = self._controller.open_session()
        return "reborn"

    async def _leave(self) -> None:
        while self._tickets:
            await self._let_go()
        await self._act("leave", DEADLINE_S + 0.1, self._left)

    async def _left(self) -> str:
        self.warm.leave()
        await self._controller.close_session(self.session)
        return "closed"
