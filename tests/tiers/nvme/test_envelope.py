"""Copies in envelopes on a device that somebody else writes to, too."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
import xxhash

from kvstore.chunk import ENVELOPE_READER, write_seat
from kvstore.errors import DataLoss
from kvstore.seams.memory import Bytes
from kvstore.spec import ENVELOPES, Durability, Encoding, MissReason
from kvstore.tiers.nvme.reading import NvmeChunk
from tests.contracts.chunks import SMALL, Chunk, chunk, layouts
from tests.scenario import scenario
from tests.tiers.attacks import COUNT, KEY, OLD, attacked, checked, trust
from tests.tiers.nvme.attacked import KINDS, PATH, RECORD, Device, key
from tests.tiers.nvme.test_newest import NEW, RETRY_S, WAYS, Way
from tests.tiers.service import HOME, DeviceService
from tests.tiers.values import ValueService


@pytest.mark.parametrize("kind", ENVELOPES)
@scenario(lambda kind: Device(kind))
async def test_an_attacker_gets_a_wrong_byte_in_only_without_an_envelope(device: Device, kind: str) -> None:
    async def get(what: Chunk) -> Bytes:
        return device.copy_of(device.places[(await device.put(what)).header.storage_key])

    async def set_to(what: Chunk, copy: Bytes) -> None:
        device.lay(device.places[what.header.storage_key], copy)

    found = await attacked(get, set_to, lambda what, _: device.nvme.open(what.name, device.places[key(what)]))
    assert (found["wrong"] > 0) == (kind == "none"), found


@pytest.mark.parametrize("kind", KINDS)
@scenario(lambda kind: Device(kind))
async def test_no_start_believes_what_an_attacker_left(device: Device) -> None:
    """As above, each time by the headers: with a kill between the alteration and the read."""
    homes: dict[bytes, int] = {}

    async def get(what: Chunk) -> Bytes:
        await device.put(what)
        homes[key(what)] = device.places[key(what)]
        return device.copy_of(homes[key(what)])

    async def set_to(what: Chunk, copy: Bytes) -> None:
        await device.stop(kill=True)
        device.lay(homes[key(what)], copy)
        device.tier = device.build()
        await device.start()
        device.places = device.found()

    async def open_chunk(what: Chunk, _: object) -> NvmeChunk | None:
        residency = device.places.get(key(what))
        return None if residency is None else await device.nvme.open(what.name, residency)

    found = await attacked(get, set_to, open_chunk, COUNT // 5)
    assert found["wrong"] == 0, found
    assert found["miss"] > 0


@pytest.mark.parametrize("encoding", [Encoding.RAW, Encoding.LZ4])
@pytest.mark.parametrize("kind", KINDS)
@scenario(lambda kind, encoding: Device(kind, encoding=encoding))
async def test_chunks_of_any_shape_come_back(device: Device) -> None:
    chunks = [await device.put(chunk(number, layout)) for number, layout in enumerate(layouts().values())]
    for kill in (True, False):
        await device.found_again(kill=kill)
        assert [await device.read(each) for each in chunks] == ["right"] * len(chunks)
        for each in chunks:
            assert device.copy_of(device.places[key(each)])[10] == ENVELOPE_READER


@pytest.mark.parametrize("kind", KINDS)
@scenario(lambda kind: Device(kind))
async def test_a_copy_proves_where_it_was_written(device: Device) -> None:
    """One in another place is not believed, also where an attacker says in it that it belongs there."""
    one, other = await device.put(chunk(1)), await device.put(chunk(2))
    here, there = device.places[key(one)], device.places[key(other)]
    region, slot = device.nvme.regions.find(there)
    for claims_it in (False, True):
        copy = device.copy_of(here)
        if claims_it:
            write_seat(copy[: SMALL.header_bytes], region.seat(slot))
        device.lay(there, copy)
        with pytest.raises(DataLoss):
            await device.nvme.open(one.name, there)
        await device.found_again()
        assert set(device.places.values()) == {here}


@pytest.mark.parametrize("kind", KINDS)
@scenario(lambda kind: Device(kind))
async def test_an_older_copy_that_is_put_back_is_not_the_write_that_was_acknowledged(device: Device) -> None:
    await device.put(chunk(1, write=1))
    here = device.places[key(chunk(1))]
    older = device.copy_of(here)
    device.nvme.remove([here])
    await device.put(chunk(1, write=2))
    assert device.places[key(chunk(1))] == here
    device.lay(here, older)
    assert await device.read(chunk(1, write=2)) == "refused"
    await device.restart(kill=False)
    assert await device.read(chunk(1, write=2)) == "refused"


def test_a_copy_sealed_with_a_key_that_nobody_here_had_is_a_loss() -> None:
    device, theirs = Device("mac", KEY), Device("mac", OLD)
    taken: list[Bytes] = []

    async def theirs_alone() -> None:
        await theirs.put(chunk(1))
        taken.append(theirs.copy_of(theirs.places[key(chunk(1))]))

    async def scenario() -> None:
        await device.put(chunk(1))
        device.lay(device.places[key(chunk(1))], taken[0])
        assert await device.read(chunk(1)) == "refused"

    theirs.run(theirs_alone)
    device.run(scenario)


def everything(device: Device) -> bytes:
    """What a reader of the directory sees, and of the record beside it."""
    places = [HOME / name for name in device.disk.names(HOME)] + [RECORD] * (RECORD.name in names_beside(device))
    return b"".join(device.disk.read_file(path) for path in places)


def names_beside(device: Device) -> list[str]:
    device.disk.make_directory(RECORD.parent)
    return device.disk.names(RECORD.parent)


@pytest.mark.parametrize("kind", ENVELOPES)
@pytest.mark.parametrize("kill", [True, False])
@scenario(lambda kind: Device(kind))
async def test_what_could_confirm_a_prompt_is_nowhere_on_the_device(device: Device, kind: str, kill: bool) -> None:
    """Neither in slots nor in the snapshot that a clean stop leaves."""
    what = chunk(1, token_digest=b"t" * 32, chain_digest=b"c" * 32, parent=b"p" * 32)
    await device.put(what)
    await device.stop(kill=kill)
    seen = everything(device)
    secrets = [b"t" * 32, b"c" * 32, b"p" * 32, what.header.checksums[0].tobytes()]
    secrets += [piece[at : at + 32].tobytes() for piece in what.pieces[1:] for at in (0, 128)]
    assert [each in seen for each in secrets] == [kind != "aead"] * len(secrets)
    assert key(what) in seen
    device.tier = device.build()
    await device.start()
    device.places = {key(what): residency for residency in device.found().values()}
    assert await device.read(what) == "right"


@scenario(lambda: Device("mac"))
async def test_what_went_bad_in_memory_is_not_sealed_and_closes_nothing(device: Device) -> None:
    bad = chunk(1)
    bad.pieces[1][5] ^= 1
    with pytest.raises(DataLoss, match="resident"):
        await device.put(bad)
    assert device.nvme.statistics().chunk_count == 0
    assert device.nvme.statistics().state == "up"
    await device.put(chunk(1))
    assert await device.read(chunk(1)) == "right"


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@scenario(lambda: ValueService(trust=trust("aead")))
async def test_an_older_value_never_comes_back_sealed(service: ValueService, way: Way) -> None:
    assert await service.put(9, "other") is Durability.LOCAL
    await way(service, None)
    if await service.put(NEW) is not Durability.LOCAL:
        await asyncio.sleep(RETRY_S)
    assert await service.level() is Durability.LOCAL
    for end in ("kill", "clean stop", "kill"):
        await service.stop(kill=end == "kill")
        service.disk.mend()
        await service.start()
        assert (await service.get(), await service.get("other")) == (NEW, 9)
    service.balance()


@pytest.mark.parametrize("kind", KINDS)
@scenario(lambda kind: DeviceService(trust=trust(kind)))
async def test_an_altered_chunk_is_a_miss_with_a_reason_and_is_stored_again(service: DeviceService) -> None:
    await service.keep(*PATH)
    service.forget_memory()
    file, place = service.place(*PATH)
    whole = bytearray(service.disk.read_file(file))
    copy = np.frombuffer(whole, np.uint8)[place : place + service.layout.total_bytes]
    copy[service.layout.header_bytes + 3] ^= 1
    copy[:] = checked(copy)
    service.disk.write_file(file, bytes(whole))
    assert await service.fetch(*PATH) == (1, MissReason.CORRUPT)
    assert service.counters()["quarantined_chunks"] == 1
    await service.keep(*PATH)
    service.forget_memory()
    assert await service.fetch(*PATH) == (2, MissReason.NONE)


@scenario(lambda: Device("mac"))
async def test_a_snapshot_that_was_altered_is_not_believed(device: Device) -> None:
    """With the digest of it made anew: the headers are read."""
    await device.put(chunk(1))
    await device.stop()
    index = bytearray(device.disk.read_file(HOME / "index"))
    index[-3] ^= 1
    said = json.loads(device.disk.read_file(HOME / "format"))
    said["clean"] = xxhash.xxh3_128_hexdigest(bytes(index))
    device.disk.write_file(HOME / "index", bytes(index))
    device.disk.write_file(HOME / "format", json.dumps(said).encode())
    device.tier = device.build()
    await device.start()
    device.places = device.found()
    assert not device.recovered.is_proven.any()
    assert await device.read(chunk(1)) == "right"
