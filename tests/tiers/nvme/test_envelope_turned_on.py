"""The envelope is turned on and off over what lies there."""

from __future__ import annotations

import errno
import json

import numpy as np
import pytest

from kvstore.chunk import is_sealed
from kvstore.errors import DataLoss, Unavailable
from kvstore.spec import MissReason
from kvstore.tiers import NotOurs
from kvstore.tiers.nvme import directory
from kvstore.tiers.nvme.slots import SEALED
from tests.contracts.chunks import chunk, layouts, write
from tests.scenario import scenario
from tests.tiers.attacks import KEY, trust
from tests.tiers.nvme.attacked import KINDS, PATH, RECORD, Device, key
from tests.tiers.nvme.test_format import CHUNKS as FORMAT_CHUNKS
from tests.tiers.nvme.test_format import FIXTURE, FormatService, whole_chunks
from tests.tiers.nvme.test_format import SPEC as FORMAT_SPEC
from tests.tiers.service import HOME, DeviceService, refused


@pytest.mark.parametrize("kill", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@scenario(lambda: Device("none"))
async def test_what_lay_there_before_stays_what_it_was(device: Device, kind: str, kill: bool) -> None:
    """LOCAL stays LOCAL, over any number of starts; what is new is sealed; and turned off again all of it is read."""
    before = await device.put(chunk(1))
    for now in (kind, kind, "none", kind):
        device.trust = trust(now, KEY)
        await device.found_again(kill=kill)
        assert await device.read(before) == "right"
        assert (device.copy_of(device.places[key(before)]) == np.concatenate(before.pieces)).all()
        assert await device.nvme.renew(device.places[key(before)])
    later = await device.put(chunk(2))
    assert is_sealed(device.copy_of(device.places[key(later)]))
    for now in (kind, "none"):
        device.trust = trust(now, KEY)
        await device.found_again(kill=kill)
        assert [await device.read(each) for each in (before, later)] == ["right", "right"]


@scenario(lambda: Device("mac"))
async def test_what_is_stored_while_it_is_off_stays_too(device: Device) -> None:
    for number, now in enumerate(("mac", "none", "mac", "none", "aead")):
        device.trust = trust(now, KEY)
        await device.found_again()
        await device.put(chunk(number))
        assert [await device.read(chunk(each)) for each in range(number + 1)] == ["right"] * (number + 1)


@pytest.mark.parametrize("place", ["of a sealed copy", "of a plain one that went", "that was free"])
@scenario(lambda: Device("none"))
async def test_no_other_copy_without_an_envelope_is_believed(
    device: Device, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 2):
        await device.put(chunk(number))
    planted = chunk(7)
    device.trust = trust("mac")
    await device.found_again()
    await device.put(chunk(3))
    if place == "of a plain one that went":
        at = device.places[key(chunk(2))]
    elif place == "of a sealed copy":
        at = device.places[key(chunk(3))]
    else:
        at = await write(device.nvme, chunk(4))
        device.nvme.remove([at])
    device.lay(at, np.concatenate(planted.pieces))
    if at & SEALED:
        with pytest.raises(DataLoss, match="no envelope any more"):
            await device.nvme.open(planted.name, at)
    await device.found_again()
    assert key(planted) not in device.places
    assert "not believed" in caplog.text
    assert await device.read(chunk(1)) == "right"


@pytest.mark.parametrize("fails", ["open", "pread"])
@scenario(lambda: Device("none"))
async def test_what_could_not_be_seen_when_it_was_turned_on_comes_back(device: Device, fails: str) -> None:
    """And what could not be seen later."""
    await device.put(chunk(1))
    await device.put(chunk(2, layouts()["mla float8"]))
    path = device.place(device.places[key(chunk(1))], 0)[0].name
    device.trust = trust("mac")
    for start in range(4):
        await device.stop(kill=True)
        if start % 2 == 0:
            after = 1 if fails == "pread" else 0
            device.disk.fail(fails, errno.EIO, path_contains=path, after=after, times=None)
        device.tier = device.build()
        await device.start()
        device.places = device.found()
        device.disk.mend()
        assert (key(chunk(1)) in device.places) == (start % 2 == 1)
        assert await device.read(chunk(2, layouts()["mla float8"])) == "right"
    assert await device.read(chunk(1)) == "right"


@scenario(lambda: Device("none"))
async def test_a_damaged_record_stops_the_tier_and_says_what_to_do(device: Device) -> None:
    await device.put(chunk(1))
    device.trust = trust("mac")
    await device.found_again()
    await device.stop()
    device.disk.flip(RECORD, 20)
    device.tier = device.build()
    with pytest.raises(Unavailable, match=f"{RECORD} is damaged"):
        await device.start()
    device.disk.remove(RECORD)
    device.tier = device.build()
    await device.start()
    device.places = device.found()
    assert await device.read(chunk(1)) == "right"


class Mount:
    """The device's files, which a mount shows and hides. What is written meanwhile is hidden by the next mount."""

    def __init__(self, service: DeviceService) -> None:
        self._disk = service.disk
        self._files: dict[str, bytes] = {}

    def hide(self, beginning: str = "") -> None:
        self._files = {each: self._disk.read_file(HOME / each) for each in self._names() if each.startswith(beginning)}
        for name in self._files:
            self._disk.remove(HOME / name)

    def show(self) -> None:
        for name in self._names():
            self._disk.remove(HOME / name)
        self.put_back()

    def put_back(self) -> None:
        for name, data in self._files.items():
            self._disk.write_file(HOME / name, data)

    def _names(self) -> list[str]:
        return list(self._disk.names(HOME))


@pytest.mark.parametrize("is_on_before", [True, False])
def test_a_start_without_the_device_costs_no_plain_copy(is_on_before: bool) -> None:
    """Also where it is the start that turns the envelope on."""
    service = DeviceService()
    mount = Mount(service)

    async def scenario() -> None:
        await service.keep(*PATH)
        service.trust = trust("mac")
        if is_on_before:
            await service.restart()
        await service.stop()
        mount.hide()
        if is_on_before:
            assert "of another directory" in (await refused(service)).message
        else:
            await service.start()
            await service.stop()
        mount.show()
        if not is_on_before:
            assert "of another directory" in (await refused(service)).message
            service.disk.remove(RECORD)
        for kill in (True, False):
            await service.start()
            assert await service.fetch(*PATH) == (2, MissReason.NONE)
            await service.stop(kill=kill)

    service.run(scenario)


def test_a_file_that_is_not_there_for_a_while_comes_back() -> None:
    """Nobody else gets its number meanwhile."""
    service = DeviceService()
    mount = Mount(service)

    async def scenario() -> None:
        await service.keep(*PATH)
        service.trust = trust("mac")
        await service.restart()
        await service.restart(meanwhile=lambda: mount.hide("region-"))
        assert await service.fetch(*PATH) == (0, MissReason.COLD)
        await service.keep(7, 8)
        await service.restart()
        await service.restart(kill=True, meanwhile=mount.put_back)
        assert await service.fetch(*PATH) == await service.fetch(7, 8) == (2, MissReason.NONE)

    service.run(scenario)


@scenario(lambda: Device("mac"))
async def test_a_record_of_before_a_time_without_an_envelope_is_not_believed(device: Device) -> None:
    """The directory was used under another path, whose record is another."""
    await device.stop()
    before = device.disk.read_file(RECORD)
    for now in ("none", "mac"):
        if now == "mac":
            device.disk.write_file(RECORD, before)
        device.trust = trust(now, KEY)
        device.tier = device.build()
        if now == "mac":
            with pytest.raises(Unavailable, match="of another directory"):
                await device.start()
            device.disk.remove(RECORD)
            device.tier = device.build()
        await device.start()
        if now == "none":
            await device.put(chunk(1))
            await device.stop()
    device.places = device.found()
    assert await device.read(chunk(1)) == "right"


@scenario(lambda: DeviceService())
async def test_a_directory_whose_format_is_damaged_has_the_id_that_the_record_says(service: DeviceService) -> None:
    await service.keep(*PATH)
    service.trust = trust("mac")
    await service.restart()
    for _ in range(2):
        await service.restart(kill=True, meanwhile=lambda: service.disk.write_file(HOME / "format", b"garbage"))
        assert await service.fetch(*PATH) == (2, MissReason.NONE)
        await service.restart()
        assert await service.fetch(*PATH) == (2, MissReason.NONE)


@scenario(lambda: DeviceService())
async def test_an_id_of_another_length_is_a_damaged_one(service: DeviceService) -> None:
    """The record would be one that no later start can read."""
    await service.keep(*PATH)
    await service.stop()
    said = json.loads(service.disk.read_file(HOME / "format"))
    service.disk.write_file(HOME / "format", json.dumps({**said, "id": "00"}).encode())
    service.trust = trust("mac")
    await service.start()
    for kill in (True, False):
        await service.restart(kill=kill)
        assert await service.fetch(*PATH) == (2, MissReason.NONE)


@scenario(lambda: DeviceService(trust=trust("mac")))
async def test_an_earlier_release_does_not_open_a_directory_with_sealed_copies(
    service: DeviceService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take their slots for free."""
    await service.keep(*PATH)
    await service.stop()
    service.trust = trust("none", KEY)
    with monkeypatch.context() as earlier:
        earlier.setattr(directory, "KNOWN_FEATURES", frozenset({directory.NEWEST}))
        assert isinstance(await refused(service), NotOurs)
    await service.start()
    assert await service.fetch(*PATH) == (2, MissReason.NONE)


@pytest.mark.parametrize("without", ["", "index"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_of_the_release_before_is_served_to_the_bit(kind: str, without: str) -> None:
    service = FormatService(spec=FORMAT_SPEC, trust=trust(kind))
    for file in FIXTURE.iterdir():
        if file.name != without:
            service.disk.write_file(HOME / file.name, file.read_bytes())

    async def scenario() -> None:
        for _ in range(2):
            for path, expected in FORMAT_CHUNKS.items():
                assert await service.fetch(*path) == (2, MissReason.NONE)
                found = service.controller.fetches.fetch(service.session, service.query(*path))
                assert whole_chunks(found) == expected
            await service.restart(kill=True)

    service.run(scenario)
