"""Copies in envelopes on a device that somebody else writes to, too."""

from __future__ import annotations

import asyncio
import errno
import json

import numpy as np
import pytest
import xxhash

from kvstore.chunk import ENVELOPE_READER, Trust, is_sealed, write_seat
from kvstore.errors import DataLoss, Exhausted, Unavailable
from kvstore.seams import EnvelopeKey
from kvstore.seams.memory import Bytes
from kvstore.spec import ENVELOPES, Durability, Encoding, MissReason
from kvstore.tiers import NotOurs
from kvstore.tiers.nvme import NvmeTier, directory, newest
from kvstore.tiers.nvme.reading import NvmeChunk
from kvstore.tiers.nvme.slots import SEALED
from tests.contracts.chunks import SMALL, Chunk, chunk, layouts, write
from tests.contracts.stands import NvmeStand
from tests.tiers.attacks import COUNT, KEY, OLD, attacked, checked, outcome_of, trust
from tests.tiers.service import HOME, DeviceService, refused
from tests.tiers.test_nvme_format import CHUNKS as FORMAT_CHUNKS
from tests.tiers.test_nvme_format import FIXTURE, FormatService, whole_chunks
from tests.tiers.test_nvme_format import SPEC as FORMAT_SPEC
from tests.tiers.test_nvme_newest import NEW, RETRY_S, WAYS, Way
from tests.tiers.test_nvme_newest import OLD as OLD_VALUE
from tests.tiers.values import ValueService

KINDS = ("mac", "aead")
PATH = (3, 53)
RECORD = HOME.parent / "plain" / HOME.name


class Device(NvmeStand):
    """A tier and its attacker's hands. ``places`` are the residencies of chunks by storage key."""

    def __init__(self, kind: str, *keys: EnvelopeKey, encoding: Encoding = Encoding.RAW) -> None:
        self.trust, self.encoding, self.places = trust(kind, *keys), encoding, dict[bytes, int]()
        super().__init__()

    def build(self) -> NvmeTier:
        self.nvme = super().build()
        return self.nvme

    async def put(self, what: Chunk) -> Chunk:
        self.places[what.header.storage_key] = await write(self.nvme, what)
        return what

    async def read(self, what: Chunk) -> str:
        residency = self.places.get(what.header.storage_key)
        return (
            "absent"
            if residency is None
            else await outcome_of(what, lambda each, _: self.nvme.open(each.name, residency))
        )

    async def found_again(self, *, kill: bool = True) -> None:
        """After a restart: what it brings back."""
        await self.restart(kill=kill)
        self.places = self.found()

    def copy_of(self, residency: int, byte_count: int = SMALL.total_bytes) -> Bytes:
        path, offset = self.place(residency, 0)
        return np.frombuffer(bytearray(self.disk.read_file(path)[offset : offset + byte_count]), np.uint8)

    def lay(self, residency: int, copy: Bytes) -> None:
        path, offset = self.place(residency, 0)
        whole = bytearray(self.disk.read_file(path))
        whole[offset : offset + copy.size] = copy.tobytes()
        self.disk.write_file(path, bytes(whole))


@pytest.mark.parametrize("kind", ENVELOPES)
def test_an_attacker_gets_a_wrong_byte_in_only_without_an_envelope(kind: str) -> None:
    device = Device(kind)

    async def get(what: Chunk) -> Bytes:
        return device.copy_of(device.places[(await device.put(what)).header.storage_key])

    async def set_to(what: Chunk, copy: Bytes) -> None:
        device.lay(device.places[what.header.storage_key], copy)

    async def scenario() -> None:
        found = await attacked(get, set_to, lambda what, _: device.nvme.open(what.name, device.places[key(what)]))
        assert (found["wrong"] > 0) == (kind == "none"), found

    device.run(scenario)


