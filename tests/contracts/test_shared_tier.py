"""What ``SharedTier`` promises, held against fakes of two kinds and every weather."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from kvstore.chunk import making
from kvstore.errors import DataLoss, DeadlineExceeded, Exhausted, Unavailable
from kvstore.simulated import LoopClock, SeededRandom, SeededWorkers, simulate
from kvstore.spec import Durability, Tier
from kvstore.tiers import ChunkName, SharedTier, UploadState
from tests.contracts.chunks import LARGE, SMALL, Chunk, balance, chunk, layouts
from tests.contracts.redis_stand import EncodedRedisStand, OtherRedisStand, RedisStand
from tests.contracts.s3_stand import EncodedS3Stand, S3Stand
from tests.contracts.wrappers import Faulty, Latency, SharedUnder, Throttle
from tests.fakes import EngineSettings, EngineTier, ObjectSettings, ObjectTier, Switch, Switches
from tests.fakes.engine import ENGINES

CAPACITY_BYTES = 1 << 20
SEED = 7
TIMEOUT_S = 1.0


class Stand:
    """An engine, and any number of nodes that use it."""

    evicts = False
    replaces = True
    """A second write of a chunk takes the place of the first."""
    keeps_claims = True
    is_timed = True
    """Its clock is a simulated one, which tells the time exactly."""
    cannot: ClassVar[dict[str, str]] = {}
    """Tests that it cannot have, and why."""

    def __init__(self, home: Path, capacity_bytes: int = CAPACITY_BYTES) -> None:
        home.mkdir(parents=True)
        self.home = home
        self.capacity_bytes = capacity_bytes
        self.switches = Switches(home / "switches")
        self.tier, self.other = self.node(), self.node()

    def node(self) -> SharedTier:
        raise NotImplementedError

    def drop_all(self) -> None:
        """As the engine may at any time."""
        raise NotImplementedError

    def flip(self, key: bytes, offset: int) -> None:
        """Damage one byte of what lies there; ``offset`` counts from its header."""
        raise NotImplementedError

    def put(self, key: bytes, data: bytes) -> None:
        """Write anything there, as others may."""
        raise NotImplementedError

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        async def whole() -> None:
            await scenario()
            for each in (self.tier, self.other, self.tier):
                await each.close()

        simulate(whole(), seed=SEED)


class EngineStand(Stand):
    evicts = True

    def node(self) -> SharedTier:
        name = str(self.home)
        self.fake = EngineTier(
            EngineSettings(
                engine=name, capacity_bytes=self.capacity_bytes, evicts=self.evicts, switches=self.home / "switches"
            )
        )
        return self.fake

    def drop_all(self) -> None:
        self.fake.engine.drop(1 << 30)

    def flip(self, key: bytes, offset: int) -> None:
        value = bytearray(self.fake.engine.values[key])
        value[offset] ^= 1
        self.fake.engine.values[key] = bytes(value)

    def put(self, key: bytes, data: bytes) -> None:
        self.fake.engine.values[key] = data


class FullStand(EngineStand):
    """An engine that evicts nothing."""

    evicts = False


class ObjectStand(Stand):
    keeps_claims = False

    def node(self) -> SharedTier:
        self.fake = ObjectTier(
            ObjectSettings(
                directory=self.home / "objects", capacity_bytes=self.capacity_bytes, switches=self.home / "switches"
            ),
            SeededWorkers(SEED),
        )
        return self.fake

    def drop_all(self) -> None:
        self.fake.drop_all()

    def flip(self, key: bytes, offset: int) -> None:
        data = bytearray(self.fake.path(key).read_bytes())
        data[offset] ^= 1
        self.put(key, bytes(data))

    def put(self, key: bytes, data: bytes) -> None:
        self.fake.path(key).write_bytes(data)


class LatencyStand(ObjectStand):
    def node(self) -> SharedTier:
        return SharedUnder(super().node(), Latency(LoopClock(), 0.0005))


class ThrottleStand(EngineStand):
    def node(self) -> SharedTier:
        return SharedUnder(super().node(), Throttle(LoopClock(), 1e8))


class FaultyStand(EngineStand):
    def node(self) -> SharedTier:
        return SharedUnder(super().node(), Faulty(SeededRandom(SEED)))


STANDS: dict[str, Any] = {
    "engine": EngineStand, "full engine": FullStand, "objects": ObjectStand, "latency": LatencyStand,
    "throttle": ThrottleStand, "faulty": FaultyStand, "redis": RedisStand,
    "another redis": OtherRedisStand, "redis lz4": EncodedRedisStand, "s3": S3Stand, "s3 lz4": EncodedS3Stand,
}  # fmt: skip


@pytest.fixture(params=STANDS)
def make(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Stand]:
    monkeypatch.setattr(making, "SAVES_MIN", -1.0)
    made = STANDS[request.param]
    if reason := made.cannot.get(request.node.originalname):
        pytest.skip(reason)
    return lambda **options: made(tmp_path / "shared", **options)


@pytest.fixture
def stand(make: Callable[..., Stand]) -> Stand:
    return make()


async def write(tier: SharedTier, what: Chunk) -> None:
    await tier.write(what.header, what.layout, what.pieces)


async def found(tier: SharedTier, what: Chunk, name: ChunkName | None = None) -> bool:
    """Whether the tier gives exactly this chunk. False for a miss; other bytes fail the test."""
    target = [np.full(slab.byte_count, 0x5A, np.uint8) for slab in what.layout.slabs]
    stored = await tier.open(name or what.name, target)
    if stored is None:
        return False
    try:
        await stored.read(range(len(target)), target)
    finally:
        stored.close()
    assert all((one == other).all() for one, other in zip(target, what.pieces[1:], strict=True))
    return True


@pytest.mark.parametrize("kind", [*layouts(), "large"])
def test_a_chunk_comes_back_whole_and_in_parts_to_every_node(stand: Stand, kind: str) -> None:
    what = chunk(1, LARGE if kind == "large" else layouts()[kind])

    async def scenario() -> None:
        await write(stand.tier, what)
        for node in (stand.tier, stand.other):
            assert await found(node, what)
            stored = await node.open(what.name)
            assert stored is not None
            assert stored.header.write_id == what.header.write_id
            last = len(what.layout.slabs) - 1
            target = [np.empty(what.layout.slabs[last].byte_count, np.uint8)]
            await stored.read(range(last, last + 1), target)
            assert (target[0] == what.pieces[1 + last]).all()
            await stored.check(range(last + 1))
            stored.close()
            stored.close()
        balance(stand.tier)  # type: ignore[arg-type]

    stand.run(scenario)


def test_what_may_be_read_ahead_is_checked_all_the_same(stand: Stand) -> None:
    """Where all of it was announced, a part of it, other memory than is read into then, and what is read twice."""
    what = chunk(1)

    async def scenario() -> None:
        await write(stand.tier, what)
        for announced in (0, 1, 2):
            for start, stop in ((0, 2), (0, 1), (1, 2)):
                target = [np.full(slab.byte_count, 0x5A, np.uint8) for slab in SMALL.slabs]
                stored = await stand.other.open(what.name, target[:announced])
                assert stored is not None
                for _ in range(2):
                    await stored.read(range(start, stop), target[start:stop])
                    assert (
                        np.concatenate(target[start:stop]) == np.concatenate(what.pieces[1 + start : 1 + stop])
                    ).all()
                other = [np.empty_like(each) for each in target]
                await stored.read(range(2), other)
                assert (np.concatenate(other) == np.concatenate(what.pieces[1:])).all()
                stored.close()

    stand.run(scenario)


def test_what_is_not_there_is_a_miss(stand: Stand) -> None:
    async def scenario() -> None:
        key = chunk(1).header.storage_key
        assert await stand.tier.open(chunk(1).name) is None
        assert list(await stand.tier.probe([key], TIMEOUT_S)) == [False]
        await stand.tier.remove([key])  # no error
        await write(stand.tier, chunk(1))
        await write(stand.tier, chunk(3))
        keys = [chunk(number).header.storage_key for number in (1, 2, 3)]
        assert list(await stand.other.probe(keys, TIMEOUT_S)) == [True, False, True]
        assert list(await stand.other.probe([], TIMEOUT_S)) == []
        await stand.other.remove([key])
        assert await stand.tier.open(chunk(1).name) is None
        assert await found(stand.tier, chunk(3))

    stand.run(scenario)


def test_many_keys_are_asked_for_at_once_whichever_of_them_are_there(stand: Stand) -> None:
    """Of chains that have nothing to do with each other, some of which end early; and of keys that are no chain."""
    there = {*range(4, 7), *range(10, 16)}
    keys = [chunk(number).header.storage_key for number in range(20)]

    async def scenario() -> None:
        await asyncio.gather(*(write(stand.tier, chunk(number)) for number in there))
        await asyncio.gather(*(write(stand.tier, chunk(number)) for number in (18, 19)))
        expected = [number in there | {18, 19} for number in range(20)]
        assert list(await stand.other.probe(keys, 10.0)) == expected
        found = list(await stand.other.probe(keys[:18], 10.0, [4, 5, 1, 8]))
        assert found == expected[:18]

    stand.run(scenario)


def test_what_one_node_is_about_to_write_others_find_taken_for_a_while(stand: Stand) -> None:
    there, claimed = chunk(1).header.storage_key, chunk(2).header.storage_key
    taken = UploadState.TAKEN if stand.keeps_claims else UploadState.FREE

    async def scenario() -> None:
        await write(stand.tier, chunk(1))
        for _ in range(2):  # one's own claim is made anew
            found = await stand.tier.claim([there, claimed], 2.0, TIMEOUT_S)
            assert list(found) == [UploadState.THERE, UploadState.FREE]
        assert list(await stand.other.claim([claimed, there], 60.0, TIMEOUT_S)) == [taken, UploadState.THERE]
        assert list(await stand.other.probe([claimed], TIMEOUT_S)) == [False]
        assert await stand.other.open(chunk(2).name) is None
        async with asyncio.timeout(20.0):
            while await stand.other.claim([claimed], 60.0, TIMEOUT_S) != [UploadState.FREE]:  # noqa: ASYNC110 - the engine tells nobody
                await asyncio.sleep(0.1)  # the engine tells nobody that a claim has ended
        assert list(await stand.tier.claim([claimed], 60.0, TIMEOUT_S)) == [taken]
        await write(stand.tier, chunk(2))  # a claim forbids nothing
        for node in (stand.tier, stand.other):
            assert list(await node.claim([claimed], 60.0, TIMEOUT_S)) == [UploadState.THERE]
        assert list(await stand.tier.claim([], 60.0, TIMEOUT_S)) == []
        balance(stand.tier)

    stand.run(scenario)


def test_what_the_engine_drops_is_a_miss_and_what_is_open_is_whole_or_lost(stand: Stand) -> None:
    async def scenario() -> None:
        await write(stand.tier, chunk(1))
        stored = await stand.tier.open(chunk(1).name)
        assert stored is not None
        stand.drop_all()
        assert await stand.tier.open(chunk(1).name) is None
        target = [np.empty(slab.byte_count, np.uint8) for slab in SMALL.slabs]
        try:
            await stored.read(range(2), target)
        except DataLoss:
            pass
        else:
            assert all((one == other).all() for one, other in zip(target, chunk(1).pieces[1:], strict=True))
        stored.close()
        await write(stand.other, chunk(1))
        assert await found(stand.tier, chunk(1))

    stand.run(scenario)


def test_a_replacement_is_never_mixed_with_what_it_replaces(stand: Stand) -> None:
    first, second = chunk(1, write=1), chunk(1, write=2)

    async def scenario() -> None:
        await write(stand.tier, first)
        stored = await stand.tier.open(first.name)
        assert stored is not None
        target = [np.empty(slab.byte_count, np.uint8) for slab in SMALL.slabs]
        await stored.read(range(1), target[:1])
        await write(stand.other, second)
        try:
            await stored.read(range(1, 2), target[1:])
        except DataLoss:
            pass
        else:
            assert (target[1] == first.pieces[2]).all()
        stored.close()
        if not stand.replaces:
            assert await found(stand.tier, first, second.any_write), "it was written once"
            with pytest.raises(DataLoss):
                await stand.tier.open(second.name)
            return
        assert await found(stand.tier, second)
        with pytest.raises(DataLoss):
            await stand.tier.open(first.name)
        assert await found(stand.tier, second, first.any_write)

    stand.run(scenario)


def test_what_others_wrote_is_believed_only_if_it_is_the_chunk(stand: Stand) -> None:
    what, other = chunk(1), chunk(2)

    async def scenario() -> None:
        await write(stand.tier, what)
        key = what.header.storage_key
        whole = b"".join(piece.tobytes() for piece in what.pieces)
        strange = b"".join(piece.tobytes() for piece in other.pieces)
        for data in (strange, b"", whole[:100], whole[: what.layout.header_bytes], bytes(len(whole)), whole[:-4096]):
            stand.put(key, data)
            with pytest.raises(DataLoss):
                await found(stand.tier, what)
        stand.put(key, whole)
        assert await found(stand.tier, what)
        for offset in (0, 8, 40, 300, what.layout.header_bytes, what.layout.header_bytes + SMALL.slabs[0].byte_count):
            stand.flip(key, offset)
            with pytest.raises(DataLoss):
                await found(stand.tier, what)
            stand.flip(key, offset)
        with pytest.raises(DataLoss):  # another model's geometry under this key
            await stand.tier.open(ChunkName(key, layouts()["kv tail"]))
        assert await found(stand.tier, what)

    stand.run(scenario)


def test_a_full_engine_drops_others_or_says_so(make: Callable[..., Stand]) -> None:
    stand = make(capacity_bytes=6 * SMALL.total_bytes)

    async def scenario() -> None:
        refused = 0
        for number in range(12):
            try:
                await write(stand.tier, chunk(number))
            except Exhausted:
                refused += 1
            assert stand.tier.statistics().file_bytes <= stand.capacity_bytes
        there = [number for number in range(12) if await found(stand.tier, chunk(number))]
        assert (refused, there) == ((0, list(range(6, 12))) if stand.evicts else (6, list(range(6))))
        with pytest.raises(Exhausted):
            await write(stand.tier, chunk(100, LARGE))
        balance(stand.tier)  # type: ignore[arg-type]

    stand.run(scenario)


def test_an_engine_that_is_away_is_unavailable_and_comes_back(stand: Stand) -> None:
    async def scenario() -> None:
        await write(stand.tier, chunk(1))
        stored = await stand.tier.open(chunk(1).name)
        assert stored is not None
        stand.switches.turn_on(Switch.AWAY)
        key = chunk(1).header.storage_key
        target = [np.empty(slab.byte_count, np.uint8) for slab in SMALL.slabs]
        for call in (
            write(stand.tier, chunk(2)), stand.tier.open(chunk(1).name), stand.tier.probe([key], TIMEOUT_S),
            stand.tier.claim([key], 60.0, TIMEOUT_S),
            stand.tier.remove([key]), stored.read(range(2), target), stored.check(range(2)),
        ):  # fmt: skip
            with pytest.raises(Unavailable):
                await call
        with suppress(Unavailable):
            await stand.tier.touch([key])
        stand.switches.turn_off()
        await stored.check(range(2))
        stored.close()
        assert await found(stand.tier, chunk(1))
        assert not await found(stand.tier, chunk(2))

    stand.run(scenario)


def test_a_use_that_it_is_told_of_changes_nothing_but_what_it_drops(stand: Stand) -> None:
    async def scenario() -> None:
        keys = [chunk(number).header.storage_key for number in range(3)]
        await stand.tier.touch(keys)  # nothing is there: no error
        await stand.tier.touch([])
        for number in range(3):
            await write(stand.tier, chunk(number))
        await stand.other.touch([*keys, chunk(9).header.storage_key])
        assert list(await stand.tier.probe([*keys, chunk(9).header.storage_key], TIMEOUT_S)) == [True] * 3 + [False]
        for number in range(3):
            assert await found(stand.tier, chunk(number))
        balance(stand.tier)

    stand.run(scenario)


def test_what_is_used_elsewhere_is_not_dropped_first(make: Callable[..., Stand]) -> None:
    stand = make(capacity_bytes=4 * SMALL.total_bytes)
    if not stand.evicts:
        pytest.skip("this engine drops nothing")

    async def scenario() -> None:
        for number in range(4):
            await write(stand.tier, chunk(number))
        for number in range(4, 10):
            await stand.other.touch([chunk(0).header.storage_key])
            await write(stand.tier, chunk(number))
        assert [number for number in range(10) if await found(stand.tier, chunk(number))] == [0, 7, 8, 9]

    stand.run(scenario)


def test_an_engine_that_stalls_says_for_how_long_and_a_probe_ends(stand: Stand) -> None:
    async def scenario() -> None:
        await write(stand.tier, chunk(1))
        assert stand.tier.stalled_s() == 0.0
        stand.switches.turn_on(Switch.STALLED)
        opening = asyncio.ensure_future(stand.tier.open(chunk(1).name))
        with pytest.raises(DeadlineExceeded):
            await stand.tier.probe([chunk(1).header.storage_key], TIMEOUT_S)
        with pytest.raises(DeadlineExceeded):
            await stand.tier.claim([chunk(2).header.storage_key], 60.0, 0.1)
        assert stand.tier.stalled_s() > 0.9
        assert stand.tier.stalled_s() < 1.5 or not stand.is_timed
        stand.switches.turn_off()
        stored = await opening
        assert stored is not None
        await stored.check(range(2))
        stored.close()
        assert stand.tier.stalled_s() == 0.0

    stand.run(scenario)


def test_a_hint_that_lies_changes_no_read(stand: Stand) -> None:
    async def scenario() -> None:
        await write(stand.tier, chunk(1))
        keys = [chunk(number).header.storage_key for number in (1, 2)]
        stand.switches.turn_on(Switch.LYING)
        assert list(await stand.tier.probe(keys, TIMEOUT_S)) == [False, True]
        assert await found(stand.tier, chunk(1))
        assert await stand.tier.open(chunk(2).name) is None
        stand.switches.turn_on(Switch.ABSENT)
        assert list(await stand.tier.probe(keys, TIMEOUT_S)) == [False, False]
        assert await stand.tier.open(chunk(1).name) is None
        for switch in (Switch.CORRUPT, Switch.GARBLED):
            stand.switches.turn_on(switch)
            with pytest.raises(DataLoss):
                await found(stand.tier, chunk(1))
        stand.switches.turn_off()
        assert await found(stand.tier, chunk(1))

    stand.run(scenario)


def test_a_cancelled_call_leaves_all_or_nothing(stand: Stand) -> None:
    async def scenario() -> None:
        outcomes = set()
        for step in range(30):
            what = chunk(step, write=step)
            writing = asyncio.ensure_future(write(stand.tier, what))
            await asyncio.sleep(step * 0.00005)
            writing.cancel()
            outcomes.add(bool((await asyncio.gather(writing, return_exceptions=True))[0]))
            for piece in what.pieces:
                piece[:] = 0xDB  # the caller may use its memory again
            await asyncio.sleep(0.01)
            await found(stand.other, chunk(step, write=step))
            balance(stand.tier)  # type: ignore[arg-type]
        assert True in outcomes

    stand.run(scenario)


def test_a_tier_says_what_it_is(stand: Stand) -> None:
    async def scenario() -> None:
        kind, durability = stand.tier.kind, stand.tier.durability
        assert (kind, durability) in {(Tier.REDIS, Durability.SHARED), (Tier.S3, Durability.OBJECT)}
        assert stand.tier.statistics().name == stand.tier.name
        await write(stand.tier, chunk(1))
        assert stand.tier.statistics().written_bytes == SMALL.total_bytes
        assert await found(stand.tier, chunk(1))
        assert stand.tier.statistics().verified_bytes == sum(slab.byte_count for slab in SMALL.slabs)

    stand.run(scenario)


def test_engines_of_other_names_are_others() -> None:
    one, other = EngineTier(EngineSettings(engine="one")), EngineTier(EngineSettings(engine="other"))

    async def scenario() -> None:
        await write(one, chunk(1))
        assert not await found(other, chunk(1))

    try:
        asyncio.run(scenario())
    finally:
        del ENGINES["one"], ENGINES["other"]
