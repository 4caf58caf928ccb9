"""Engines that fail, lie, stall or are full: a miss, or a shorter prefix, and nobody waits long for them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.chunk import ChunkHeader, ChunkLayout
from kvstore.errors import DataLoss, Unavailable
from kvstore.spec import Durability, MissReason
from kvstore.tiers import PART, TierStatistics, WritePolicy
from tests.fakes import EngineTier, Switch
from tests.scenario import scenario
from tests.tiers.shared.world import LOOKUP_S, PATH, Node, World, redeemed, spoil


@pytest.mark.parametrize("switch", [Switch.CORRUPT, Switch.GARBLED])
@scenario()
async def test_what_fails_its_check_is_a_miss_and_is_written_anew_with_the_next_store(
    world: World, switch: Switch
) -> None:
    await world.one.give(*PATH)
    other = world.other
    world.switches.turn_on(switch)
    assert await other.fetch(*PATH) == (0, MissReason.CORRUPT)
    other.is_empty()
    world.switches.turn_off()
    spoil(world.engine, world.one, 1)
    await other.give(*PATH)
    third = Node(lambda: EngineTier(world.settings))
    await third.start()
    assert await third.fetch(*PATH) == (3, MissReason.NONE)
    await third.stop(kill=True)


@scenario()
async def test_a_hint_that_lies_costs_a_read(world: World) -> None:
    other = world.other
    world.switches.turn_on(Switch.LYING)
    assert (await other.lookup(*PATH)).hit_count == 3
    assert await other.fetch(*PATH) == (0, MissReason.EVICTED)
    other.is_empty()
    assert (await other.lookup(*PATH)).hit_count == 0, "it was not there: that is known for a while"


@scenario()
async def test_what_is_dropped_after_it_was_found_is_a_miss(world: World) -> None:
    await world.one.give(*PATH)
    found = await world.other.lookup(*PATH, readers=1)
    assert found.hit_count == 3
    world.engine.drop(1)
    with pytest.raises(DataLoss):
        await redeemed(world.other, found.ticket)
    assert (await world.other.fetch(*PATH))[0] == 0
    world.other.is_empty()


@scenario()
async def test_nobody_waits_for_an_engine_that_stalls(world: World) -> None:
    await world.one.give(*PATH)
    other, loop = world.other, asyncio.get_running_loop()
    world.switches.turn_on(Switch.STALLED)
    began_s = loop.time()
    assert (await other.lookup(*PATH)).hit_count == 0
    assert loop.time() - began_s < 2 * LOOKUP_S
    assert other.controller.stats().counters["redis_late_answers"] == 1
    assert (await other.keep(7)).committed_count == 1, "a store is the node's, whatever engines do"
    world.switches.turn_off()
    assert (await other.lookup(*PATH)).hit_count == 3
    world.switches.turn_on(Switch.STALLED)
    began_s = loop.time()
    assert await other.fetch(*PATH) == (0, MissReason.UNAVAILABLE)
    assert loop.time() - began_s < 3.0, "readers are told before their own deadline"
    assert other.controller.stats().loading_bytes > 0, "bytes may still come: the room is not used again"
    world.switches.turn_off()
    await asyncio.sleep(6.0)
    assert other.controller.stats().loading_bytes == 0
    assert await other.fetch(*PATH) == (3, MissReason.NONE)


@scenario()
async def test_a_caller_in_a_hurry_is_told_what_the_node_has(world: World) -> None:
    other, loop, hurry_s = world.other, asyncio.get_running_loop(), LOOKUP_S / 2
    await other.give(1)
    world.switches.turn_on(Switch.STALLED)
    began_s = loop.time()
    found = await other.controller.lookup_wide(other.query(*PATH), deadline=other.controller.deadline(hurry_s))
    assert found.hit_count == 1
    assert loop.time() - began_s < hurry_s


@scenario()
async def test_an_outage_is_gone_without_and_ends_by_itself(world: World, caplog: pytest.LogCaptureFixture) -> None:
    await world.one.give(*PATH)
    other = world.other
    world.switches.turn_on(Switch.AWAY)
    for token in range(10, 14):
        assert (await other.lookup(token)).hit_count == 0
    asked = other.controller.stats().counters["redis_asked_chunks"]
    found = await other.lookup(*PATH)
    assert (found.hit_count, {run.reason for run in found.runs}) == (0, {MissReason.UNAVAILABLE})
    assert await other.fetch(*PATH) == (0, MissReason.UNAVAILABLE), "it may be there"
    assert other.controller.stats().tier_problem.startswith("tiers.redis: the fake is away")
    assert caplog.text.count("could not be asked") == 1, "one outage is told once"
    assert other.controller.stats().counters["redis_asked_chunks"] == asked, "it is left alone"
    await other.keep(7, 8)
    assert "tiers.redis" in other.controller.parts.movement.problems[0]
    world.switches.turn_off()
    await asyncio.sleep(10.0)
    assert await other.fetch(99) == (0, MissReason.COLD)
    assert await other.fetch(*PATH) == (3, MissReason.NONE)
    await other.controller.parts.movement.retry()
    await other.quiet()
    assert await world.one.fetch(7, 8) == (2, MissReason.NONE), "what was stored meanwhile went there"


def test_a_full_engine_keeps_what_it_has(tmp_path: Path) -> None:
    world = World(tmp_path, capacity_bytes=20_000, evicts=False)
    assert world.one.layout.total_bytes < 20_000 < 2 * world.one.layout.total_bytes

    async def scenario() -> None:
        await world.one.give(1)
        await world.one.keep(2, 3)
        await world.one.quiet()
        counters = world.one.controller.stats().counters
        assert (counters["redis_written_chunks"], counters["redis_refused_chunks"] >= 1) == (1, True)
        assert await world.other.fetch(1) == (1, MissReason.NONE)

    world.run(scenario)


@scenario()
async def test_a_chunk_that_the_chain_lost_meanwhile_is_not_entered_alone(world: World) -> None:
    """Its first chunk fails its check: what follows would hang on nothing."""
    await world.one.give(*PATH)
    spoil(world.engine, world.one, 1)
    assert await world.other.fetch(*PATH) == (0, MissReason.CORRUPT)
    world.other.is_empty()


@scenario()
async def test_an_engine_that_stalls_is_not_asked_on(world: World) -> None:
    await world.one.give(1)
    other = world.other
    assert (await other.lookup(1)).hit_count == 1
    world.switches.turn_on(Switch.STALLED)
    assert await other.fetch(1) == (0, MissReason.UNAVAILABLE)
    asked = other.controller.stats().counters["redis_asked_chunks"]
    assert (await other.lookup(2)).hit_count == 0
    assert other.controller.stats().counters["redis_asked_chunks"] == asked
    assert "failing" in [each.state for each in other.controller.parts.movement.statistics()]


class TellingTier(EngineTier):
    """Says that it fails once a question was refused, until one is answered: as a bucket that was not there."""

    problem = ""

    async def probe(
        self, storage_keys: Sequence[bytes], timeout_s: float, chains: Sequence[int] = ()
    ) -> Sequence[bool]:
        try:
            found = await super().probe(storage_keys, timeout_s, chains)
        except Unavailable as error:
            self.problem = error.message
            raise
        self.problem = ""
        return found

    def statistics(self) -> TierStatistics:
        found = super().statistics()
        return replace(found, state="failing", reason=self.problem) if self.problem else found


@scenario(lambda world: Node(lambda: TellingTier(world.settings)))
async def test_a_node_without_requests_sees_that_a_tier_is_well_again(node: Node, world: World) -> None:
    movement = node.controller.parts.movement
    world.switches.turn_on(Switch.AWAY)
    await node.lookup(1)
    await asyncio.sleep(60.0)
    assert movement.statistics()[-1].state == "failing"
    assert movement.problems
    world.switches.turn_off()
    await asyncio.sleep(20.0)
    assert movement.statistics()[-1].state == "up"
    assert not movement.problems
    asked = node.controller.stats().counters
    await asyncio.sleep(60.0)
    assert node.controller.stats().counters == asked, "one that is well is asked for nothing"


@scenario()
async def test_a_refusal_is_told_no_longer_than_something_is_lacking(world: World) -> None:
    """Nothing is written there any more that would be taken, and tell that."""
    movement = world.one.controller.parts.movement
    world.switches.turn_on(Switch.AWAY)
    await world.one.keep(1)
    await asyncio.sleep(10.0)
    assert movement.problems
    movement.removal.remove(world.one.row(1), MissReason.EVICTED)
    world.switches.turn_off()
    await asyncio.sleep(60.0)
    assert not movement.problems


@scenario()
async def test_a_part_of_an_engine_that_fails_costs_its_chunks_and_no_others(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A node of a cluster died, and refuses at once what the others take their time for."""
    node = world.one
    written, lost = node.shared[0].write, set[bytes]()

    async def write(header: ChunkHeader, layout: ChunkLayout, pieces: Sequence[Any]) -> None:
        if header.storage_key[0] % 3:
            lost.add(header.storage_key)
            raise Unavailable("connection refused", **{PART: True})
        await asyncio.sleep(0.01)
        await written(header, layout, pieces)

    monkeypatch.setattr(node.shared[0], "write", write)
    await node.keep(*range(1, 13))
    await asyncio.sleep(1.0)
    assert len(lost) > 3
    assert len(world.engine.values) == 12 - len(lost)
    movement = node.controller.parts.movement
    [shared] = movement.shared_tiers.tiers
    assert shared.is_asked
    assert not [each.message for each in caplog.records if "takes" in each.message], "not once for each chunk"
    found = await node.controller.settle(node.query(*range(1, 13)), 1.0, Durability.MEMORY)
    assert "connection refused" in found.missing[Durability.SHARED]


