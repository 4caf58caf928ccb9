"""What a crash leaves may be torn. It is served when it passes its checks, and promised only after it was read and
synced anew."""

from __future__ import annotations

import asyncio
import errno
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvstore.config import PolicySettings
from kvstore.errors import Unavailable
from kvstore.spec import Durability, Encoding, MissReason, StoreState
from tests.fakes import FilesSettings, FilesTier
from tests.scenario import scenario
from tests.simulated import InlineWorkers, SimulatedDisk
from tests.specs import small_spec
from tests.tiers.service import DeviceService

ENCODINGS = [Encoding.RAW, Encoding.LZ4]


def tear(service: DeviceService, place: tuple[Path, int]) -> None:
    """The end of a slot never arrived; its header did."""
    path, offset = place
    service.disk.flip(path, offset + service.layout.header_bytes + 1)


@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda each: each.name)
@scenario(lambda encoding: DeviceService(encoding=encoding))
async def test_a_torn_chunk_is_stored_again_and_not_promised_before(service: DeviceService) -> None:
    await service.keep(1, 2)
    place = service.place(1, 2)
    await service.restart(kill=True, meanwhile=lambda: tear(service, place))
    assert (await service.settled(1, 2)).durability is Durability.MEMORY
    done = await service.store(service.session, 1, 2)
    assert list(done.states) == [StoreState.PRESENT, StoreState.COMMITTED]
    assert (await service.settled(1, 2)).durability is Durability.LOCAL
    assert service.counters()["nvme_proven_chunks"] == 2
    await service.restart(kill=True)
    assert await service.fetch(1, 2) == (2, MissReason.NONE)
    service.balance()


@scenario(lambda: DeviceService())
async def test_a_whole_chunk_is_promised_once_it_is_stored_again(service: DeviceService) -> None:
    await service.keep(1, 2)
    await service.restart(kill=True)
    assert (await service.settled(1, 2)).reason == "a crash left it, and it was not stored again since"
    done = await service.store(service.session, 1, 2)
    assert set(done.states) == {StoreState.PRESENT}
    assert (await service.settled(1, 2)).durability is Durability.LOCAL
    assert service.counters()["nvme_proven_chunks"] == 2
    await service.store(service.session, 1, 2)
    assert service.counters()["nvme_proven_chunks"] == 2, "once is enough"


@scenario(lambda: DeviceService())
async def test_what_a_failed_sync_left_is_synced_before_it_is_promised(service: DeviceService) -> None:
    """The first process could not sync it and was killed; a power cut comes in the life after next."""
    await service.keep(9)
    service.disk.fail("sync", errno.EIO, path_contains="region", times=None)
    await service.store(service.session, 1, 2)
    assert (await service.settled(1, 2)).durability is Durability.MEMORY
    service.disk.mend()
    await service.restart(kill=True)
    assert (await service.fetch(1, 2))[0] == 2, "readers see it"
    await service.keep(1, 2)
    await service.stop(kill=True)
    service.disk.crash()
    await service.start()
    assert await service.fetch(1, 2) == (2, MissReason.NONE)


@scenario(lambda: DeviceService(arena_chunks=4))
async def test_more_than_memory_holds_is_read_after_a_crash(service: DeviceService) -> None:
    """What was read back and not promised yet makes way like everything else."""
    paths = [(first, second, third) for first in (1, 2) for second in (3, 4) for third in (5, 6)]
    for path in paths:
        await service.keep(*path)
    await service.restart(kill=True)
    for path in paths * 2:
        assert await service.fetch(*path) == (3, MissReason.NONE)


@scenario(lambda: DeviceService())
async def test_doubt_outlives_a_clean_stop(service: DeviceService) -> None:
    await service.keep(1)
    await service.keep(2)
    await service.restart(kill=True)
    await service.store(service.session, 1)
    await service.restart()
    assert (await service.settled(1)).durability is Durability.LOCAL
    assert (await service.settled(2)).durability is Durability.MEMORY


@pytest.mark.parametrize("seed", range(8))
@scenario(lambda seed: DeviceService(disk=SimulatedDisk(seed)))
async def test_a_clean_stop_outlives_a_power_cut(service: DeviceService) -> None:
    """What it wrote last is synced: nothing is to be proven again."""
    await service.keep(1, 2)
    await service.stop()
    service.disk.crash()
    await service.start()
    assert (await service.settled(1, 2)).durability is Durability.LOCAL


