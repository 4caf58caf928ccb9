"""Levels of durability as a set: what a chain has reached, why not the rest; and no tier delays another one's level."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.controller import Settled
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.movement.writes import LANE_COUNT
from kvstore.spec import LEVELS, Durability, MissReason
from kvstore.tiers import ChunkName
from tests.fakes import Switch
from tests.scenario import scenario
from tests.specs import small_spec
from tests.tiers.service import DeviceService
from tests.tiers.shared.world import PATH, Node, Wide, run

MEMORY, LOCAL, SHARED, OBJECT = LEVELS
ALL = set(LEVELS)
TIMEOUT_S = 5.0


@pytest.fixture
def wide(tmp_path: Path) -> Wide:
    return Wide(tmp_path)


async def settled(node: DeviceService, *path: int, wanted: Durability = LOCAL, timeout_s: float = TIMEOUT_S) -> Settled:
    return await node.controller.settle(node.query(*path), timeout_s, wanted)


def reached(found: Settled) -> set[Durability]:
    return ALL - found.missing.keys()


async def kept(node: Node, wanted: Durability, *path: int) -> Settled:
    """Store for a level, and wait for it."""
    await node.store(node.session, *path, durability=wanted)
    return await settled(node, *path, wanted=wanted)


@scenario(lambda wide: wide.node())
async def test_every_level_is_reached_by_itself_and_the_old_one_is_the_nodes_own(node: Node, wide: Wide) -> None:
    await node.give(*PATH)
    found = await settled(node, *PATH)
    assert (reached(found), found.missing) == (ALL, {})
    assert (found.durability, found.reason, found.is_settled) == (LOCAL, "", True)
    assert all(wide.in_redis(node, *PATH))
    assert all(wide.in_s3(node, *PATH))


@scenario(lambda: DeviceService())
async def test_a_level_of_no_tier_says_which_setting_adds_it_and_no_store_can_ask_for_it(
    service: DeviceService,
) -> None:
    service.parts.movement.absent.append("the redis tier is off: no such file (tiers.redis.url)")
    await service.keep(*PATH)
    found = await settled(service, *PATH)
    assert reached(found) == {MEMORY, LOCAL}
    assert "tiers.redis.url" in found.missing[SHARED]
    assert "the redis tier is off" in found.missing[SHARED]
    assert "tiers.s3.bucket" in found.missing[OBJECT]
    for level, name in ((SHARED, "tiers.redis.url"), (OBJECT, "tiers.s3.bucket")):
        with pytest.raises(InvalidRequest, match=name):
            await service.store(service.session, 9, durability=level)
    assert (await settled(service, *PATH, wanted=OBJECT)).is_settled, "nobody waits for what cannot be"


@pytest.mark.parametrize("level", [SHARED, OBJECT])
@scenario(lambda wide: wide.node(redis="never", s3="never"))
async def test_a_store_that_asks_for_a_level_goes_there_at_once_and_nowhere_else(
    node: Node, wide: Wide, level: Durability
) -> None:
    await node.give(8)
    found = await settled(node, 8)
    assert reached(found) == {MEMORY, LOCAL}
    assert "tiers.redis.write = never" in found.missing[SHARED]
    found = await kept(node, level, *PATH)
    assert level in reached(found)
    assert (all(wide.in_redis(node, *PATH)), all(wide.in_s3(node, *PATH))) == (level is SHARED, level is OBJECT)
    assert not any(wide.in_redis(node, 8) + wide.in_s3(node, 8))


@scenario(lambda wide: wide.node(redis="never", s3="never"))
async def test_object_takes_along_what_the_chain_hangs_on(node: Node, wide: Wide) -> None:
    """Its beginning was stored before, and for the node alone; memory gave it up since."""
    await node.give(1, 2)
    node.forget_memory()
    found = await kept(node, OBJECT, *PATH)
    assert OBJECT in reached(found), found
    assert all(wide.in_s3(node, *PATH))
    assert OBJECT in reached(await settled(node, 1))


@scenario(lambda wide: wide.node(redis="never", s3="never"))
async def test_object_is_not_reached_while_an_ancestor_is_missing(node: Node, wide: Wide) -> None:
    """The question is about the end of a chain alone, as no client of ours asks it; what it hangs on counts."""
    await kept(node, OBJECT, *PATH)
    tail = node.query(*PATH)._replace(digests=node.query(*PATH).digests[2:])
    assert OBJECT not in (await node.controller.settle(tail, TIMEOUT_S)).missing
    gone = node.key(1)
    (wide.object_settings.directory / gone.hex()).unlink()
    found = await node.controller.settle(tail, TIMEOUT_S)
    assert "dropped" in found.missing[OBJECT]
    found = await node.controller.settle(tail, TIMEOUT_S)
    assert OBJECT in found.missing
    found = await node.controller.settle(tail, TIMEOUT_S, OBJECT)
    assert OBJECT not in found.missing, "it was sent again"
    (wide.object_settings.directory / gone.hex()).unlink()
    await node.controller.settle(tail, TIMEOUT_S)  # it knows that by now
    node.controller.parts.movement.removal.remove(node.row(1), MissReason.EVICTED)
    found = await node.controller.settle(tail, TIMEOUT_S, OBJECT)
    assert "hangs on" in found.missing[OBJECT]
    assert found.is_settled


def test_shared_was_readable_when_it_was_said(wide: Wide) -> None:
    node, other = wide.node(redis="never", s3="never"), wide.node()

    async def scenario() -> None:
        assert SHARED in reached(await kept(node, SHARED, *PATH))
        assert await other.fetch(*PATH) == (3, MissReason.NONE)
        wide.engine.values.clear()
        found = await settled(node, *PATH)
        assert "dropped 3 of 3" in found.missing[SHARED], "the engine is asked before it is said again"
        assert SHARED in reached(await settled(node, *PATH, wanted=SHARED)), "and it goes there again"

    run([node, other], scenario)


@pytest.mark.parametrize("level", [SHARED, OBJECT])
@pytest.mark.parametrize("model_id", ["test", "other"])
@scenario(lambda wide: wide.node(redis="never", s3="never"))
async def test_a_chunk_that_goes_while_it_is_waited_for_has_no_level_of_another_in_its_row(
    node: Node, level: Durability, model_id: str
) -> None:
    """Another one of the same model; or the same tokens of another model, which have the same digest. The tier has what
    went, too, but this node has not looked since."""
    other = node.of(small_spec(model_id=model_id))
    await kept(node, level, 9)
    await settled(node, 9)
    node.controller.parts.movement.removal.remove(node.row(9), MissReason.EVICTED)
    path, write, may_write = (90 if other.model == node.model else 9,), node.nvme.write, asyncio.Event()

    async def late(*given: Any) -> int:
        await may_write.wait()
        return await write(*given)

    node.nvme.write = late
    for number in range(LANE_COUNT):  # so that the next one waits for its turn
        await node.store(node.session, 20 + number)
    await node.store(node.session, 9)
    row = node.row(9)
    waiting = asyncio.ensure_future(settled(node, 9))
    await asyncio.sleep(0.01)
    node.controller.parts.movement.removal.remove(row, MissReason.EVICTED)
    await other.store(node.session, *path, durability=level)
    assert other.row(*path) == row
    assert level in reached(await settled(other, *path, wanted=level, timeout_s=0.5))
    may_write.set()
    assert reached(await waiting) == set()


@scenario(lambda wide: wide.node(redis="never", s3="never"))
async def test_what_leaves_the_node_while_other_tiers_are_asked_has_none_of_its_levels(node: Node) -> None:
    async def refuse(*_: Any) -> int:
        raise Unavailable("the device failed")

    node.nvme.write = refuse
    assert reached(await kept(node, SHARED, 1)) == {MEMORY, SHARED}
    probe = node.shared[0].probe

    async def late(*given: Any) -> Any:
        node.controller.parts.movement.removal.remove(node.row(1), MissReason.EVICTED)
        return await probe(*given)

    node.shared[0].probe = late
    assert reached(await settled(node, 1)) == {SHARED}


def test_a_chunk_that_went_in_the_middle_of_a_long_chain_is_missed(wide: Wide) -> None:
    """A lookup may take a bucket's chain for whole without asking for every chunk of it; no promise may."""
    path, node = tuple(range(20, 34)), wide.node(redis="never", s3="never")

    async def scenario() -> None:
        assert OBJECT in reached(await kept(node, OBJECT, *path))
        for number in range(2, 14):
            (wide.object_settings.directory / node.key(*path[:number]).hex()).unlink()
            found = await settled(node, *path)
            assert OBJECT not in reached(found), number
            assert "dropped 1 of 14" in found.missing[OBJECT]
            assert OBJECT in reached(await settled(node, *path, wanted=OBJECT))
            assert all(wide.in_s3(node, *path))

    run([node], scenario)


