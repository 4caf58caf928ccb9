"""What lookups cost while shared tiers stand still, or answer late."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvstore.movement.breaker import FAILURE_COUNT, PAUSE_S_MIN
from kvstore.movement.questions import LATE_COUNT_MAX, SILENT_BOUNDS, SILENT_S_MAX
from kvstore.movement.shared import DOUBTS_PER_BOUND
from kvstore.spec import Tier
from tests.fakes import Switch
from tests.scenario import scenario
from tests.tiers.shared.world import LOOKUP_S, PATH, Node, Wide, World, run, tiers_of


async def took_s(node: Node, *path: int) -> float:
    began_s = asyncio.get_running_loop().time()
    await node.lookup(*path)
    return asyncio.get_running_loop().time() - began_s


@pytest.mark.parametrize("still", [("redis",), ("s3",), ("redis", "s3")])
def test_a_lookup_waits_for_one_bound_however_many_tiers_stand_still(tmp_path: Path, still: tuple[str, ...]) -> None:
    wide = Wide(tmp_path)
    node = wide.node()

    async def scenario() -> None:
        for name in still:
            {"redis": wide.redis, "s3": wide.s3}[name].turn_on(Switch.STALLED)
        assert await took_s(node, 1) == pytest.approx(LOOKUP_S)

    run([node], scenario)


def test_lookups_wait_a_few_times_for_a_tier_that_stands_still_and_then_do_without(tmp_path: Path) -> None:
    """It is tried again, less and less often, and hardly waited for. The tier behind it serves them meanwhile."""
    wide = Wide(tmp_path)
    one, other = wide.node(), wide.node()

    async def scenario() -> None:
        await one.give(*PATH)
        wide.redis.turn_on(Switch.STALLED)
        waits_s = [await took_s(other, token) for token in range(100, 100 + 2 * SILENT_BOUNDS)]
        assert sum(waits_s) <= (SILENT_BOUNDS + 2) * LOOKUP_S
        assert waits_s[-1] < LOOKUP_S / 2
        assert tiers_of(await other.lookup(*PATH)) == [(Tier.S3, len(PATH))]
        waits_s = []
        for token in range(200, 400):  # 20 s
            waits_s.append(await took_s(other, token))
            await asyncio.sleep(0.1)
        assert max(waits_s) == pytest.approx(LOOKUP_S / DOUBTS_PER_BOUND)
        assert 3 <= sum(each > 0.0 for each in waits_s) < 10 * SILENT_BOUNDS / 2
        found = other.controller.parts.movement.statistics()[-2]
        assert (found.name, found.state) == ("redis", "failing")

    run([one, other], scenario)


@scenario()
async def test_a_tier_that_answers_again_is_asked_at_once(world: World) -> None:
    """It need not have failed: one that owed an answer has given it."""
    await world.one.give(*PATH)
    world.switches.turn_on(Switch.STALLED)
    for token in range(100, 100 + 2 * SILENT_BOUNDS):
        await world.other.lookup(token)
    world.switches.turn_off()
    await asyncio.sleep(0.02)
    assert (await world.other.lookup(*PATH)).hit_count == len(PATH)


@scenario()
async def test_a_tier_that_failed_is_hardly_waited_for_until_it_has_answered(world: World) -> None:
    """Its first answer takes longer than a lookup waits then: the next lookup has it, and waits as ever."""
    await world.one.give(*PATH)
    other, tier, real = world.other, world.other.shared[0], world.other.shared[0].probe
    world.switches.turn_on(Switch.AWAY)
    for token in range(100, 100 + FAILURE_COUNT):
        await other.lookup(token)
    world.switches.turn_off()
    await asyncio.sleep(PAUSE_S_MIN)

    async def slow(*asked: Any) -> Any:
        await asyncio.sleep(LOOKUP_S / 2)
        return await real(*asked)

    tier.probe = slow
    assert await took_s(other, *PATH) == pytest.approx(LOOKUP_S / DOUBTS_PER_BOUND)
    await asyncio.sleep(LOOKUP_S)
    assert (await other.lookup(*PATH)).hit_count == len(PATH)
    assert await took_s(other, 200) == pytest.approx(LOOKUP_S / 2)


@scenario()
async def test_a_late_answer_serves_the_next_lookup(world: World) -> None:
    await world.one.give(*PATH)
    tier, real = world.other.shared[0], world.other.shared[0].probe

    async def slow(*asked: Any) -> Any:
        await asyncio.sleep(2 * LOOKUP_S)
        return await real(*asked)

    tier.probe = slow
    assert (await world.other.lookup(*PATH)).hit_count == 0
    await asyncio.sleep(2 * LOOKUP_S)
    assert await took_s(world.other, *PATH) == 0.0
    assert (await world.other.lookup(*PATH)).hit_count == len(PATH)
    counters = world.other.controller.stats().counters
    assert (counters["redis_asked_chunks"], counters["redis_late_answers"]) == (len(PATH), 1)


@scenario()
async def test_a_late_answer_changes_nothing_that_a_read_found_out_meanwhile(world: World) -> None:
    other = world.other
    tier, real, shared_tiers = other.shared[0], other.shared[0].probe, other.controller.parts.movement.shared_tiers

    async def slow(*asked: Any) -> Any:
        await asyncio.sleep(2 * LOOKUP_S)
        return await real(*asked)

    tier.probe = slow
    world.switches.turn_on(Switch.LYING)
    assert (await other.lookup(1)).hit_count == 0
    shared_tiers.was_wrong(other.key(1), shared_tiers.tiers[0])
    await asyncio.sleep(2 * LOOKUP_S)
    assert (await other.lookup(1)).hit_count == 0


@scenario()
async def test_a_tier_that_is_slow_and_answers_never_fails(world: World) -> None:
    """Late answers are no failures, however many come in a row: a busy engine is asked on."""
    tier, real = world.other.shared[0], world.other.shared[0].probe

    async def slow(*asked: Any) -> Any:
        await asyncio.sleep(3 * LOOKUP_S)
        return await real(*asked)

    tier.probe = slow
    for token in range(50):
        assert await took_s(world.other, token) == pytest.approx(LOOKUP_S)
    await asyncio.sleep(5.0)
    assert world.other.controller.parts.movement.shared_tiers.tiers[0].is_asked


@scenario()
async def test_few_questions_stay_asked_and_none_once_the_service_stops(world: World) -> None:
    tier, asked, left = world.other.shared[0], set(), []

    async def never(*_: Any) -> Any:
        asked.add(me := object())
        try:
            await asyncio.sleep(3600.0)
        finally:
            asked.discard(me)

    tier.probe = never
    for token in range(6):
        await world.other.lookup(token)
        await asyncio.sleep(0.001)
        left.append(len(asked))
    assert left[LATE_COUNT_MAX - 1 :] == [LATE_COUNT_MAX] * (6 - LATE_COUNT_MAX + 1)
    await world.other.stop()
    assert not asked


@scenario()
async def test_questions_beyond_those_that_stay_asked_end_with_their_lookup_in_the_tier_too(world: World) -> None:
    """A tier's threads are few: one that is given up, and runs on, is one less for the next question."""
    tier, patience_s = world.other.shared[0], []

    async def never(keys: Any, timeout_s: float, *_: Any) -> Any:
        patience_s.append(timeout_s)
        await asyncio.sleep(3600.0)

    tier.probe = never
    await asyncio.gather(*(world.other.lookup(token) for token in range(8)))
    assert sum(each > LOOKUP_S for each in patience_s) == LATE_COUNT_MAX
    assert len(patience_s) == 8


