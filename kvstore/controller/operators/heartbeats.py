"""Heartbeats: a request that waits long for a tier, or for its turn, repeats its last report meanwhile. Its caller can
tell a slow tier from a service that is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import TypeVar

HEARTBEAT_S = 2.0
"""Longest silence of a request."""
Report = TypeVar("Report")


async def with_heartbeats(reports: AsyncGenerator[Report], latest: Report) -> AsyncGenerator[Report]:
    """Give the reports as they come. While none comes for ``HEARTBEAT_S``, give the latest one again; ``latest`` stands
    for it before the first. A caller that goes ends the request where it is."""
    try:
        while True:
            step = asyncio.ensure_future(anext(reports, None))  # seam: it ends before this generator does
            try:
                while not (await asyncio.wait([step], timeout=HEARTBEAT_S))[0]:
                    yield latest
            finally:
                await _ended(step)
            report = step.result()
            if report is None:
                return
            latest = report
            yield latest
    finally:
        await reports.aclose()


async def _ended(step: asyncio.Future[Report | None]) -> None:
    """Cancel a step that is not done, and wait for its end: a generator cannot be closed while it runs."""
    if not step.done():
        step.cancel()
        with suppress(asyncio.CancelledError):
            await step