def test_an_engine_with_no_room_for_a_chain_is_told_as_that(tmp_path: Path) -> None:
    """It drops the beginning for the end."""
    wide = Wide(tmp_path, capacity_bytes=20_000)
    node = wide.node(s3="never")

    async def scenario() -> None:
        found = await kept(node, SHARED, *PATH)
        assert reached(found) == {MEMORY, LOCAL}
        assert "dropped" in found.missing[SHARED]
        assert found.is_settled

    run([node], scenario)


@pytest.mark.parametrize("switch", [Switch.STALLED, Switch.AWAY])
@scenario(lambda wide: wide.node(redis="never", s3="never"))
async def test_a_tier_that_fails_delays_no_other_level(node: Node, wide: Wide, switch: Switch) -> None:
    loop = asyncio.get_running_loop()
    wide.s3.turn_on(switch)
    began_s = loop.time()
    found = await kept(node, OBJECT, *PATH)
    assert loop.time() - began_s <= TIMEOUT_S + 1.0
    assert reached(found) == {MEMORY, LOCAL}
    assert found.missing[OBJECT]
    began_s = loop.time()
    found = await kept(node, SHARED, 7)
    assert reached(found) >= {MEMORY, SHARED}
    assert loop.time() - began_s < 1.0
    began_s = loop.time()
    assert reached(await settled(node, 7)) >= {MEMORY, LOCAL}
    assert loop.time() - began_s < 1.0
    wide.s3.turn_off()
    await asyncio.sleep(60.0)
    assert OBJECT in reached(await settled(node, *PATH, wanted=OBJECT)), "it was not forgotten"