@scenario()
async def test_one_question_that_is_stuck_does_not_hide_a_tier_that_answers(world: World) -> None:
    await world.one.give(*PATH)
    tier, real, asked = world.other.shared[0], world.other.shared[0].probe, []

    async def stuck_once(*arguments: Any) -> Any:
        asked.append(arguments)
        if len(asked) == 1:
            await asyncio.sleep(3600.0)
        return await real(*arguments)

    tier.probe = stuck_once
    await world.other.lookup(100)
    await asyncio.sleep(min(SILENT_BOUNDS * LOOKUP_S, SILENT_S_MAX) + 0.01)
    assert (await world.other.lookup(*PATH)).hit_count == len(PATH), "it was silent, and is asked again"


@pytest.mark.parametrize("is_failure", [False, True])
@scenario()
async def test_a_question_that_ends_with_its_lookup_is_no_failure_of_the_tier(world: World, is_failure: bool) -> None:
    """Also where both ends come at once, on a busy loop. Questions that stay asked fail it."""
    tier, shared = world.other.shared[0], world.other.controller.parts.movement.shared_tiers.tiers[0]

    async def never(*_: Any) -> Any:
        await asyncio.sleep(3600.0)

    tier.probe = never
    await world.other.lookup(1)
    await asyncio.sleep(1.5 * SILENT_S_MAX)
    for _ in range(FAILURE_COUNT):
        await shared._answered([b"key"], LOOKUP_S, never, is_failure=is_failure)
    assert shared.breaker.is_open is is_failure


@scenario()
async def test_a_long_question_hides_no_tier_from_lookups(world: World) -> None:
    """A level of a long chain takes a bucket thousands of requests, and whoever waits for it has the time: meanwhile
    the tier owes lookups nothing."""
    await world.one.give(*PATH)
    tier, real = world.other.shared[0], world.other.shared[0].probe
    shared = world.other.controller.parts.movement.shared_tiers.tiers[0]

    async def slow(keys: Any, *arguments: Any) -> Any:
        await asyncio.sleep(LOOKUP_S / 2 * len(keys))
        return await real(keys, *arguments)

    tier.probe = slow
    long = asyncio.create_task(shared.ask([bytes([number]) * 32 for number in range(200)], 10.0))
    await asyncio.sleep(2 * SILENT_S_MAX)
    assert await took_s(world.other, 1) == pytest.approx(LOOKUP_S / 2)
    await asyncio.sleep(2 * SILENT_S_MAX)
    assert (await world.other.lookup(1)).hit_count == 1
    assert await long == [False] * 200
