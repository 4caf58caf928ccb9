"""An operator's moves of chunks to several tiers at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from kvstore.movement import ChunkStep, Transit
from tests.controller.service import Service


class MetTarget:
    """Writes to a tier that are through once every tier is waited for."""

    def __init__(self, others: asyncio.Barrier) -> None:
        self._others = others
        self.rows: Sequence[int] = ()

    async def through(self, rows: Sequence[int], timeout_s: float) -> bool:
        self.rows = rows
        try:
            async with asyncio.timeout(timeout_s):
                await self._others.wait()
        except TimeoutError:
            return False
        return True


async def test_a_slow_tier_takes_no_time_from_the_others() -> None:
    """A wait for chunks of several tiers takes as long as it was told, and not so long for each tier."""
    relocation = Service().parts.movement.relocation
    barrier = asyncio.Barrier(2)
    first: Any = MetTarget(barrier)
    second: Any = MetTarget(barrier)
    ways = [(1, first), (2, second), (3, first), (4, None)]
    steps = [ChunkStep(row, (0, b""), to, Transit.WRITTEN, False, False) for row, to in ways]
    assert await relocation.wait(steps, 0.5)
    assert (first.rows, second.rows) == ([1, 3], [2])
    assert await relocation.wait(steps[3:], 0.5)
