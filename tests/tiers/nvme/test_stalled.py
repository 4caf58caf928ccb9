"""A device that answers nobody for half a minute: only who needs its bytes waits, and that not past the deadline."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.movement.sources import STALL_S
from kvstore.spec import MissReason
from tests.scenario import scenario
from tests.tiers.service import DeviceService

STALLED_S = 30.0


@scenario(lambda: DeviceService())
async def test_lookups_memory_hits_and_stores_end_before_a_stalled_read_does(
    service: DeviceService, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, deadline_s = asyncio.get_running_loop(), service.controller.parts.deadline_s
    for number in (1, 2, 4):
        await service.keep(number)
    service.forget_memory()
    assert await service.fetch(2) == (1, MissReason.NONE)  # this one is in memory again
    for workers in (service.nvme._readers, service.nvme._writers):
        monkeypatch.setattr(workers._chance, "uniform", lambda *_: STALLED_S)  # type: ignore[attr-defined]  # simulated
    stalled = asyncio.ensure_future(service.fetch(1))
    await asyncio.sleep(STALL_S / 2)
    since_s = loop.time()
    assert service.controller.lookups.lookup(service.query(1)).hit_count == 1
    assert await service.fetch(2) == (1, MissReason.NONE)
    assert (await service.store(service.session, 3)).committed_count == 1
    assert await service.fetch(3) == (1, MissReason.NONE)
    assert loop.time() == since_s, "something waited"
    assert not stalled.done()

    await asyncio.sleep(STALL_S)
    since_s = loop.time()
    assert await service.fetch(4) == (0, MissReason.UNAVAILABLE)
    assert loop.time() == since_s, "one more waits for a device that answers nobody"
    assert await stalled == (0, MissReason.UNAVAILABLE)
    assert since_s < loop.time() <= deadline_s + 0.1 < STALLED_S

    await asyncio.sleep(3 * STALLED_S)
    monkeypatch.undo()
    await asyncio.sleep(STALLED_S)
    for number in (1, 4):
        assert await service.fetch(number) == (1, MissReason.NONE)
    service.balance()
