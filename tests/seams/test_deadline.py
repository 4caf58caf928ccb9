"""A wait is bounded by the call's own limit, and by the time in which its caller hears the answer."""

from __future__ import annotations

import pytest

from kvstore.seams.deadline import Deadline
from tests.simulated import ManualClock


@pytest.mark.parametrize(
    ("remaining_s", "answerable_s"),
    [(None, 10.0), (60.0, 10.0), (20.0, 10.0), (4.0, 2.0), (0.0, 0.0)],
    ids=["for ever", "long", "twice the limit", "short", "gone"],
)
def test_a_wait_that_is_answered_takes_half_of_its_callers_time(remaining_s: float | None, answerable_s: float) -> None:
    """A caller who waits far longer than the call's own limit costs the wait nothing."""
    assert Deadline.of(ManualClock(), remaining_s, 10.0).answerable_s == answerable_s


def test_it_never_is_less_than_nothing() -> None:
    clock = ManualClock()
    deadline = Deadline.of(clock, 1.0, 10.0)
    clock.advance(2.0)
    assert deadline.answerable_s == 0.0
