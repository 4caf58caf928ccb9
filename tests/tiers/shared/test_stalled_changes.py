"""What operators ask of a tier that answers nobody: it ends, and says what was not done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.controller.operators import Operators, Selection
from kvstore.controller.operators.changes import BATCH_COUNT, BATCH_S_MAX
from kvstore.controller.operators.heartbeats import NEWS_S, with_heartbeats, with_reports
from kvstore.controller.operators.looks import LOOK_S_MAX
from kvstore.controller.operators.operators import LAND_S_MAX
from kvstore.controller.operators.values import ChangeNews, Tally
from kvstore.errors import InvalidRequest
from tests.fakes import Switch
from tests.scenario import scenario
from tests.tiers.service import KIB, DeviceService
from tests.tiers.shared.world import Wide, run

NEVER_S = 1e3
"""Longer than any limit here, and no longer: weakened code waits for each of 192 chunks until then."""
COUNT = 3 * BATCH_COUNT
ROOMY: dict[str, Any] = {"arena_chunks": COUNT, "capacity_bytes": 4096 * KIB, "region_bytes": 512 * KIB}


async def ended(service: DeviceService, changes: AsyncIterator[ChangeNews]) -> tuple[Tally, float]:
    """What became of everything, and how long that took. The caller hears of it all the while."""
    loop = asyncio.get_running_loop()
    since_s = heard_s = loop.time()
    last = ChangeNews(Tally())
    async for news in changes:
        assert loop.time() - heard_s <= NEWS_S + 0.1, "a caller takes a silent service for dead"
        heard_s, last = loop.time(), news
    assert last.is_last
    return last.tally, loop.time() - since_s


def stall(service: DeviceService, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device answers nobody from now on."""
    for workers in (service.nvme._readers, service.nvme._writers):
        monkeypatch.setattr(workers._chance, "uniform", lambda *_: NEVER_S)  # type: ignore[attr-defined]


@scenario(lambda: DeviceService(**ROOMY))
async def test_a_move_to_a_device_that_stalls_ends_and_counts_what_was_not_tried(
    service: DeviceService, monkeypatch: pytest.MonkeyPatch
) -> None:
    stall(service, monkeypatch)
    for token in range(COUNT):
        await service.store(service.session, token)
    operators = Operators(service.parts, service.controller)
    tally, took_s = await ended(service, operators.move(Selection(), "nvme", keep=False, dry_run=False))
    assert tally.counts == {"failed": BATCH_COUNT, "not tried": COUNT - BATCH_COUNT}
    assert tally.problem.startswith("nvme: ")
    assert took_s <= BATCH_S_MAX + 1
    assert service.controller.lookups.lookup(service.query(COUNT - 1)).hit_count == 1, "nothing was given up"


def test_a_drain_into_a_bucket_that_stalls_ends_and_nothing_is_given_up(tmp_path: Path) -> None:
    wide = Wide(tmp_path)
    node = wide.node(redis="never", s3="never", **ROOMY)

    async def scenario() -> None:
        for token in range(COUNT):
            await node.keep(token)
        for switches in (wide.redis, wide.s3):
            switches.turn_on(Switch.STALLED)
        operators = Operators(node.parts, node.controller)
        drain = operators.drain(Selection(tier="nvme"), end=False, service=False, dry_run=False)
        tally, took_s = await ended(node, drain)
        assert sum(tally.counts.values()) == COUNT
        assert tally.counts.keys() <= {"failed", "not tried"}
        assert tally.problem
        assert took_s <= BATCH_S_MAX + LAND_S_MAX + 1
        assert len(node.controller.parts.catalog.table.held()) <= 2 * BATCH_COUNT
        for token in range(COUNT):
            assert node.lookup_now(token) == 1

    run([node], scenario)


