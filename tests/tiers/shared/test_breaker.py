"""A tier that failed is left alone for a while, and said to be failing until it has answered."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.errors import Unavailable
from kvstore.movement.breaker import FAILURE_COUNT, PAUSE_S_MAX, PAUSE_S_MIN
from kvstore.movement.canary import ASK_INTERVAL_S
from tests.fakes import Switch
from tests.scenario import scenario
from tests.tiers.shared.world import World


@scenario()
async def test_calls_that_fail_together_keep_a_tier_away_no_longer_than_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server hung with writes and reads on their way, and another is in its place by now."""
    node = world.one
    [shared] = node.controller.parts.movement.shared_tiers.tiers
    ends, count = asyncio.Event(), 0

    async def write(*_: object) -> None:
        nonlocal count
        await ends.wait()
        count += 1
        raise Unavailable("it hung")

    monkeypatch.setattr(node.shared[0], "write", write)
    await node.keep(*range(1, 13))
    await asyncio.sleep(0.1)
    ends.set()
    await asyncio.sleep(0.1)
    assert count > FAILURE_COUNT + 3
    assert not shared.is_asked
    await asyncio.sleep(PAUSE_S_MIN)
    assert shared.is_asked


@scenario()
async def test_a_tier_says_since_when_it_fails_and_why(world: World) -> None:
    movement, other = world.other.controller.parts.movement, world.other
    await asyncio.sleep(30.0)
    assert movement.statistics()[-1].state_s >= 25.0
    world.switches.turn_on(Switch.AWAY)
    for token in range(10, 13):
        await other.lookup(token)
        await asyncio.sleep(1.0)
    await other.lookup(13)
    for found in (movement.statistics()[-1], movement.accounts()[-1].stats):
        assert (found.state, found.state_s) == ("failing", 3.0), "since the first of the failures"
        assert found.reason
    assert movement.accounts()[-1].problem == movement.statistics()[-1].reason
    world.switches.turn_off()
    await asyncio.sleep(10.0)
    await other.lookup(14)
    await movement.retry()
    await asyncio.sleep(5.0)
    found = movement.statistics()[-1]
    assert (found.state, found.reason) == ("up", "")
    assert found.state_s <= 15.0


@scenario()
async def test_a_tier_that_failed_is_failing_until_it_has_answered_also_without_requests(world: World) -> None:
    other = world.other
    world.switches.turn_on(Switch.AWAY)
    for token in range(10, 10 + FAILURE_COUNT):
        await other.lookup(token)
    [shared] = other.controller.parts.movement.shared_tiers.tiers
    for _ in range(100):
        await asyncio.sleep(0.1)
        assert shared.statistics().state == "failing"
    world.switches.turn_off()
    await asyncio.sleep(PAUSE_S_MAX + ASK_INTERVAL_S)
    assert (shared.statistics().state, shared.failing_since_s()) == ("up", None)


@scenario()
async def test_a_tier_that_stalls_says_so(world: World) -> None:
    await world.one.give(1)
    await world.other.lookup(1)
    world.switches.turn_on(Switch.STALLED)
    await world.other.fetch(1)
    await asyncio.sleep(1.0)
    found = world.other.controller.parts.movement.statistics()[-1]
    assert found.state == "failing"
    assert found.state_s >= 2.0
    assert found.reason