@scenario()
async def test_a_canary_goes_through_a_shared_tier_and_leaves_nothing(world: World) -> None:
    """Of one that fails it says why; one that a limit stops says nothing."""
    node = world.one
    canaries, shared = node.controller.parts.movement.canaries, node.controller.parts.movement.shared_tiers.tiers[0]

    def counted() -> tuple[int, int]:
        counters = node.controller.stats().counters
        return counters["canary_passes"], counters["canary_failures"]

    assert await canaries.shared_canary(shared)
    assert counted() == (1, 0)
    assert not world.engine.values
    for switch in (Switch.CORRUPT, Switch.GARBLED, Switch.ABSENT):
        world.switches.turn_on(switch)
        assert await canaries.shared_canary(shared) is False
    assert counted() == (1, 3)
    assert shared.is_asked, "its reads are checked anyway"
    world.switches.turn_on(Switch.AWAY)
    for _ in range(3):
        assert await canaries.shared_canary(shared) is False
    assert not shared.is_asked
    assert await canaries.shared_canary(shared) is None, "it is left alone"
    world.switches.turn_off()
    await asyncio.sleep(10.0)
    assert await canaries.shared_canary(shared)
    before = counted()
    shared.write_policy = WritePolicy.NEVER
    assert await canaries.shared_canary(shared) is None
    assert counted() == before
    assert not world.engine.values


