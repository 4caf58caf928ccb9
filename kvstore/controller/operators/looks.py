"""Looks: an operator has copies read again, each within a bound of time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kvstore.catalog import Catalog
from kvstore.seams import Clock

LOOK_S_MAX = 60.0
"""A tier that was waited for so long, and gave no copy meanwhile, is not asked again."""


class Looks:
    """The looks of one change. A tier that stalls is waited for once, not for each of its copies."""

    def __init__(self, catalog: Catalog, clock: Clock) -> None:
        self._catalog = catalog
        self._clock = clock
        self._waited_s: dict[str, float] = {}
        """Tier -> the seconds that it was waited for since it last gave a copy. Waits for other tiers do not count."""

    async def look(self, tier: str, row: int, look: Callable[[], Awaitable[bool | None]]) -> bool | None:
        """Read one copy: True when it is sound, False when it is damaged, None when the tier did not give it or is not
        asked any more. A look that takes too long goes on alone, and holds its chunk until it has ended."""
        waited_s, asked_s = self._waited_s.get(tier, 0.0), self._clock.monotonic()
        left_s = LOOK_S_MAX - waited_s
        if left_s <= 0:
            return None
        self._catalog.table.hold(row)
        task = asyncio.ensure_future(look())  # seam: it ends with the tier's answer
        task.add_done_callback(lambda _: self._catalog.unhold(row))
        await asyncio.wait([task], timeout=left_s)
        found = task.result() if task.done() else None
        self._waited_s[tier] = waited_s + self._clock.monotonic() - asked_s if found is None else 0.0
        return found
