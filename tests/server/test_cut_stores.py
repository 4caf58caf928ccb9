"""Stores that are cut short: each step of one is cancelled in each turn of the event loop, from its start to its end.
It ends as cancelled, and leaves nothing that its client could not give back; then the chain can be stored."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvstore.seams import pauses
from kvstore.server.render import parse_fills
from kvstore.spec import Durability
from kvstore.v1 import cache_pb2 as pb
from tests.server.cut_short import SEED, Bench, CutShort, Scenario, cut_in_each_turn, fresh
from tests.sim.life import KIB
from tests.sim.models import NARROW, VALUE_LAYOUT, Chain, value_body, value_name, value_query
from tests.simulated import SimulatedDisk, simulate

STALL_S = 0.003
"""Seconds that the device takes for a write where memory has no room meanwhile."""
ROOM_BYTES = 7 * 12 * KIB
"""Room for KEPT and for a chain of 5 chunks."""
LEFT = tuple(Chain(NARROW, (600 + number,)) for number in range(24))
"""A chain for each turn of a reservation that has copies proven."""


async def reserve(bench: Bench, cut: CutShort) -> None:
    await reserves(bench, cut, fresh(cut))


async def reserve_behind_what_a_crash_left(bench: Bench, cut: CutShort) -> None:
    """Its first chunk is proven, before the others are stored on it."""
    await reserves(bench, cut, Chain(NARROW, (*LEFT[cut.number].path, 1)))


async def reserve_that_waits_for_room(bench: Bench, cut: CutShort) -> None:
    await is_full(bench, Chain(NARROW, (400 + cut.number, *range(4))), STALL_S)
    await reserves(bench, cut, fresh(cut, 4))


async def is_full(bench: Bench, filler: Chain, stall_s: float) -> None:
    """Fill memory with chunks that are on their way to the device, which takes so long."""
    bench.life.writers.stall_s = stall_s
    reserved = await bench.reserve(filler)
    await commits(bench, reserved, bench.staged(filler, reserved))
    bench.free_staging()


async def reserves(bench: Bench, cut: CutShort, chain: Chain) -> None:
    reply = await cut(bench.reserve(chain))
    if reply is not None:
        await aborts(bench, reply)
    assert not bench.controller.reservations.of(bench.session), "a reservation that its client does not know"
    bench.life.writers.stall_s = 0.0
    await bench.balanced()  # shared tiers, which take their time, have all of it
    await bench.put(chain)
    await bench.reads(chain)


async def fill(bench: Bench, cut: CutShort) -> None:
    chain = fresh(cut)
    reserved = await bench.reserve(chain)
    fills = bench.staged(chain, reserved)
    await cut(bench.store(fill=pb.FillStrips(reservation_id=reserved.reservation_id, fills=fills)))
    await ends(bench, reserved, chain)


async def commit(bench: Bench, cut: CutShort) -> None:
    chain = fresh(cut)
    reserved = await bench.reserve(chain)
    fills = bench.staged(chain, reserved)
    await cut(commits(bench, reserved, fills))
    await ends(bench, reserved, chain)


async def filled(bench: Bench, chain: Chain) -> tuple[Any, asyncio.Future[Any]]:
    """Begin a store and its fills. Return the reservation, and the call that moves the bytes."""
    reserved = await bench.reserve(chain)
    fills = bench.staged(chain, reserved)
    filling = asyncio.ensure_future(
        bench.store(fill=pb.FillStrips(reservation_id=reserved.reservation_id, fills=fills))
    )
    await asyncio.sleep(0)
    return reserved, filling


async def commit_that_goes_on(bench: Bench, cut: CutShort) -> None:
    """A commit of a store whose fills have begun is made again."""
    chain = fresh(cut)
    reserved, filling = await filled(bench, chain)
    await cut(commits(bench, reserved))
    await asyncio.wait([filling])
    if bench.controller.reservations.of(bench.session):
        done = await commits(bench, reserved)
        assert done.committed_count == len(chain.digests)
    bench.free_staging()
    await bench.reads(chain)


async def commit_of_the_last_shard(bench: Bench, cut: CutShort) -> None:
    """It waits for another store of the first chunk, and is made again; a writer that goes ends the store for all."""
    chain = fresh(cut)
    begun = Chain(NARROW, chain.path[:1])
    ahead = await bench.reserve(begun)
    reserved = await bench.reserve(chain, shards=2)
    fills = bench.staged(chain, reserved)
    await bench.store(fill=pb.FillStrips(reservation_id=reserved.reservation_id, fills=fills))
    first = asyncio.ensure_future(commits(bench, reserved))
    other = asyncio.ensure_future(commits(bench, ahead, bench.staged(begun, ahead)))
    await cut(commits(bench, reserved, shard=1))
    is_made_again = bool(cut.number % 2 and bench.controller.reservations.of(bench.session))
    if is_made_again:
        assert (await commits(bench, reserved, shard=1)).committed_count == len(chain.digests)
    else:
        await aborts(bench, reserved)
    assert (await first).committed_count >= is_made_again * len(chain.digests)
    assert (await other).committed_count == 1
    await ends(bench, reserved, chain)


async def commit_of_the_first_shard(bench: Bench, cut: CutShort) -> None:
    """The other writer comes later, and hears of it that there is nothing to be written any more."""
    chain = fresh(cut)
    reserved = await bench.reserve(chain, shards=2)
    fills = bench.staged(chain, reserved)

    async def last() -> None:
        await asyncio.sleep(0.003)
        if bench.controller.reservations.of(bench.session):
            try:
                await commits(bench, reserved, fills[1:], shard=1)
            except AssertionError as error:  # as its caller hears it: the first writer went while it published
                if "ended while it was committed" not in str(error):
                    raise

    other = asyncio.ensure_future(last())
    await cut(commits(bench, reserved, fills[:1]))
    if not other.done():
        await aborts(bench, reserved)
    await other
    await ends(bench, reserved, chain)


async def commit_that_waits_for_another_store(bench: Bench, cut: CutShort) -> None:
    chain = fresh(cut)
    first = await bench.reserve(chain)
    second = await bench.reserve(chain)
    other = asyncio.ensure_future(commits(bench, first, bench.staged(chain, first)))
    await cut(commits(bench, second))
    assert (await other).committed_count == len(chain.digests), "the other store is no matter of this client's"
    await ends(bench, second, chain)


async def abort(bench: Bench, cut: CutShort) -> None:
    """A store is given up whose bytes are being moved."""
    chain = fresh(cut)
    reserved, filling = await filled(bench, chain)
    await cut(aborts(bench, reserved))
    await asyncio.wait([filling])
    await ends(bench, reserved, chain)


async def commits(bench: Bench, reserved: pb.StoreResponse, fills: Any = (), shard: int = 0) -> pb.StoreResponse:
    return await bench.store(commit=pb.Commit(reservation_id=reserved.reservation_id, fills=fills, shard=shard))


async def aborts(bench: Bench, reserved: pb.StoreResponse) -> None:
    await bench.store(abort=pb.Abort(reservation_id=reserved.reservation_id))


async def ends(bench: Bench, reserved: pb.StoreResponse, chain: Chain) -> None:
    """Give a store up as its client does, and then store the chain after all."""
    await aborts(bench, reserved)
    bench.free_staging()
    await bench.put(chain)
    await bench.reads(chain)


@pytest.mark.parametrize(
    "scenario",
    [
        reserve, fill, commit, commit_that_goes_on, commit_of_the_last_shard,
        commit_of_the_first_shard, commit_that_waits_for_another_store, abort,
    ],
)  # fmt: skip
def test_a_step_of_a_store(scenario: Scenario) -> None:
    cut_in_each_turn(scenario)


def test_a_commit_of_many_chunks_lets_others_run_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pauses, "STEP_S", -1.0)
    chain = Chain(NARROW, tuple(range(300, 312)))
    visible: set[int] = set()

    async def scenario() -> None:
        async with Bench(SimulatedDisk(SEED)) as bench:
            reserved, filling = await filled(bench, chain)
            await filling
            commit = asyncio.ensure_future(commits(bench, reserved))
            while not commit.done():
                visible.add(bench.controller.stats().counters["store_committed_chunks"])
                await asyncio.sleep(0)
            assert (await commit).committed_count == len(chain.digests)
            bench.free_staging()

    simulate(scenario(), seed=SEED)
    assert len(visible) >= len(chain.digests)  # each was seen to come by itself


def test_a_reservation_that_waits_for_room() -> None:
    cut_in_each_turn(reserve_that_waits_for_room, step=3, arena_bytes=ROOM_BYTES, arena_region_bytes=ROOM_BYTES)


def test_a_reservation_that_has_copies_proven() -> None:
    cut_in_each_turn(reserve_behind_what_a_crash_left, left=LEFT)


def test_a_commit_that_waits_for_the_device() -> None:
    cut_in_each_turn(commit, is_write_through=True)


def test_a_commit_says_that_the_device_stalls_before_its_caller_gives_up() -> None:
    """The chunks are stored: a caller that hears nothing would take them for lost."""

    async def scenario() -> None:
        async with Bench(SimulatedDisk(SEED), is_write_through=True) as bench:
            chain, controller, clock = Chain(NARROW, (1, 2)), bench.controller, bench.life.parts.clock
            reserved = await bench.reserve(chain)
            fills = list(parse_fills(bench.staged(chain, reserved)))
            bench.life.writers.stall_s, left_s = 60.0, 0.5
            until_s = clock.monotonic() + left_s
            done = await controller.commit(
                bench.session, reserved.reservation_id, fills, deadline=controller.deadline(left_s)
            )
            assert clock.monotonic() < until_s - left_s / 4
            assert (done.committed_count, done.durability) == (2, Durability.MEMORY)
            assert done.refusal

    simulate(scenario(), seed=SEED)


# ---------------------------------------------------------------- durability


@pytest.mark.parametrize(
    ("level", "is_alone"), [("LOCAL", True), ("SHARED", True), ("OBJECT", True), ("OBJECT", False)]
)  # fmt: skip
def test_a_wait_for_a_level(level: str, is_alone: bool) -> None:
    """Another client waits for the same chunks where it is not alone, and hears of them."""
    wanted = pb.Durability.Value(f"DURABILITY_{level}")

    async def settle(bench: Bench, cut: CutShort) -> None:
        chain = fresh(cut)
        reserved = await bench.reserve(chain)
        await commits(bench, reserved, bench.staged(chain, reserved))
        bench.free_staging()
        others = [] if is_alone else [asyncio.ensure_future(bench.put(chain, wanted))]
        await cut(bench.store(settle=bench.settle(chain, wanted)))
        if is_alone:
            assert not any(each._waiters for each in bench.life.parts.movement.all_writes)
        await asyncio.gather(*others)
        await bench.put(chain, wanted)

    cut_in_each_turn(settle)


# ---------------------------------------------------------------- values


class Value:
    """A value that others take the place of, version by version."""

    def __init__(self, bench: Bench, key: str) -> None:
        self._bench = bench
        self._name, self._query = value_name(key), value_query(key)
        digest = self._query.digests[0]
        self._chain = pb.ChainQuery(
            fingerprint=self._query.fingerprint, digests=digest, exactness=pb.EXACTNESS_EXACT
        )  # fmt: skip

    async def put(self, version: int) -> None:
        """Store a version, unless another store of the value is under way. It is on the device then."""
        bench, digest = self._bench, self._query.digests[0]
        reserved = await bench.store(reserve=pb.Reserve(query=self._chain, token_digests=digest, replaces=digest))
        fills = []
        if list(reserved.states) == [pb.STORE_STATE_WANTED]:
            fills = [bench.staged_chunk(0, [value_body(self._name, version)], VALUE_LAYOUT.strip_count)]
        assert (await commits(bench, reserved, fills)).committed_count == 1
        settled = await bench.store(settle=pb.Settle(query=self._chain, timeout_seconds=20.0))
        assert settled.durability == pb.DURABILITY_LOCAL

    def lease(self) -> int:
        return self._bench.controller.fetches.fetch(self._bench.session, self._query).lease_id

    async def found(self) -> int | None:
        """Return the version that a reader finds; None: none."""
        controller, session = self._bench.controller, self._bench.session
        result = controller.fetches.fetch(session, self._query)
        async for news in controller.arrivals(result):
            assert not any(each.lost for each in news)
        version = None
        for chunk in result.chunks:
            whole = chunk.placement.pieces[1]
            version = int.from_bytes(whole[:8].tobytes())
            assert (whole == value_body(self._name, version)).all()
        controller.release(session, [result.lease_id])
        return version

    async def given_up(self) -> None:
        """Give up all stores, as a client does whose calls failed."""
        for reservation in self._bench.controller.reservations.of(self._bench.session):
            await self._bench.store(abort=pb.Abort(reservation_id=reservation.reservation_id))
        self._bench.free_staging()


async def value(bench: Bench, cut: CutShort) -> None:
    """A reader finds one of the two versions, or neither; never one after a later one."""
    held = Value(bench, "key 1")
    old, new = 2 * cut.number, 2 * cut.number + 1
    await held.put(old)
    bench.free_staging()
    await cut(held.put(new))
    await held.given_up()
    assert await held.found() in ((old, new, None) if cut.was_cancelled else (new,))
    await held.put(new)
    bench.free_staging()
    assert await held.found() == new


async def value_in_use(bench: Bench, cut: CutShort) -> None:
    """Two stores of it wait for a reader, and one of them is cut short."""
    held, loop = Value(bench, "key 2"), asyncio.get_running_loop()
    versions = [3 * cut.number + each for each in range(3)]
    await held.put(versions[0])
    bench.free_staging()
    loop.call_later(0.02, bench.controller.release, bench.session, [held.lease()])
    other = asyncio.ensure_future(held.put(versions[1]))
    await cut(held.put(versions[2]))
    for reservation in bench.controller.reservations.of(bench.session):
        if other.done():
            await bench.controller.abort(bench.session, reservation.reservation_id)
    if cut.was_cancelled:
        await asyncio.sleep(0.1)
        await held.given_up()
    await asyncio.wait([other])
    await held.put(versions[0])
    bench.free_staging()
    assert await held.found() == versions[0]


@pytest.mark.parametrize("scenario", [value, value_in_use])
def test_a_value_that_takes_the_place_of_another(scenario: Scenario) -> None:
    cut_in_each_turn(scenario)