@scenario(lambda: DeviceService())
async def test_a_good_copy_beside_a_torn_one_outlives_a_clean_stop(service: DeviceService) -> None:
    await service.keep(1)
    path, offset = service.place(1)

    def double() -> None:
        """The first slot is torn, another one holds the chunk whole."""
        data = bytearray(service.disk.read_file(path))
        size = service.layout.total_bytes
        data[offset + size : offset + 2 * size] = data[offset : offset + size]
        service.disk.write_file(path, bytes(data))
        tear(service, (path, offset))

    await service.restart(kill=True, meanwhile=double)
    assert service.nvme.statistics().chunk_count == 2
    await service.restart()
    assert service.nvme.statistics().chunk_count == 2
    assert await service.fetch(1) == (0, MissReason.CORRUPT)
    await service.clock.sleep(1.0)
    assert await service.fetch(1) == (1, MissReason.NONE)
    service.balance()


@scenario(lambda: DeviceService())
async def test_a_device_that_does_not_answer_holds_no_store_up(
    service: DeviceService, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.keep(1)
    await service.restart(kill=True)
    loop = service.clock
    wait_s = PolicySettings().demotion_wait_s

    async def stalled(*_: Any) -> Any:
        await loop.sleep(30.0)

    monkeypatch.setattr(service.nvme, "open", stalled)
    before_s = loop.monotonic()
    done = await service.store(service.session, 1)
    assert loop.monotonic() - before_s <= wait_s + 0.1
    assert set(done.states) == {StoreState.PRESENT}
    assert (await service.settled(1)).durability is Durability.MEMORY


@scenario(lambda: DeviceService())
async def test_a_store_that_waits_hears_of_a_proof_that_a_slow_device_gives_late(
    service: DeviceService, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.keep(1)
    await service.restart(kill=True)
    at_once = service.nvme.open

    async def slow(*asked: Any) -> Any:
        await service.clock.sleep(3 * PolicySettings().demotion_wait_s)
        return await at_once(*asked)

    monkeypatch.setattr(service.nvme, "open", slow)
    assert set((await service.store(service.session, 1)).states) == {StoreState.PRESENT}
    assert (await service.settled(1)).durability is Durability.LOCAL
    assert service.counters()["nvme_proven_chunks"] == 1
    service.balance()


class TwoTiers(DeviceService):
    """A device, and files behind it."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    async def attach(self) -> None:
        await super().attach()
        files = FilesSettings(directory=self.directory, capacity_bytes=1 << 24)
        await self.controller.parts.movement.attach(FilesTier(files, InlineWorkers()))


@scenario(lambda tmp_path: TwoTiers(tmp_path))
async def test_a_device_that_proves_nothing_delays_no_promise_of_another_tier(
    service: TwoTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.keep(1)
    await service.clock.sleep(5.0)  # the files have it, too
    await service.restart(kill=True)

    async def stalled(*_: Any) -> Any:
        await service.clock.sleep(1000.0)

    monkeypatch.setattr(service.nvme, "open", stalled)
    assert set((await service.store(service.session, 1)).states) == {StoreState.PRESENT}
    before_s = service.clock.monotonic()
    assert (await service.settled(1)).durability is Durability.LOCAL
    assert service.clock.monotonic() - before_s < 1.0


@scenario(lambda tmp_path: TwoTiers(tmp_path / "files"))
async def test_a_slower_tier_takes_no_chunk_of_a_model_that_nobody_registered_yet(
    service: TwoTiers, tmp_path: Path
) -> None:
    """Its layout is not known, so that it cannot be read."""
    await service.of(small_spec(model_id="other")).keep(1)
    await service.clock.sleep(5.0)  # both tiers have it
    await service.restart(meanwhile=lambda: shutil.rmtree(tmp_path / "files"))
    files = service.controller.parts.movement.writes[1]
    files.drain()
    files.resume()
    await service.clock.sleep(5.0)
    assert (files.reason, service.counters()["files_refused_chunks"]) == ("", 0)
    assert await service.of(small_spec(model_id="other")).fetch(1) == (1, MissReason.NONE)


@scenario(lambda: DeviceService())
async def test_a_session_that_ends_while_its_store_is_claimed_leaves_nothing(
    service: DeviceService, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slow(*_: Any) -> None:
        await service.clock.sleep(1.0)

    monkeypatch.setattr(service.controller.parts.movement.checks, "prove_all", slow)
    session = service.controller.open_session()
    storing = asyncio.ensure_future(service.reserve(session, 1, 2))
    await service.clock.sleep(0.5)
    assert not service.controller.reservations.of(session), "nobody can fill or end what is not claimed yet"
    await service.controller.close_session(session)
    with pytest.raises(Unavailable, match="session ended"):
        await storing
    assert service.controller.reservations.reserved_bytes == 0
    done = await service.store(service.session, 1, 2)
    assert set(done.states) == {StoreState.COMMITTED}