@pytest.mark.parametrize("kind", KINDS)
def test_no_start_believes_what_an_attacker_left(kind: str) -> None:
    """As above, each time by the headers: with a kill between the alteration and the read."""
    device = Device(kind)
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

    async def scenario() -> None:
        found = await attacked(get, set_to, open_chunk, COUNT // 5)
        assert found["wrong"] == 0, found
        assert found["miss"] > 0

    device.run(scenario)


def key(what: Chunk) -> bytes:
    return what.header.storage_key


@pytest.mark.parametrize("encoding", [Encoding.RAW, Encoding.LZ4])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_any_shape_come_back(kind: str, encoding: Encoding) -> None:
    device = Device(kind, encoding=encoding)

    async def scenario() -> None:
        chunks = [await device.put(chunk(number, layout)) for number, layout in enumerate(layouts().values())]
        for kill in (True, False):
            await device.found_again(kill=kill)
            assert [await device.read(each) for each in chunks] == ["right"] * len(chunks)
            for each in chunks:
                assert device.copy_of(device.places[key(each)])[10] == ENVELOPE_READER

    device.run(scenario)


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_proves_where_it_was_written(kind: str) -> None:
    """One in another place is not believed, also where an attacker says in it that it belongs there."""
    device = Device(kind)

    async def scenario() -> None:
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

    device.run(scenario)


@pytest.mark.parametrize("kind", KINDS)
def test_an_older_copy_that_is_put_back_is_not_the_write_that_was_acknowledged(kind: str) -> None:
    device = Device(kind)

    async def scenario() -> None:
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

    device.run(scenario)


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
def test_what_could_confirm_a_prompt_is_nowhere_on_the_device(kind: str, kill: bool) -> None:
    """Neither in slots nor in the snapshot that a clean stop leaves."""
    device = Device(kind)
    what = chunk(1, token_digest=b"t" * 32, chain_digest=b"c" * 32, parent=b"p" * 32)

    async def scenario() -> None:
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

    device.run(scenario)


def test_what_went_bad_in_memory_is_not_sealed_and_closes_nothing() -> None:
    device = Device("mac")

    async def scenario() -> None:
        bad = chunk(1)
        bad.pieces[1][5] ^= 1
        with pytest.raises(DataLoss, match="resident"):
            await device.put(bad)
        assert device.nvme.statistics().chunk_count == 0
        assert device.nvme.statistics().state == "up"
        await device.put(chunk(1))
        assert await device.read(chunk(1)) == "right"

    device.run(scenario)


# ---------------------------------------------------------------- turned on and off


@pytest.mark.parametrize("kill", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_what_lay_there_before_stays_what_it_was(kind: str, kill: bool) -> None:
    """LOCAL stays LOCAL, over any number of starts; what is new is sealed; and turned off again all of it is read."""
    device = Device("none")

    async def scenario() -> None:
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

    device.run(scenario)


def test_what_is_stored_while_it_is_off_stays_too() -> None:
    device = Device("mac")

    async def scenario() -> None:
        for number, now in enumerate(("mac", "none", "mac", "none", "aead")):
            device.trust = trust(now, KEY)
            await device.found_again()
            await device.put(chunk(number))
            assert [await device.read(chunk(each)) for each in range(number + 1)] == ["right"] * (number + 1)

    device.run(scenario)


@pytest.mark.parametrize("place", ["of a sealed copy", "of a plain one that went", "that was free"])
def test_no_other_copy_without_an_envelope_is_believed(place: str, caplog: pytest.LogCaptureFixture) -> None:
    device = Device("none")

    async def scenario() -> None:
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

    device.run(scenario)


@pytest.mark.parametrize("fails", ["open", "pread"])
def test_what_could_not_be_seen_when_it_was_turned_on_comes_back(fails: str) -> None:
    """And what could not be seen later."""
    device = Device("none")

    async def scenario() -> None:
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

    device.run(scenario)


def test_a_damaged_record_stops_the_tier_and_says_what_to_do() -> None:
    device = Device("none")

    async def scenario() -> None:
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

    device.run(scenario)


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


def test_a_record_of_before_a_time_without_an_envelope_is_not_believed() -> None:
    """The directory was used under another path, whose record is another."""
    device = Device("mac")

    async def scenario() -> None:
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

    device.run(scenario)


def test_a_directory_whose_format_is_damaged_has_the_id_that_the_record_says() -> None:
    service = DeviceService()

    async def scenario() -> None:
        await service.keep(*PATH)
        service.trust = trust("mac")
        await service.restart()
        for _ in range(2):
            await service.restart(kill=True, meanwhile=lambda: service.disk.write_file(HOME / "format", b"garbage"))
            assert await service.fetch(*PATH) == (2, MissReason.NONE)
            await service.restart()
            assert await service.fetch(*PATH) == (2, MissReason.NONE)

    service.run(scenario)


def test_an_earlier_release_does_not_open_a_directory_with_sealed_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take their slots for free."""
    service = DeviceService(trust=trust("mac"))

    async def scenario() -> None:
        await service.keep(*PATH)
        await service.stop()
        service.trust = trust("none", KEY)
        with monkeypatch.context() as earlier:
            earlier.setattr(directory, "KNOWN_FEATURES", frozenset({directory.NEWEST}))
            assert isinstance(await refused(service), NotOurs)
        await service.start()
        assert await service.fetch(*PATH) == (2, MissReason.NONE)

    service.run(scenario)


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
                found = service.controller.fetch(service.session, service.query(*path))
                assert whole_chunks(found) == expected
            await service.restart(kill=True)

    service.run(scenario)


# ---------------------------------------------------------------- keys


@pytest.mark.parametrize("kill", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_keys_change_and_no_chunk_is_lost(kind: str, kill: bool) -> None:
    device = Device(kind, OLD)

    async def scenario() -> None:
        first = await device.put(chunk(1))
        device.trust.ring.change((KEY, OLD))  # SIGHUP
        second = await device.put(chunk(2))
        assert [await device.read(each) for each in (first, second)] == ["right", "right"]
        device.trust = trust(kind, KEY, OLD)
        await device.found_again(kill=kill)
        assert [await device.read(each) for each in (first, second)] == ["right", "right"]
        old, new = (device.copy_of(device.places[key(each)])[304:320].tobytes() for each in (first, second))
        assert (old, new) == (OLD.key_id, KEY.key_id)

    device.run(scenario)


@pytest.mark.parametrize("kill", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_without_its_key_a_chunk_is_a_miss_and_stays(
    kind: str, kill: bool, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    """Its slot is nobody else's, and nothing of it changes, whatever is stored meanwhile; with the key it is back."""
    device = Device(kind)
    first, others = chunk(1), [chunk(number) for number in range(10, 20)]

    async def scenario() -> None:
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

    device.run(scenario)


@pytest.mark.parametrize("kill", [True, False])
@pytest.mark.parametrize("now", ["mac", "none"])
def test_an_old_key_that_is_taken_out_costs_what_it_sealed(now: str, kill: bool) -> None:
    """Also where the snapshot is another key's, or nobody's."""
    device = Device("mac", OLD)

    async def scenario() -> None:
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

    device.run(scenario)


@pytest.mark.parametrize("kill", [True, False])
def test_a_key_that_is_taken_out_while_it_is_used_counts_from_the_next_start(kill: bool) -> None:
    """Until then LOCAL is true; from then on these are misses that stay."""
    service = DeviceService(trust=trust("aead", KEY))

    async def scenario() -> None:
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

    service.run(scenario)


def test_a_start_that_knows_of_no_envelopes_finds_them_by_what_lies_there() -> None:
    """What says that there are some is damaged: the next start without the key erases nothing."""
    service = DeviceService(trust=trust("mac"))

    async def scenario() -> None:
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

    service.run(scenario)


def test_a_device_full_of_chunks_whose_key_is_away_says_so() -> None:
    """More room is not what an operator wants there: the key is."""
    device = Device("mac", OLD)

    async def scenario() -> None:
        with pytest.raises(Exhausted) as full:
            for number in range(1000):
                await device.put(chunk(number))
        assert "envelope key file" not in full.value.message
        assert "raise tiers.nvme.capacity_bytes" in full.value.message
        device.trust = trust("mac", KEY)
        await device.restart(kill=True)
        with pytest.raises(Exhausted, match="envelope key file: put the keys back and start again, or raise"):
            await device.put(chunk(2000))

    device.run(scenario)


def test_locked_chunks_alone_keep_earlier_releases_out() -> None:
    device = Device("mac")

    async def scenario() -> None:
        await device.put(chunk(1))
        await device.stop(kill=True)
        device.disk.remove(HOME / "format")
        device.trust = trust("none")
        device.tier = device.build()
        await device.start()
        assert directory.ENVELOPES_USED in json.loads(device.disk.read_file(HOME / "format"))["features"]

    device.run(scenario)


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


def test_a_value_whose_key_was_away_does_not_come_back_after_a_newer_one() -> None:
    service = ValueService(trust=trust("aead", OLD))

    async def scenario() -> None:
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

    service.run(scenario)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_an_older_value_never_comes_back_sealed(way: Way) -> None:
    service = ValueService(trust=trust("aead"))

    async def scenario() -> None:
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

    service.run(scenario)


@pytest.mark.parametrize("kind", KINDS)
def test_an_altered_chunk_is_a_miss_with_a_reason_and_is_stored_again(kind: str) -> None:
    service = DeviceService(trust=trust(kind))

    async def scenario() -> None:
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

    service.run(scenario)


def test_a_snapshot_that_was_altered_is_not_believed() -> None:
    """With the digest of it made anew: the headers are read."""
    device = Device("mac")

    async def scenario() -> None:
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

    device.run(scenario)
