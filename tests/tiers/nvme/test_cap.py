"""The device takes no more than it may."""

from __future__ import annotations

import pytest

from kvstore.spec import Durability, LayerSpec, MissReason
from tests.scenario import scenario
from tests.specs import small_spec
from tests.tiers.nvme.chains import STARTS, served, storable, stored
from tests.tiers.service import KIB, DeviceService


@pytest.mark.parametrize("capacity_bytes", [4096, 8192, 12288, 4096 + 12287])
@scenario(lambda capacity_bytes: DeviceService(capacity_bytes=capacity_bytes))
async def test_a_cap_below_one_chunk(service: DeviceService) -> None:
    """Nothing fits: chunks stay in memory, and why is said."""
    assert (await service.store(service.session, 1)).committed_count == 1
    settled = await service.settled(1)
    assert settled.durability is Durability.MEMORY
    assert "tiers.nvme.capacity_bytes" in settled.reason
    assert await service.fetch(1) == (1, MissReason.NONE)
    assert service.region_files() == []
    service.balance()


@pytest.mark.parametrize("start", STARTS)
@scenario()
async def test_a_lowered_cap_is_kept_at_once(service: DeviceService, start: str) -> None:
    await stored(service)
    whole = service.region_bytes_used()
    for capacity in (whole, whole - 1, whole // 2, 70 * KIB, 4 * KIB):
        service.capacity_bytes = capacity
        await service.restart(kill=start == "scan")
        service.balance()
        lost = await served(service)
        assert bool(lost) == (capacity < whole)
        assert {reason for _, reason in lost.values()} <= {MissReason.COLD}
        service.forget_memory()
        # What the smaller files kept is served again and again, and every row has its place.
        assert await served(service) == lost
    service.capacity_bytes = 512 * KIB
    await service.restart()
    await storable(service)


def on_device(service: DeviceService) -> set[tuple[bytes, bytes]]:
    """Namespace and digest of every chunk that the device holds."""
    table, spaces = service.controller.parts.catalog.table, service.controller.parts.catalog.spaces.numbered
    rows = list(service.device.rows())
    return {(spaces[table.spaces[row]].fingerprint, table.digests[row]) for row in rows}


def test_five_times_the_capacity_of_mixed_sizes_stays_below_the_cap() -> None:
    """Slot sizes take turns, so that regions are given up for each other; after every store the files are measured."""
    service = DeviceService(arena_chunks=24, capacity_bytes=300 * KIB, region_bytes=80 * KIB)
    sizes = [
        small_spec(model_id=f"size {layers}.{heads}", layers=(LayerSpec(kv_heads=heads, k_dim=8, v_dim=8),) * layers)
        for layers, heads in ((2, 2), (4, 2), (2, 12), (7, 3), (1, 2))
    ]

    async def scenario() -> None:
        written = number = 0
        while written < 5 * service.capacity_bytes:
            view = service.of(sizes[number // 7 % len(sizes)])
            await view.keep(number)
            number += 1
            written += view.layout.total_bytes
            service.balance()
            assert await view.fetch(number - 1) == (1, MissReason.NONE)
        assert service.counters()["nvme_evicted_chunks"] > 20
        before = service.nvme.statistics()
        for kill in (False, True):
            held = on_device(service)
            await service.restart(kill=kill)
            service.balance()
            after = service.nvme.statistics()
            assert after.file_bytes == before.file_bytes
            assert after.overhead_bytes == before.overhead_bytes
            assert on_device(service) >= held
            if not kill:
                assert on_device(service) == held
                assert after.allocated_bytes == before.allocated_bytes

    service.run(scenario)
