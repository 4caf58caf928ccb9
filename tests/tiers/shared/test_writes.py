"""What goes to shared tiers, and when."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.chunk import ChunkHeader, ChunkLayout
from kvstore.controller import ReserveRequest
from kvstore.errors import InvalidRequest
from kvstore.movement import queue
from kvstore.seams.memory import Bytes
from kvstore.spec import Durability, MissReason
from kvstore.tiers import UploadState
from tests.fakes import FilesSettings, FilesTier, Switch
from tests.scenario import scenario
from tests.simulated import InlineWorkers
from tests.specs import small_spec
from tests.tiers.service import KIB, DeviceService
from tests.tiers.shared.world import PATH, Node, ValueNode, Wide, World, run


@pytest.fixture
def wide(tmp_path: Path) -> Wide:
    return Wide(tmp_path)


@scenario()
async def test_partial_chunks_stay_on_their_node(world: World) -> None:
    """They are of little use to others."""
    one = world.one
    await one.give(1)
    target = one.controller.parts.movement.shared[0].target
    (row,) = one.mapped.rows()
    assert (target.has(row), target.admits(row)) == (True, True)
    one.controller.parts.catalog.table.token_counts[row] = 4
    assert not target.admits(row)


@scenario(lambda world: ValueNode(world.settings))
async def test_values_that_may_be_replaced_stay_on_their_node(node: ValueNode, world: World) -> None:
    """Another node would find the old one."""
    assert await node.put(7) is Durability.LOCAL
    await asyncio.sleep(1.0)
    assert not world.engine.values
    world.switches.turn_on(Switch.LYING)
    absent = await node.controller.fetch_wide(node.session, node.of_key("another"))
    counters = node.controller.stats().counters
    assert (absent.hit_count, counters["redis_asked_chunks"]) == (0, 0)


@scenario()
async def test_a_row_that_is_used_again_has_no_hints(world: World) -> None:
    one = world.one
    await one.give(1)
    (row,) = one.mapped.rows()
    one.controller.parts.movement.removal.remove(row, MissReason.EVICTED)
    await one.give(2)
    assert one.mapped.rows().__next__() == row
    assert await world.other.fetch(2) == (1, MissReason.NONE)


@scenario(lambda world: ValueNode(world.settings))
async def test_no_store_of_values_can_ask_for_a_level_beyond_the_node(node: ValueNode, world: World) -> None:
    query = node.of_key("k")
    wanted = ReserveRequest(query, query.digests, durability=Durability.SHARED)
    with pytest.raises(InvalidRequest, match="stay on their node"):
        await node.controller.reserve(node.session, wanted)
    await node.put(7)
    found = await node.controller.settle(query, 5.0, Durability.SHARED)
    assert "stay on their node" in found.missing[Durability.SHARED]
    assert found.is_settled
    assert not world.engine.values


# ------------------------------------------------------------ when


@scenario(lambda wide: wide.node(redis="back", s3="never"))
async def test_back_goes_at_once_and_never_does_not(node: Node, wide: Wide) -> None:
    await node.give(*PATH)
    assert all(wide.in_redis(node, *PATH))
    for _ in range(3):
        await node.fetch(*PATH)
    node.forget_memory()
    await node.quiet()
    assert not any(wide.in_s3(node, *PATH))


@pytest.mark.parametrize("use", ["lookup", "fetch", "store"])
@scenario(lambda wide: wide.node(redis="never", s3="reuse"))
async def test_reuse_goes_at_the_second_use(node: Node, wide: Wide, use: str) -> None:
    await node.give(1, 2, 3)
    await node.give(5)
    assert not any(wide.in_s3(node, 1, 2, 3))
    if use == "lookup":
        await node.lookup(1, 2)
    elif use == "fetch":
        await node.fetch(1, 2)
    else:
        await node.store(node.session, 1, 2)
    await node.quiet()
    assert wide.in_s3(node, 1, 2, 3) == [True, True, False]
    assert not any(wide.in_s3(node, 5))


@scenario(lambda wide: wide.node(redis="never", s3="reuse"))
async def test_a_store_by_several_writers_is_one_use(node: Node, wide: Wide) -> None:
    """Each of them commits its shard, and hears how much of the chain is stored."""
    controller, session = node.controller, node.session
    result = await node.reserve(session, *PATH, shards=3)
    number = result.reservation_id
    fills = node.stage(session, result, *PATH)
    done = await asyncio.gather(*(controller.commit(session, number, fills[n : n + 1], n) for n in range(3)))
    assert [each.committed_count for each in done] == [3, 3, 3]
    await node.settled(*PATH)
    await node.quiet()
    assert not any(wide.in_s3(node, *PATH))
    await node.lookup(1, 2)
    await node.quiet()
    assert wide.in_s3(node, *PATH) == [True, True, False]


def test_what_another_node_had_stored_has_come_back_with_its_first_fetch(wide: Wide) -> None:
    one, other = wide.node(s3="never"), wide.node(s3="reuse")

    async def scenario() -> None:
        await one.give(*PATH)
        assert await other.fetch(*PATH) == (3, MissReason.NONE)
        await other.quiet()
        assert all(wide.in_s3(other, *PATH))

    run([one, other], scenario)


@scenario(lambda wide: wide.node(redis="never", s3="reuse"))
async def test_what_an_earlier_life_stored_has_come_back_with_its_first_use(node: Node, wide: Wide) -> None:
    await node.give(*PATH)
    await node.restart()
    await node.lookup(1, 2)
    await node.quiet()
    assert wide.in_s3(node, *PATH) == [True, True, False], "from the device, through memory"
    assert not list(node.mapped.rows()), "which gave the room back"
    assert node.counters()["read_back_chunks"] == 2
    assert await node.fetch(*PATH) == (3, MissReason.NONE)


@scenario(lambda wide: wide.node(redis="back", s3="never"))
async def test_what_memory_let_go_before_a_tier_took_it_is_read_back(node: Node, wide: Wide) -> None:
    """The tier was away meanwhile."""
    wide.redis.turn_on(Switch.AWAY)
    await node.keep(*PATH)
    await asyncio.sleep(1.0)
    node.forget_memory()
    wide.redis.turn_off()
    await asyncio.sleep(30.0)
    assert all(wide.in_redis(node, *PATH))
    assert not list(node.mapped.rows())


@scenario(lambda wide: wide.node(redis="back", s3="never", arena_chunks=32))
async def test_what_found_the_queue_full_is_found_again_also_once_memory_let_it_go(
    node: Node, wide: Wide, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide.redis.turn_on(Switch.STALLED)
    monkeypatch.setattr(queue, "QUEUE_COUNT_MAX", 2)
    for token in range(1, 9):
        await node.keep(token)
    node.forget_memory()
    wide.redis.turn_off()
    await asyncio.sleep(120.0)
    assert all(wide.in_redis(node, token)[0] for token in range(1, 9))


def test_a_slower_local_tier_gets_what_memory_let_go(tmp_path: Path) -> None:
    files = FilesSettings(directory=tmp_path / "files", switches=tmp_path / "switches")

    class TwoDevices(DeviceService):
        async def attach(self) -> None:
            await super().attach()
            self.slowest = FilesTier(files, InlineWorkers())
            await self.controller.parts.movement.attach(self.slowest)

    service = TwoDevices()
    files.directory.mkdir()

    async def scenario() -> None:
        service.slowest.switches.turn_on(Switch.AWAY)
        await service.keep(1, 2)
        await asyncio.sleep(1.0)
        service.forget_memory()
        service.slowest.switches.turn_off()
        await asyncio.sleep(30.0)
        slowest = service.controller.parts.catalog.table.copies[2]
        assert len(list(slowest.rows())) == 2
        assert not list(service.mapped.rows())

    service.run(scenario)


@scenario(lambda wide: wide.node(redis="never", s3="reuse", arena_chunks=2))
async def test_reading_back_makes_nothing_go_that_no_slower_tier_has(node: Node, wide: Wide) -> None:
    await node.give(1)
    node.forget_memory()
    node.disk.fail("pwrite", errno.EIO, path_contains="region", times=None)
    await node.store(node.session, 7)
    await node.store(node.session, 8)
    await asyncio.sleep(1.0)  # the device has refused them
    assert len(list(node.mapped.rows())) == 2
    await node.lookup(1)
    await asyncio.sleep(2.0)
    assert node.lookup_now(7) + node.lookup_now(8) == 2, "memory alone has them"
    assert not any(wide.in_s3(node, 1))
    node.disk.mend()
    await asyncio.sleep(60.0)
    assert all(wide.in_s3(node, 1)), "it was not forgotten"


@scenario(
    lambda wide: wide.node(redis="never", s3="demote", arena_chunks=4, capacity_bytes=160 * KIB, region_bytes=32 * KIB)
)
async def test_demote_runs_ahead_of_what_leaves_the_device(node: Node, wide: Wide) -> None:
    await node.give(1)
    await asyncio.sleep(5.0)
    assert not any(wide.in_s3(node, 1)), "there is room enough"
    for token in range(2, 30):
        await node.keep(token)
        await asyncio.sleep(1.0)
    gone = [token for token in range(1, 30) if not node.lookup_now(token)]
    assert gone
    assert all(wide.in_s3(node, token)[0] for token in gone), "what left is there"
    assert node.counters()["s3_undemoted_chunks"] == 0
    newest = [token for token in range(1, 30) if node.lookup_now(token)][-2:]
    assert not any(wide.in_s3(node, token)[0] for token in newest), "and not all there is"
    assert await node.fetch(gone[0]) == (1, MissReason.NONE)


@scenario(
    lambda wide: wide.node(redis="never", s3="demote", arena_chunks=4, capacity_bytes=160 * KIB, region_bytes=32 * KIB)
)
async def test_what_an_earlier_life_stored_of_a_model_that_nobody_registered_leaves_like_any_other(
    node: Node, wide: Wide
) -> None:
    forgotten = node.of(small_spec(model_id="forgotten"))
    await forgotten.keep(1)
    await node.restart()
    for token in range(2, 30):
        await node.keep(token)
        await asyncio.sleep(1.0)
    gone = [token for token in range(2, 30) if not node.lookup_now(token)]
    assert gone
    assert all(wide.in_s3(node, token)[0] for token in gone)
    assert node.controller.parts.movement.problems == []


@scenario(
    lambda wide: wide.node(redis="never", s3="demote", arena_chunks=4, capacity_bytes=160 * KIB, region_bytes=32 * KIB)
)
async def test_making_room_waits_for_no_shared_tier_and_what_goes_undemoted_is_counted(node: Node, wide: Wide) -> None:
    wide.s3.turn_on(Switch.STALLED)
    loop = asyncio.get_running_loop()
    for token in range(1, 30):
        began_s = loop.time()
        await node.keep(token)
        assert loop.time() - began_s < 1.0
        await asyncio.sleep(1.0)
    gone = [token for token in range(1, 30) if not node.lookup_now(token)]
    assert node.counters()["s3_undemoted_chunks"] >= len(gone) > 0


# ------------------------------------------------------------ once


def test_many_nodes_that_meet_one_prompt_send_it_once(wide: Wide) -> None:
    nodes = [wide.node() for _ in range(6)]

    async def scenario() -> None:
        await nodes[0].give(*PATH)
        for node in nodes[1:]:
            await node.give(*PATH)
        written = [node.counters()["redis_written_chunks"] + node.counters()["s3_written_chunks"] for node in nodes]
        present = [node.counters()["redis_present_chunks"] + node.counters()["s3_present_chunks"] for node in nodes]
        assert (written, present) == ([6, 0, 0, 0, 0, 0], [0, 6, 6, 6, 6, 6])

    run(nodes, scenario)


@scenario(lambda wide: wide.node(s3="never", arena_chunks=64))
async def test_chunks_that_wait_are_asked_for_together(node: Node, wide: Wide) -> None:
    asked: list[int] = []
    claim = node.shared[0].claim

    async def counted(keys: Sequence[bytes], claim_s: float, timeout_s: float) -> Sequence[UploadState]:
        asked.append(len(keys))
        found: Sequence[UploadState] = await claim(keys, claim_s, timeout_s)
        return found

    node.shared[0].claim = counted
    await node.give(*range(1, 33))
    assert all(wide.in_redis(node, *range(1, 33)))
    assert len(asked) < 16
    assert max(asked) > 8


@scenario(lambda wide: wide.node(s3="never"))
async def test_a_chunk_is_on_its_way_to_a_tier_once_however_many_ask(node: Node) -> None:
    writes: list[bytes] = []
    write = node.shared[0].write

    async def counted(header: ChunkHeader, layout: ChunkLayout, pieces: Sequence[Bytes]) -> None:
        writes.append(header.storage_key)
        await asyncio.sleep(0.5)
        await write(header, layout, pieces)

    node.shared[0].write = counted
    await node.store(node.session, *PATH, durability=Durability.SHARED)
    waits = [node.controller.settle(node.query(*PATH), 5.0, Durability.SHARED) for _ in range(5)]
    found = await asyncio.gather(*waits)
    assert all(Durability.SHARED not in each.missing for each in found)
    assert sorted(writes) == sorted({node.key(*PATH[:count]) for count in (1, 2, 3)})


@scenario(lambda world: ValueNode(world.settings))
async def test_a_row_of_another_chunk_is_not_sent_in_the_place_of_one_that_went(node: ValueNode, world: World) -> None:
    """A value took the row of a chunk that waited while the engine stalled."""
    writes = node.controller.parts.movement.shared[0].writes
    await node.put(7)
    (row,) = node.controller.parts.movement.memory.rows()
    assert writes._queue.add(row)
    await asyncio.sleep(1.0)
    assert not world.engine.values
    assert not writes.backlog_count
