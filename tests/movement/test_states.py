"""A tier's statistics say for how long it has been in its state."""

from __future__ import annotations

from dataclasses import replace

from kvstore.movement.accounts import TierStates
from kvstore.tiers import TierStatistics
from tests.simulated.clock import ManualClock

UP = TierStatistics("dram", "up", 0, 0, 0, 0, 0, 0, 0, 0, 0)
FAILING = replace(UP, state="failing")


def test_a_tier_that_is_up_at_the_first_look_has_been_up_since_the_start() -> None:
    clock = ManualClock()
    states = TierStates(clock)
    clock.advance(9.0)
    assert states.seen(UP).state_s == 9.0
    clock.advance(1.0)
    assert states.seen(UP).state_s == 10.0


def test_nobody_knows_since_when_a_tier_fails_that_fails_at_the_first_look() -> None:
    clock = ManualClock()
    states = TierStates(clock)
    clock.advance(9.0)
    assert states.seen(FAILING).state_s == 0.0
    clock.advance(2.0)
    assert states.seen(FAILING).state_s == 2.0
    assert states.seen(UP).state_s == 0.0