@scenario(lambda wide: wide.node(redis="never", s3="never"))
async def test_a_device_that_stalls_delays_no_level_beyond_it(node: Node) -> None:
    loop = asyncio.get_running_loop()

    async def never(*_: object) -> int:
        await asyncio.sleep(1e6)
        return 0

    node.nvme.write = never
    began_s = loop.time()
    found = await kept(node, OBJECT, *PATH)
    assert reached(found) >= {MEMORY, OBJECT}
    assert LOCAL in found.missing
    assert (found.durability, loop.time() - began_s < 1.0) == (MEMORY, True)


def test_what_a_tier_merely_says_is_no_promise_until_it_was_read(wide: Wide) -> None:
    """Another node's damaged object lies where the chunk should."""
    one, other = wide.node(redis="never", s3="back"), wide.node(redis="never", s3="back")

    async def scenario() -> None:
        await one.give(1)
        path = wide.object_settings.directory / one.key(1).hex()
        whole = path.read_bytes()
        spoilt = bytearray(whole)
        spoilt[one.layout.header_bytes] ^= 1
        path.write_bytes(spoilt)
        await other.give(1)
        assert other.counters()["s3_present_chunks"] == 1
        assert path.read_bytes() == spoilt, "it said that it had it"
        found = await settled(other, 1)
        assert "nobody has looked" in found.missing[OBJECT]
        assert OBJECT in reached(await settled(other, 1, wanted=OBJECT))
        assert path.read_bytes() != spoilt, "it was looked at, and written anew"
        assert await checked(other, 1)

    run([one, other], scenario)


def test_what_others_wrote_well_is_adopted_and_not_sent_again(wide: Wide) -> None:
    one, other = wide.node(redis="never"), wide.node(redis="never")

    async def scenario() -> None:
        await one.give(*PATH)
        found = await kept(other, OBJECT, *PATH)
        assert OBJECT in reached(found)
        assert other.counters()["s3_written_chunks"] == 0

    run([one, other], scenario)


async def checked(node: Node, *path: int, tier: int = 1) -> bool:
    """Return True when every whole chunk of a path can be read from a shared tier to the bit."""
    for number in range(len(path)):
        stored = await node.shared[tier].open(ChunkName(node.key(*path[: number + 1]), node.layout))
        if stored is None:
            return False
        try:
            await stored.check(range(len(node.layout.slabs)))
        finally:
            stored.close()
    return True


WEATHERS = [None, Switch.AWAY, Switch.ABSENT, Switch.LYING]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    weather=st.sampled_from(WEATHERS),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["store", "flush", "drop", "delete", "forget"]),
            st.lists(st.integers(1, 2), min_size=1, max_size=3),
            st.sampled_from([LOCAL, SHARED, OBJECT]),
        ),
        min_size=1,
        max_size=8,
    ),
)  # fmt: skip
def test_what_is_acknowledged_can_be_read_there(
    tmp_path_factory: pytest.TempPathFactory, weather: Switch | None, steps: list[tuple[str, list[int], Durability]]
) -> None:
    """Whatever came before; and OBJECT holds for all that a chain hangs on."""
    wide = Wide(tmp_path_factory.mktemp("weather"), capacity_bytes=60_000)
    node = wide.node(redis="back", s3="never")

    async def scenario() -> None:
        for switches in (wide.redis, wide.s3):
            switches.turn_on(*([weather] if weather else []))
        for what, path, wanted in steps:
            if what == "store":
                found = await kept(node, wanted, *path)
                for tier, level in enumerate((SHARED, OBJECT)):
                    if level in reached(found):
                        assert await checked(node, *path, tier=tier), f"{level.name} was said, and {path} is not there"
            elif what == "flush":
                wide.engine.values.clear()
            elif what == "drop":
                wide.engine.drop(1)
            elif what == "delete":  # as operators may
                (wide.object_settings.directory / node.key(*path).hex()).unlink(missing_ok=True)
            else:
                node.forget_memory()

    run([node], scenario)
