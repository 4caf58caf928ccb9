"""Heartbeats: a request that waits long for a tier, or for its turn, reports meanwhile. Its caller can tell a slow tier
from a service that is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from kvstore.controller.operators.values import ChangeNews, Tally

HEARTBEAT_S = 2.0
"""Longest silence of a request."""
NEWS_S = 0.5
"""Seconds between two reports of a change's progress."""
Report = TypeVar("Report")


def with_reports(change: Callable[[Tally], Awaitable[None]]) -> AsyncGenerator[ChangeNews]:
    """Run a change, and report its tally every ``NEWS_S`` seconds, and at its end. A caller that goes ends the change
    where it is."""
    tally = Tally()

    async def last() -> AsyncGenerator[ChangeNews]:
        await change(tally)
        yield ChangeNews(tally, is_last=True)

    return with_heartbeats(last(), ChangeNews(tally), NEWS_S)


async def with_heartbeats(
    reports: AsyncGenerator[Report], heartbeat: Report, silence_s: float = HEARTBEAT_S
) -> AsyncGenerator[Report]:
    """Give the reports as they come. While none comes for ``silence_s`` seconds, give the ``heartbeat``. A caller that
    goes ends the request where it is."""
    try:
        while True:
            step = asyncio.ensure_future(anext(reports, None))  # seam: it ends before this generator does
            try:
                while not (await asyncio.wait([step], timeout=silence_s))[0]:
                    yield heartbeat
            finally:
                await _ended(step)
            report = step.result()
            if report is None:
                return
            yield report
    finally:
        await reports.aclose()


async def _ended(step: asyncio.Future[Report | None]) -> None:
    """Cancel a step that is not done, and wait for its end: a generator cannot be closed while it runs."""
    if not step.done():
        step.cancel()
        with suppress(asyncio.CancelledError):
            await step
