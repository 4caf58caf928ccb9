"""Second copies that a start found: where memory has a chunk, and the device only a second copy of it, as the first one
failed its check, whoever gives up the copies of a tier knows of it. And no file stays because of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvstore.controller.operators.selection import Chosen
from kvstore.controller.operators.turns import Turns
from kvstore.controller.operators.values import Selection
from kvstore.movement.clearing import Fate, Meant
from kvstore.movement.relocation import ChunkStep, Transit
from kvstore.spec import Durability, LayerSpec, MissReason
from tests.scenario import scenario
from tests.specs import small_spec
from tests.tiers.nvme.test_erasures import OLD, twice
from tests.tiers.nvme.test_meanwhile import held_up, row_of
from tests.tiers.service import KIB, DeviceService
from tests.tiers.values import ValueService


async def only_a_spare(service: ValueService) -> Callable[[], None]:
    """The device does not take the chunk anew, until the returned function is called."""
    await twice(service)
    row, (name, offset) = service.row(), service.place_of()
    service.disk.flip(service.nvme.regions._directory / name, offset + service.layout.header_bytes)
    go_on = held_up(service, "write", after=False)
    assert not await service.look(row)
    assert row in service.mapped
    assert row not in service.device
    assert row in service.device.spares
    return go_on


async def selected(service: ValueService, tier: str) -> list[int]:
    """The rows that an operator means who names a tier."""
    parts = service.controller.parts
    chosen = Chosen(parts, Selection(tier=tier), 0.0)
    return [row async for rows in chosen.blocks(Turns(parts.clock).begin()) for row in rows.tolist()]


async def clear(service: ValueService, tier: str) -> Fate:
    """As an operator has it: from one tier."""
    row = service.row()
    movement, table = service.controller.parts.movement, service.controller.parts.catalog.table
    space, digest = table.identity(row)
    only = next(each for each in table.copies if each.tier.name == tier)

    async def pause() -> None:
        """Let nobody run: there is nobody else."""

    plan = await movement.clearing.plan(Meant(np.array([row]), np.array([space]), [digest]), only, pause)
    fate, _ = movement.clearing.do(plan, 0)
    assert fate is Fate(plan.fates[0])
    return fate


@scenario(lambda: ValueService())
async def test_a_crash_before_the_first_copy_is_written_anew_finds_the_second(service: ValueService) -> None:
    await only_a_spare(service)
    await service.nvme.tidy()  # what is to be erased is
    await service.restart(kill=True)
    assert await service.get() == OLD
    service.balance()


@scenario(lambda: ValueService())
async def test_memory_gives_way_to_a_second_copy(service: ValueService) -> None:
    """The chunk leaves memory before it was written anew."""
    go_on = await only_a_spare(service)
    service.drop(service.row())
    assert service.row() in service.device
    assert not service.device.spares
    assert await service.get() == OLD
    go_on()
    service.evict()
    assert await service.get() is None
    service.balance()


@scenario(lambda: ValueService())
async def test_who_clears_memory_leaves_the_second_copy(service: ValueService) -> None:
    await only_a_spare(service)
    assert await clear(service, "dram") is Fate.COPY_REMOVED
    await service.restart(kill=True)
    assert await service.get() == OLD
    service.balance()


@scenario(lambda: ValueService())
async def test_who_clears_the_device_clears_the_second_copy(service: ValueService) -> None:
    await only_a_spare(service)
    assert await clear(service, "nvme") is Fate.COPY_REMOVED
    assert await service.get() == OLD
    assert not service.device.spares
    await service.nvme.tidy()
    await service.restart(kill=True)
    assert await service.get() is None
    service.balance()


@scenario(lambda: ValueService())
async def test_who_names_the_device_means_the_second_copy(service: ValueService) -> None:
    await only_a_spare(service)
    assert service.row() in await selected(service, "nvme")


@scenario(lambda: ValueService())
async def test_who_moves_a_chunk_off_the_node_leaves_no_second_copy(service: ValueService) -> None:
    await only_a_spare(service)
    row = service.row()
    movement, table = service.controller.parts.movement, service.controller.parts.catalog.table
    step = ChunkStep(row, table.identity(row), None, Transit.THERE, frees=True, is_held=False)
    assert movement.relocation.free(step, table.copies)
    assert await service.get() is None
    assert not service.device.spares
    service.balance()


@scenario(lambda: ValueService())
async def test_memory_that_gives_way_to_a_second_copy_demotes_the_chunk(service: ValueService) -> None:
    await only_a_spare(service)
    row = service.row()
    memory, left = service.controller.parts.movement.room._eviction, list[int]()
    memory._leaves = left.append
    assert memory.evict(lambda _: True, lambda: row not in service.mapped)
    assert row not in left
    assert row in service.device
    assert (service.counters()["demoted_chunks"], service.counters()["evicted_chunks"]) == (1, 0)


@scenario(lambda: DeviceService(capacity_bytes=64 * KIB, region_bytes=64 * KIB))
async def test_a_file_with_a_second_copy_gives_way_to_another_models_chunks(service: DeviceService) -> None:
    """A place that was free held what was written anew elsewhere since: a start after a crash finds both."""
    await service.keep(1)
    await service.keep(2)
    rows = [row_of(service, number) for number in (1, 2)]
    movement = service.controller.parts.movement
    for row in rows:
        movement.removal.drop(service.device, row, MissReason.EVICTED)
    movement.writes[0].add(rows[0])
    assert (await service.settled(1)).durability is Durability.LOCAL
    await service.restart(kill=True)
    assert service.device.spares
    wide = service.of(small_spec(model_id="wide", layers=(LayerSpec(kv_heads=16, k_dim=8, v_dim=8),) * 2))
    await wide.keep(3)
    assert await wide.fetch(3) == (1, MissReason.NONE)
    assert await service.fetch(1) == (0, MissReason.EVICTED)
    assert not service.device.spares
    service.balance()


@pytest.mark.parametrize("is_spare", [True, False])
@scenario(lambda: ValueService())
async def test_what_stays_of_a_chunk_when_a_file_gives_way_outlives_a_power_cut(
    service: ValueService, is_spare: bool
) -> None:
    """Of two copies, one was acknowledged, and the sync of the other one failed. Which is which nobody knows after a
    kill: the chunk may leave, but what stays must not be the wrong one."""
    await twice(service)
    row = service.row()
    [spare] = service.device.spares[row]
    await service.clock.sleep(0.1)  # the read that brought it into memory has ended
    evictor = service.nvme.free_slots.evictor
    assert evictor is not None
    assert evictor.evict_all([spare.residency if is_spare else service.device.residency(row)])
    is_there = row in service.device
    await service.restart(kill=True, meanwhile=service.disk.crash)
    assert await service.get() == (OLD if is_there else None)
    service.balance()
