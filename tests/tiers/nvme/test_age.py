"""How old chunks are: what a clean stop and headers keep of it."""

from __future__ import annotations

import pytest

from kvstore.chunk import Trust
from tests.chunk.test_envelope import ring
from tests.scenario import scenario
from tests.tiers.nvme.chains import STARTS, served, stored
from tests.tiers.service import HOME, DeviceService


def ages(service: DeviceService) -> set[float]:
    """When the chunks that are stored came, in seconds of the service's clock."""
    table = service.parts.catalog.table
    return {table.stored_s[row] for row in table.rows() if table.is_resident(row)}


@pytest.mark.parametrize("envelope", ["none", "mac"])
@pytest.mark.parametrize("start", STARTS)
def test_a_chunk_is_as_old_after_a_restart_as_it_is(start: str, envelope: str) -> None:
    trust = None if envelope == "none" else Trust(envelope, ring())
    service = DeviceService(arena_chunks=32, trust=trust)

    async def scenario() -> None:
        await service.clock.sleep(1000)
        await service.keep(1, 2)
        first = ages(service)
        await service.clock.sleep(5000)
        await service.keep(3)
        came = ages(service)
        assert len(came) == 2
        assert all(each >= 1000 for each in first)
        for _ in range(2):  # what a start found is as old after the next one, too
            await service.restart(kill=start == "scan")
            await service.clock.sleep(500)
            assert ages(service) == came

    service.run(scenario)


@pytest.mark.parametrize("how", ["gone", "another's", "cut"])
@scenario()
async def test_without_its_times_a_snapshot_is_read_and_ages_are_not_known(service: DeviceService, how: str) -> None:
    def harm() -> None:
        path = HOME / "times"
        if how == "gone":
            service.disk.remove(path)
        else:
            data = service.disk.read_file(path)
            service.disk.write_file(path, data[:-1] if how == "cut" else bytes(16) + data[16:])

    await service.clock.sleep(1000)
    await stored(service)
    await service.restart(meanwhile=harm)
    assert ages(service) == {0}
    assert await served(service) == {}
