"""Publishers of one start after the other, followed by one router."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kvstore.config import EventSettings
from kvstore.seams import SystemClock
from kvstore.server.publishing import open_publisher
from tests.controller.service import Service
from tests.server.router import Router


async def test_a_router_that_listened_before_a_restart_sees_a_gap_and_begins_anew(tmp_path: Path) -> None:
    """A restart loses what memory alone had: a router that kept its account would send prompts to a node that has
    nothing."""
    router = Router(tmp_path)
    settings = EventSettings(endpoint=f"ipc://{tmp_path}/events", replay_endpoint=f"ipc://{tmp_path}/replay")
    for paths in ([(1, 2), (3,)], [(4,)]):
        service = Service()
        publisher = open_publisher(settings, service.controller, SystemClock())
        assert publisher is not None
        running = asyncio.ensure_future(publisher.run())
        for path in paths:
            await service.store(service.controller.open_session(), *path)
        digests = {digest for path in paths for digest in service.query(*path).digests}
        async with asyncio.timeout(20.0):
            while set(router.known) != digests:
                await asyncio.to_thread(router.catch_up)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        publisher.close()
    router.close()