@scenario()
async def test_canaries_do_not_pile_up_where_nothing_may_be_removed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    movement = world.one.controller.parts.movement
    canaries, shared = movement.canaries, movement.shared_tiers.tiers[0]

    async def refuse(_: object) -> None:
        raise Unavailable("this node may not delete")

    with monkeypatch.context() as patch:
        patch.setattr(shared.tier, "remove", refuse)
        assert await canaries.shared_canary(shared), "it went through"
        for _ in range(3):
            assert await canaries.shared_canary(shared) is None
            assert len(world.engine.values) == 1
    assert shared.is_asked
    assert await canaries.shared_canary(shared)
    assert not world.engine.values


@scenario()
async def test_nor_where_a_tier_goes_away_once_it_has_taken_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    movement = world.one.controller.parts.movement
    canaries, shared = movement.canaries, movement.shared_tiers.tiers[0]
    write = shared.tier.write

    async def taken(*arguments: Any) -> None:
        await write(*arguments)
        world.switches.turn_on(Switch.AWAY)
        raise Unavailable("no answer came")

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(shared.tier, "write", taken)
            assert await canaries.shared_canary(shared) is False
        world.switches.turn_off()
        assert len(world.engine.values) == 1
    assert await canaries.shared_canary(shared)
    assert not world.engine.values


@scenario(lambda tmp_path: World(tmp_path, capacity_bytes=100, evicts=False))
async def test_a_limit_that_is_reached_is_no_canarys_failure(world: World) -> None:
    movement = world.one.controller.parts.movement
    assert await movement.canaries.shared_canary(movement.shared_tiers.tiers[0]) is None
    assert world.one.controller.stats().counters["canary_failures"] == 0
