"""How late a pool of workers is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvstore.tiers.pace import Pace
from tests.simulated.clock import ManualClock


@pytest.mark.parametrize(("thread_count", "late_s"), [(0, 3.0), (1, 0.0), (2, 3.0)])
def test_a_job_waits_for_others_where_they_have_all_threads(thread_count: int, late_s: float) -> None:
    """Where a thread is free a job is late by itself. It asks nothing of others: a load begins thousands."""

    async def scenario() -> None:
        clock, pace = ManualClock(), Pace(thread_count)
        jobs: list[asyncio.Future[Any]] = [asyncio.get_running_loop().create_future() for _ in range(2)]
        pace.began(jobs[0], clock, 30.0)
        pace.began(jobs[1], clock)
        clock.advance(3.0)
        assert pace.stalled_s(clock) == late_s

    asyncio.run(scenario())
