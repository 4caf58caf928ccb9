"""What the scrub does with bytes that went bad in memory, and with chunks that go while it reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.config import PolicySettings
from kvstore.controller.operators import Operators
from kvstore.movement.checks import ROUND_S_MIN
from kvstore.spec import MissReason, StoreState
from tests.controller.service import Service, soon
from tests.scenario import scenario
from tests.simulated import InlineWorkers
from tests.tiers.service import DeviceService


class Gate(InlineWorkers):
    """Lets some jobs pass; later ones wait until it opens."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: float = inf
        self.waiting: list[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = []

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        self.passes -= 1
        if self.passes >= 0:
            return super().submit(function, *args)
        future: Future[Any] = Future()
        self.waiting.append((future, function, args))
        return future

    def open(self) -> None:
        self.passes = inf
        for future, function, args in self.waiting:
            future.set_result(function(*args))


@pytest.mark.parametrize("piece", [0, 1, 2])
async def test_rot_in_memory_is_found_and_goes(piece: int) -> None:
    """A flipped bit in a header or a slab: until then nobody asked for it, afterwards nobody gets it."""
    service = Service()
    session = service.controller.open_session()
    await service.store(session, 1, 2)
    memory, checks = service.controller.parts.movement.memory, service.controller.parts.movement.checks
    first, second = sorted(memory.rows())
    assert await checks.check(memory, first)
    memory.placement(second).pieces[piece][7] ^= 16
    assert not await checks.check(memory, second)
    result = service.controller.fetches.fetch(session, service.query(1, 2))
    assert (result.hit_count, result.reason) == (1, MissReason.CORRUPT)
    service.controller.release(session, [result.lease_id])
    await service.store(session, 1, 2)
    assert service.controller.fetches.fetch(session, service.query(1, 2)).hit_count == 2


async def test_a_chunk_that_a_round_reads_makes_room() -> None:
    """All of memory is one chain, and its last chunk is being read: the chain goes for a store all the same. The bytes
    stay until they were read, the chunk's place in the catalog is another's by then; neither is blamed."""
    gate = Gate()
    service = Service(chunks=3, workers=gate)
    session, parts = service.controller.open_session(), service.controller.parts
    await service.store(session, 1, 2, 3)
    gate.passes = 2 * len(service.layout.slabs)
    rounds = asyncio.ensure_future(parts.movement.checks.round())
    for _ in range(2):
        await asyncio.sleep(0.001)
        service.clock.advance(1)
    await soon(lambda: bool(gate.waiting))
    try:
        shown = await Operators(parts, service.controller).chunk(service.query(1, 2, 3).digests[-1].hex(), None)
        states = (await service.reserve(session, 5, 6)).states
    finally:
        gate.open()  # nobody gives up a job that runs
    assert [part.hold_count for part in shown.parts] == [0], "a check is no user of a chunk"
    assert states == (StoreState.WANTED, StoreState.WANTED)
    await asyncio.sleep(0.001)
    service.clock.advance(1)
    await rounds
    counters = parts.counters.snapshot()
    assert not counters.get("scrub_failures")
    assert not counters.get("quarantined_chunks")


async def test_what_a_check_finds_is_no_news_of_the_chunk_that_has_the_row_by_then() -> None:
    """A rotten chunk left while it was read: nothing is quarantined or counted, and the other one is not written."""
    gate = Gate()
    service = Service(workers=gate)
    session, parts = service.controller.open_session(), service.controller.parts
    memory, checks, table = parts.movement.memory, parts.movement.checks, parts.catalog.table
    written: list[int] = []
    checks._writes = [SimpleNamespace(add=written.append)]
    await service.store(session, 1)
    (row,) = memory.rows()
    memory.placement(row).pieces[1][7] ^= 16
    gate.passes = 0
    check = asyncio.ensure_future(checks.check(memory, row))
    await soon(lambda: bool(gate.waiting))
    gate.passes = inf
    parts.movement.removal.remove(row, MissReason.EVICTED)
    await service.store(session, 2)
    assert table.digests[row] == service.query(2).digests[0], "the row was given to another"
    gate.open()
    await check
    counters = parts.counters.snapshot()
    assert (written, counters.get("scrub_failures", 0), counters.get("quarantined_chunks", 0)) == ([], 0, 0)
    assert service.controller.fetches.fetch(session, service.query(2)).hit_count == 1


@scenario(lambda: DeviceService())
async def test_where_little_is_stored_it_is_not_read_all_the_time(service: DeviceService) -> None:
    checks, counters = service.parts.movement.checks, service.parts.counters
    checks._policies = PolicySettings()
    await service.keep(1, 2)
    await asyncio.sleep(ROUND_S_MIN / 2)
    for round_count in range(1, 4):
        assert counters.snapshot()["scrubbed_bytes"] == 4 * round_count * service.layout.total_bytes
        await asyncio.sleep(ROUND_S_MIN)
