"""What the DRAM tier has beyond the contract."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from kvstore.arena import Arena, Placement
from kvstore.errors import KVStoreError, Unavailable
from kvstore.seams import FaultPoints
from kvstore.tiers.dram import DramTier
from tests.contracts.chunks import SMALL, Chunk, balance, chunk, holds, write
from tests.contracts.evictors import KeepsAll
from tests.simulated import BytearrayMemory, InlineWorkers

CAPACITY_BYTES = 8 * SMALL.total_bytes


class _Refusing(InlineWorkers):
    """Takes no job while it is told so."""

    refuses = False

    def submit(self, function: Callable[..., Any], /, *args: object) -> Future[Any]:
        if self.refuses:
            raise RuntimeError("no thread")
        return super().submit(function, *args)


def arena() -> Arena:
    return Arena(BytearrayMemory(), FaultPoints(), capacity_bytes=CAPACITY_BYTES, region_bytes=CAPACITY_BYTES)


class _Poor(BytearrayMemory):
    """Shares memory for the generations, and no more."""

    def read_only_to_others(self, name: str, byte_count: int) -> Any:
        if "region" in name:
            raise Unavailable("cannot share memory")
        return super().read_only_to_others(name, byte_count)


def test_a_machine_that_shares_no_memory_has_no_room_and_says_so() -> None:
    memory = Arena(_Poor(), FaultPoints(), capacity_bytes=CAPACITY_BYTES, region_bytes=CAPACITY_BYTES)
    tier = DramTier(memory, InlineWorkers())

    async def scenario() -> None:
        await tier.recover(KeepsAll())
        assert not tier.has_room(SMALL)
        with pytest.raises(KVStoreError):
            await write(tier, chunk(1))
        balance(tier)

    asyncio.run(scenario())


def put(memory: Arena, what: Chunk) -> Placement:
    """What a store does: bytes into extents of its own."""
    placement = memory.allocate(what.layout.piece_bytes)
    assert placement is not None
    for target, source in zip(placement.pieces, what.pieces, strict=True):
        np.copyto(target, source)
    return placement


def test_extents_that_somebody_else_filled_become_a_copy() -> None:
    memory = arena()
    tier = DramTier(memory, InlineWorkers())

    async def scenario() -> None:
        await tier.recover(KeepsAll())
        placement = put(memory, chunk(1))
        assert tier.statistics().chunk_count == 0
        balance(tier)
        residency = tier.adopt(placement)
        assert tier.placement(residency) is placement
        assert await holds(tier, chunk(1), residency)
        assert tier.statistics().chunk_count == 1
        assert tier.statistics().written_bytes == 0
        stored = await tier.open(chunk(1).name, residency)
        tier.remove([residency])
        assert memory.used_bytes == placement.byte_count, "its extents are a reader's"
        assert tier.statistics().chunk_count == 0
        await stored.check(range(2))
        stored.close()
        assert memory.used_bytes == 0
        with pytest.raises(KeyError):
            tier.placement(residency)

    asyncio.run(scenario())


def test_a_job_that_no_mover_takes_changes_nothing() -> None:
    memory, workers = arena(), _Refusing()
    tier = DramTier(memory, workers)

    async def scenario() -> None:
        await tier.recover(KeepsAll())
        residency = await write(tier, chunk(1))
        used = memory.used_bytes
        stored = await tier.open(chunk(1).name, residency)
        target = [np.empty(slab.byte_count, np.uint8) for slab in SMALL.slabs]
        workers.refuses = True
        for refused in (write(tier, chunk(2)), stored.read(range(2), target), stored.check(range(2))):
            with pytest.raises(KVStoreError):
                await refused
        workers.refuses = False
        stored.close()
        assert memory.used_bytes == used
        assert tier.statistics().chunk_count == 1
        balance(tier)
        assert await holds(tier, chunk(1), residency)
        assert await holds(tier, chunk(2), await write(tier, chunk(2)))

    asyncio.run(scenario())
