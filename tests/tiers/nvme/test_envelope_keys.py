"""Keys of envelopes come and go: what they sealed is a miss without them, stays, and comes back."""

from __future__ import annotations

import errno
import json
import sys

import pytest

from kvstore.chunk import Trust
from kvstore.errors import Exhausted
from kvstore.spec import Durability, MissReason
from kvstore.tiers.nvme import directory, newest
from tests.contracts.chunks import chunk
from tests.scenario import scenario
from tests.tiers.attacks import KEY, OLD, trust
from tests.tiers.nvme.attacked import KINDS, PATH, Device, key
from tests.tiers.nvme.test_newest import NEW
from tests.tiers.nvme.test_newest import OLD as OLD_VALUE
from tests.tiers.service import HOME, DeviceService
from tests.tiers.values import ValueService


@pytest.mark.parametrize("kill", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@scenario(lambda kind: Device(kind, OLD))
async def test_keys_change_and_no_chunk_is_lost(device: Device, kind: str, kill: bool) -> None:
    first = await device.put(chunk(1))
    device.trust.ring.change((KEY, OLD))  # SIGHUP
    second = await device.put(chunk(2))
    assert [await device.read(each) for each in (first, second)] == ["right", "right"]
    device.trust = trust(kind, KEY, OLD)
    await device.found_again(kill=kill)
    assert [await device.read(each) for each in (first, second)] == ["right", "right"]
    old, new = (device.copy_of(device.places[key(each)])[304:320].tobytes() for each in (first, second))
    assert (old, new) == (OLD.key_id, KEY.key_id)


@pytest.mark.parametrize("kill", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@scenario(lambda kind: Device(kind))
async def test_without_its_key_a_chunk_is_a_miss_and_stays(
    device: Device, kind: str, kill: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its slot is nobody else's, and nothing of it changes, whatever is stored meanwhile; with the key it is back."""
    first, others = chunk(1), [chunk(number) for number in range(10, 20)]
    here = device.places[key(await device.put(first))] & ~(0x3F << 56)
    before = device.copy_of(here)
    for now in (trust(kind, OLD), trust("none"), trust(kind, OLD)):
        device.trust = Trust(now.kind, now.ring)
        caplog.clear()
        await device.found_again(kill=kill)
        assert caplog.text.count("sealed with keys that are not") == 1
        assert await device.read(first) == "absent"
        for each in others:
            await device.put(each)
        assert (device.copy_of(here) == before).all()
    device.trust = trust(kind, OLD, KEY)
    await device.found_again(kill=kill)
    assert [await device.read(each) for each in (first, *others)] == ["right"] * 11


@pytest.mark.parametrize("kill", [True, False])
@scenario(lambda: Device("aead"))
async def test_without_the_package_that_opens_it_a_chunk_is_a_miss_and_stays(
    device: Device, kill: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = chunk(1), chunk(2)
    await device.put(first)
    await device.stop(kill=kill)  # with the package, for a clean stop leaves a snapshot that is sealed, too
    device.trust = trust("mac")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
        device.tier = device.build()
        await device.start()
        device.places = device.found()
        assert "install kvstore[aead]" in caplog.text
        assert await device.read(first) == "absent"
        await device.put(other)
    await device.found_again(kill=kill)
    assert [await device.read(each) for each in (first, other)] == ["right"] * 2


@pytest.mark.parametrize("kill", [True, False])
@pytest.mark.parametrize("now", ["mac", "none"])
@scenario(lambda: Device("mac", OLD))
async def test_an_old_key_that_is_taken_out_costs_what_it_sealed(device: Device, now: str, kill: bool) -> None:
    """Also where the snapshot is another key's, or nobody's."""
    await device.put(chunk(1))
    device.trust = trust(now, KEY, OLD)
    await device.found_again(kill=kill)
    await device.put(chunk(2))
    device.trust = trust(now, KEY)
    await device.found_again(kill=kill)
    assert [await device.read(chunk(number)) for number in (1, 2)] == ["absent", "right"]
    device.trust = trust(now, KEY, OLD)
    await device.found_again(kill=kill)
    assert [await device.read(chunk(number)) for number in (1, 2)] == ["right", "right"]


@pytest.mark.parametrize("kill", [True, False])
@scenario(lambda: DeviceService(trust=trust("aead", KEY)))
async def test_a_key_that_is_taken_out_while_it_is_used_counts_from_the_next_start(
    service: DeviceService, kill: bool
) -> None:
    """Until then LOCAL is true; from then on these are misses that stay."""
    await service.keep(*PATH)
    service.forget_memory()
    assert service.trust is not None
    service.trust.ring.change((OLD,))
    await service.keep(*PATH)  # it is there: nothing is written
    service.forget_memory()
    assert await service.fetch(*PATH) == (2, MissReason.NONE)
    for keys, expected in (((OLD,), (0, MissReason.COLD)), ((OLD, KEY), (2, MissReason.NONE))):
        service.trust = trust("aead", *keys)
        await service.restart(kill=kill)
        assert await service.fetch(*PATH) == expected
        assert service.counters()["quarantined_chunks"] == 0


@scenario(lambda: DeviceService(trust=trust("mac")))
async def test_a_start_that_knows_of_no_envelopes_finds_them_by_what_lies_there(service: DeviceService) -> None:
    """What says that there are some is damaged: the next start without the key erases nothing."""
    await service.keep(*PATH)
    service.trust = trust("none", KEY)
    await service.restart(kill=True, meanwhile=lambda: service.disk.write_file(HOME / "format", b"garbage"))
    assert await service.fetch(*PATH) == (2, MissReason.NONE)
    assert directory.ENVELOPES_USED in json.loads(service.disk.read_file(HOME / "format"))["features"]
    for keys, expected in (((OLD,), (0, MissReason.COLD)), ((OLD, KEY), (2, MissReason.NONE))):
        service.trust = trust("none", *keys)
        await service.restart()
        assert await service.fetch(*PATH) == expected
        assert service.counters()["quarantined_chunks"] == 0


@scenario(lambda: Device("mac", OLD))
async def test_a_device_full_of_chunks_whose_key_is_away_says_so(device: Device) -> None:
    """More room is not what an operator wants there: the key is."""
    with pytest.raises(Exhausted) as full:
        for number in range(1000):
            await device.put(chunk(number))
    assert "envelope key file" not in full.value.message
    assert "raise tiers.nvme.capacity_bytes" in full.value.message
    device.trust = trust("mac", KEY)
    await device.restart(kill=True)
    with pytest.raises(Exhausted, match="envelope key file: put the keys back and start again, or raise"):
        await device.put(chunk(2000))


@scenario(lambda: Device("mac"))
async def test_locked_chunks_alone_keep_earlier_releases_out(device: Device) -> None:
    await device.put(chunk(1))
    await device.stop(kill=True)
    device.disk.remove(HOME / "format")
    device.trust = trust("none")
    device.tier = device.build()
    await device.start()
    assert directory.ENVELOPES_USED in json.loads(device.disk.read_file(HOME / "format"))["features"]


@pytest.mark.parametrize("count", [2, 8])
def test_values_whose_key_is_away_outlive_any_number_of_others(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what was put in their place is newer."""
    monkeypatch.setattr(newest, "COUNT_MAX", 4)
    service = ValueService(trust=trust("aead", OLD))

    async def scenario() -> None:
        assert await service.put(9, "mine") is Durability.LOCAL
        assert await service.put(OLD_VALUE) is Durability.LOCAL
        service.trust = trust("aead", KEY)
        await service.restart(kill=True)
        for kill in (True, False):
            assert await service.put(NEW) is Durability.LOCAL
            for number in range(count):
                assert await service.put(number, f"other {number}") is Durability.LOCAL
            await service.restart(kill=kill)
        service.trust = trust("aead", KEY, OLD)
        await service.restart(kill=True)
        assert (await service.get("mine"), await service.get()) == (9, NEW)

    service.run(scenario)


def test_a_value_that_is_the_newest_is_so_when_its_key_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """``newest`` names it, for a slot could not be read; then its key is away, and others are put."""
    monkeypatch.setattr(newest, "COUNT_MAX", 4)
    service = ValueService(trust=trust("aead", OLD))

    async def scenario() -> None:
        assert await service.put(OLD_VALUE) is Durability.LOCAL
        file, _ = service.place_of()
        await service.stop(kill=True)
        service.disk.fail("pread", errno.EIO, path_contains=file, after=1, times=None)
        await service.start()
        service.disk.mend()
        assert await service.put(NEW) is Durability.LOCAL
        service.trust = trust("aead", KEY)
        await service.restart(kill=True)
        for number in range(8):
            assert await service.put(number, f"other {number}") is Durability.LOCAL
        service.trust = trust("aead", KEY, OLD)
        await service.restart(kill=True)
        assert await service.get() == NEW

    service.run(scenario)


@scenario(lambda: ValueService(trust=trust("aead", OLD)))
async def test_a_value_whose_key_was_away_does_not_come_back_after_a_newer_one(service: ValueService) -> None:
    assert await service.put(OLD_VALUE) is Durability.LOCAL
    assert await service.put(9, "other") is Durability.LOCAL
    service.trust = trust("aead", KEY)
    await service.restart(kill=True)
    assert await service.get() is None
    assert await service.put(NEW) is Durability.LOCAL
    service.trust = trust("aead", KEY, OLD)
    for kill in (True, False):
        await service.restart(kill=kill)
        assert (await service.get(), await service.get("other")) == (NEW, 9)
