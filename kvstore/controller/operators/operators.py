"""What operators ask, one method per question."""

from __future__ import annotations

from collections.abc import AsyncIterator

from kvstore.controller.operators.listing import Listing
from kvstore.controller.operators.selection import Chosen
from kvstore.controller.operators.showing import Showing
from kvstore.controller.operators.turns import Turns
from kvstore.controller.operators.values import ListPage, Selection, ShownChunk
from kvstore.controller.parts import Parts
from kvstore.movement import TierAccount
from kvstore.seams import Deadline


class Operators:
    """Answers one tenant's operators. Every method runs on the event loop's thread. Raises: InvalidRequest for a model,
    tier or chunk that is not there or not the only one."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._started_s = parts.clock.monotonic()
        self._turns = Turns(parts.clock)
        self._listing = Listing(parts, self._turns)
        self._showing = Showing(parts, self._turns, self._listing)

    @property
    def tenant(self) -> str:
        return self._parts.keys.tenant

    def tiers(self) -> list[TierAccount]:
        """What each tier has, takes and lacks, the fastest first."""
        return self._parts.movement.accounts()

    @property
    def absent(self) -> list[str]:
        """Why tiers that are configured are not in use."""
        return list(self._parts.movement.absent)

    def chunks(self, selection: Selection, limit: int) -> AsyncIterator[ListPage]:
        """The first ``limit`` chunks that are selected, then the totals of all of them, by model and tier."""
        return self._listing.pages(self._chosen(selection), limit)

    async def chunk(self, digest: str, remaining_s: float | None) -> ShownChunk:
        """All that is known of the one chunk whose digest begins so. ``remaining_s``: how long its caller waits for the
        header, which is read from a tier."""
        deadline: Deadline = self._parts.deadline(remaining_s)
        return await self._showing.chunk(digest, deadline)

    def _chosen(self, selection: Selection) -> Chosen:
        return Chosen(self._parts, selection, self._parts.clock.monotonic() - self._started_s)
