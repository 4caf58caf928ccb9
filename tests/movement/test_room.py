"""Room in memory for a chunk that is larger than those that lie there: neighbours go for it, not nearly all of them."""

from __future__ import annotations

import random

import pytest

from kvstore.catalog import ROOT_ROW
from kvstore.chunk import layout_of
from kvstore.spec import CacheKind, MissReason
from tests.controller.service import Service
from tests.scenario import scenario
from tests.specs import small_spec
from tests.tiers.service import KIB, DeviceService

CHUNK_COUNT = 300
LARGE = layout_of(small_spec(chunk_tokens=1024), CacheKind.KV, 1024)
"""Eleven small chunks; each of its two slabs is five."""


async def full_of(*, chain_count: int) -> Service:
    """Memory full of small chunks in chains of equal length, whose order of use says nothing of where they lie."""
    service = Service(chunks=CHUNK_COUNT)
    session = service.controller.open_session()
    depth = CHUNK_COUNT // chain_count
    paths = [tuple(range(number, number + depth)) for number in range(0, CHUNK_COUNT, depth)]
    for path in paths:
        await service.store(session, *path)
    random.Random(1).shuffle(paths)
    for path in paths:
        assert service.check(session, *path) == depth
    return service


@pytest.mark.parametrize("chain_count", [CHUNK_COUNT, CHUNK_COUNT // 3])
async def test_neighbours_go_for_a_larger_chunk_and_leave_no_child_behind(chain_count: int) -> None:
    service = await full_of(chain_count=chain_count)
    movement, catalog = service.parts.movement, service.parts.catalog
    assert movement.room.allocate(LARGE.piece_bytes, frozenset()) is not None
    rows = list(movement.memory.rows())
    assert len(rows) >= CHUNK_COUNT * 3 // 4
    parents = [catalog.table.parents[row] for row in rows]
    assert all(parent == ROOT_ROW or catalog.is_visible(parent) for parent in parents)


async def test_neighbours_that_are_in_use_stay() -> None:
    """Every fourth chunk is: no room for a slab is free of them. The others go one by one, and it is not enough."""
    service = await full_of(chain_count=CHUNK_COUNT)
    movement, table = service.parts.movement, service.parts.catalog.table
    held, kept = set(range(0, CHUNK_COUNT, 8)), frozenset(range(4, CHUNK_COUNT, 8))
    for row in held:
        table.hold(row)
    assert movement.room.allocate(LARGE.piece_bytes, kept) is None
    assert set(movement.memory.rows()) == held | kept


async def test_neighbours_that_no_slower_tier_has_stay_where_they_are_to_be_written_first() -> None:
    service = await full_of(chain_count=CHUNK_COUNT)
    movement = service.parts.movement
    for row in range(0, CHUNK_COUNT, 2):
        movement.removal.remove(row, MissReason.EVICTED)
    assert movement.room.allocate(LARGE.piece_bytes, frozenset(), evict_unwritten=False) is None
    assert len(list(movement.memory.rows())) == CHUNK_COUNT // 2


async def test_what_is_being_stored_among_neighbours_stays() -> None:
    """No row of the catalog has its place yet."""
    service = await full_of(chain_count=CHUNK_COUNT)
    movement, arena = service.parts.movement, service.arena
    others = []
    for row in range(0, CHUNK_COUNT, 4):
        movement.removal.remove(row, MissReason.EVICTED)
        others.append(arena.allocate(service.layout.piece_bytes))
    assert movement.room.allocate(LARGE.piece_bytes, frozenset()) is None
    assert arena.chunk_count == len(others)


@scenario(lambda: DeviceService(arena_chunks=CHUNK_COUNT, capacity_bytes=16 * 1024 * KIB, region_bytes=1024 * KIB))
async def test_neighbours_that_only_memory_has_stay_while_others_can_go(service: DeviceService) -> None:
    """Their writes are on their way, and stores wait for these. The others come back from the device."""
    for number in range(CHUNK_COUNT):
        await service.keep(number)
    numbers = list(range(CHUNK_COUNT))
    random.Random(1).shuffle(numbers)
    for number in numbers:
        service.check(service.session, number)
    movement, alone = service.parts.movement, list(service.mapped.rows())[::8]
    for row in alone:
        movement.removal.drop(service.device, row, MissReason.EVICTED)
    assert movement.room.allocate(LARGE.piece_bytes, frozenset()) is not None
    assert all(row in service.mapped for row in alone)
    assert len(list(service.mapped.rows())) >= CHUNK_COUNT * 3 // 4