def test_a_move_that_gets_on_slowly_is_not_ended(tmp_path: Path) -> None:
    wide = Wide(tmp_path)
    node = wide.node(redis="never", s3="never", **ROOMY)

    async def scenario() -> None:
        for token in range(COUNT):
            await node.keep(token)
        write = node.shared[1].write

        async def slowly(*arguments: Any) -> None:
            await asyncio.sleep(25.0)
            await write(*arguments)

        node.shared[1].write = slowly
        operators = Operators(node.parts, node.controller)
        tally, took_s = await ended(node, operators.move(Selection(), "s3", keep=True, dry_run=False))
        assert tally.counts == {"written": COUNT}
        assert took_s > BATCH_S_MAX

    run([node], scenario)


@scenario(lambda: DeviceService(**ROOMY))
async def test_what_a_stalled_device_has_is_neither_verified_nor_brought_for_ever(
    service: DeviceService, monkeypatch: pytest.MonkeyPatch
) -> None:
    for token in range(COUNT):
        await service.keep(token)
    stall(service, monkeypatch)
    operators = Operators(service.parts, service.controller)
    tally, took_s = await ended(service, operators.verify(Selection(tier="nvme"), dry_run=False))
    assert tally.counts == {"nvme: not read": COUNT}
    assert "was not given" in tally.problem
    assert took_s <= LOOK_S_MAX + 1
    assert service.parts.catalog.table.held(), "the look that has not ended holds its chunk"
    service.forget_memory()
    tally, took_s = await ended(service, operators.move(Selection(), "memory", keep=False, dry_run=False))
    assert set(tally.counts) <= {"failed", "not tried", "no tier answers", "in memory already"}
    assert took_s <= BATCH_S_MAX + 1


@scenario(lambda: DeviceService(**ROOMY))
async def test_what_is_brought_while_the_device_falls_silent_is_told(
    service: DeviceService, monkeypatch: pytest.MonkeyPatch
) -> None:
    for token in range(COUNT):
        await service.keep(token)
    service.forget_memory()
    stall(service, monkeypatch)
    operators = Operators(service.parts, service.controller)
    tally, took_s = await ended(service, operators.move(Selection(), "memory", keep=False, dry_run=False))
    assert tally.counts["not tried"] == COUNT - BATCH_COUNT
    assert sum(tally.counts.values()) == COUNT
    assert "kvstore tiers" in tally.problem
    assert BATCH_S_MAX <= took_s <= BATCH_S_MAX + 1


@scenario(lambda: DeviceService(**ROOMY))
async def test_a_prefetch_from_a_device_that_stalls_is_heard_of(
    service: DeviceService, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.keep(1, 2)
    service.forget_memory()
    stall(service, monkeypatch)
    operators = Operators(service.parts, service.controller)
    tally, took_s = await ended(service, operators.prefetch(service.session, service.query(1, 2), dry_run=False))
    assert tally.counts == {"failed": 2}
    assert NEWS_S < took_s <= BATCH_S_MAX + 1


async def test_a_page_is_told_once_however_long_the_next_one_takes() -> None:
    async def waits() -> AsyncGenerator[str]:
        yield "page"
        await asyncio.sleep(NEVER_S)

    reports = with_heartbeats(waits(), "nothing new", 0.001)
    assert [await anext(reports) for _ in range(3)] == ["page", "nothing new", "nothing new"]
    await reports.aclose()


async def test_a_caller_that_goes_between_two_reports_ends_the_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.controller.operators.heartbeats.NEWS_S", 0.001)
    left: list[str] = []

    async def waits(tally: Tally) -> None:
        try:
            tally.add("begun", 0)
            await asyncio.sleep(NEVER_S)
        finally:
            left.append("left")

    reports = with_reports(waits)
    assert [(await anext(reports)).tally.counts for _ in range(3)] == [{"begun": 1}] * 3
    await reports.aclose()
    assert left == ["left"]


async def test_what_fails_behind_heartbeats_fails() -> None:
    async def fails() -> AsyncGenerator[str]:
        yield "begun"
        raise InvalidRequest("no such thing")

    reports = with_heartbeats(fails(), "nothing new")
    assert await anext(reports) == "begun"
    with pytest.raises(InvalidRequest):
        await anext(reports)
