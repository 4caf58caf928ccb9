"""Ten thousand seeded corruptions of a directory: each chunk comes back right, or is a miss. ``make test`` takes a
thousand of them; ``make test-full`` takes all."""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvstore.errors import DataLoss, KVStoreError, Unavailable
from kvstore.spec import Encoding
from kvstore.tiers import NotOurs
from kvstore.tiers.nvme import NvmeTier
from tests.contracts.chunks import SMALL, Chunk, balance, chunk, holds, layouts, write
from tests.contracts.evictors import KeepsAll
from tests.contracts.local.stands import HOME, columns_of, nvme_tier, proven
from tests.simulated import InlineWorkers, LoopClock, SimulatedDisk, simulate

CORRUPTIONS = 10_000 if os.environ.get("KVSTORE_TEST_SCALE") == "full" else 1_000
PER_IMAGE = 10
SECTOR = 512
CHUNKS = [chunk(number, SMALL if number % 4 else layouts()["kv tail"]) for number in range(40)]
Files = dict[str, bytes]


def tier_on(disk: SimulatedDisk, encoding: Encoding) -> NvmeTier:
    workers = InlineWorkers()
    return nvme_tier(
        disk, HOME, LoopClock(), workers, workers, capacity_bytes=1 << 20, region_bytes=80 << 10, encoding=encoding
    )


async def image(encoding: Encoding) -> Files:
    """A directory of forty chunks after a clean stop."""
    disk = SimulatedDisk(1)
    tier = tier_on(disk, encoding)
    await tier.recover(KeepsAll())
    for each in CHUNKS:
        await write(tier, each)
    await tier.close(proven(await columns_of(tier)))
    return {name: disk.read_file(HOME / name) for name in disk.names(HOME) if name != "lock"}


@dataclass
class Damage:
    """Corruptions of one image. ``touched`` are (file, offset, size) of what may have changed."""

    files: dict[str, bytearray]
    chance: random.Random
    touched: list[tuple[str, int, int]] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)

    def place(self, size: int) -> tuple[str, int]:
        """Somewhere, aligned to ``size``; each file as likely as it is large."""
        names = sorted(name for name in self.files if len(self.files[name]) >= size)
        name = self.chance.choices(names, [len(self.files[each]) for each in names])[0]
        return name, self.chance.randrange(len(self.files[name]) // size) * size

    def one(self) -> None:
        kind = self.chance.choices(("flip", "zero", "swap", "truncate", "copy"), (40, 20, 20, 3, 17))[0]
        self.kinds[kind] += 1
        getattr(self, kind)()

    def flip(self) -> None:
        name, offset = self.place(1)
        self.files[name][offset] ^= self.chance.randrange(1, 256)
        self.touched.append((name, offset, 1))

    def zero(self) -> None:
        name, offset = self.place(SECTOR)
        self.files[name][offset : offset + SECTOR] = bytes(SECTOR)
        self.touched.append((name, offset, SECTOR))

    def swap(self) -> None:
        (one, first), (other, second) = self.place(SECTOR), self.place(SECTOR)
        kept = self.files[one][first : first + SECTOR]
        self.files[one][first : first + SECTOR] = self.files[other][second : second + SECTOR]
        self.files[other][second : second + SECTOR] = kept
        self.touched += [(one, first, SECTOR), (other, second, SECTOR)]

    def truncate(self) -> None:
        name, offset = self.place(1)
        self.touched.append((name, offset, len(self.files[name])))
        del self.files[name][offset:]

    def copy(self) -> None:
        """A page, often one that is a header, over another."""
        (source, first), (target, second) = self.place(4096), self.place(4096)
        if self.chance.random() < 0.7:
            first, second = (each - (each - 4096) % 12288 if each else 0 for each in (first, second))
        self.files[target][second : second + 4096] = self.files[source][first : first + 4096]
        self.touched.append((target, second, 4096))

    def spares(self, name: str, offset: int, size: int) -> bool:
        """Return True when these bytes are what they were, and so is the page that says how their file is cut."""
        return not any(
            file == name and ((start < offset + size and offset < start + length) or start < 4096)
            for file, start, length in self.touched
        )


async def survivors(files: Files, encoding: Encoding) -> set[int] | None:
    """Which chunks come back, every byte compared; None when the directory says that a newer release wrote it."""
    disk = SimulatedDisk(1)
    for name, data in files.items():
        disk.write_file(HOME / name, data)
    try:
        tier = tier_on(disk, encoding)
    except NotOurs:
        return None
    columns = (await tier.recover(KeepsAll())).columns
    balance(tier)
    number_of = {each.header.chain_digest: number for number, each in enumerate(CHUNKS)}
    back: set[int] = set()
    for row, residency in enumerate(columns.residencies.tolist()):
        number = number_of.get(columns.digests[32 * row : 32 * row + 32])
        if number is not None and await is_right(tier, CHUNKS[number], residency):
            back.add(number)
    # And what a confused catalog might ask for: any chunk at any other's place.
    for row, residency in enumerate(columns.residencies.tolist()[:6]):
        await is_right(tier, CHUNKS[(row * 7 + 3) % len(CHUNKS)], residency)
    return back


async def is_right(tier: NvmeTier, what: Chunk, residency: int) -> bool:
    try:
        return await holds(tier, what, residency)
    except (DataLoss, Unavailable):
        return False


@pytest.mark.parametrize("encoding", [Encoding.RAW, Encoding.LZ4])
def test_corruptions(encoding: Encoding) -> None:
    async def scenario() -> None:
        whole = await image(encoding)
        places = await where(whole, encoding)
        assert len(await survivors(whole, encoding) or ()) == len(CHUNKS)
        kinds: Counter[str] = Counter()
        lost = refused = 0
        for seed in range(CORRUPTIONS // PER_IMAGE // 2):
            damage = Damage({name: bytearray(data) for name, data in whole.items()}, random.Random(seed))
            if seed % 2:
                del damage.files["index"]
            for _ in range(PER_IMAGE):
                damage.one()
            kinds += damage.kinds
            try:
                back = await survivors({name: bytes(data) for name, data in damage.files.items()}, encoding)
            except KVStoreError as error:
                raise AssertionError(f"seed {seed}: {damage.touched}") from error
            if back is None:
                refused += 1
                assert any(name == "format" for name, _, _ in damage.touched)
                continue
            spared = {number for number, place in enumerate(places) if damage.spares(*place)}
            assert back >= spared, f"seed {seed}: {sorted(spared - back)} lost by {damage.touched}"
            lost += len(CHUNKS) - len(back)
        assert lost > CORRUPTIONS // 20
        assert refused < 5
        assert min(kinds.values()) > 5
        assert sum(kinds.values()) == CORRUPTIONS // 2

    simulate(scenario(), seed=0)


async def where(files: Files, encoding: Encoding) -> list[tuple[str, int, int]]:
    """File, offset and slot size of every chunk."""
    disk = SimulatedDisk(1)
    for name, data in files.items():
        disk.write_file(HOME / name, data)
    tier = tier_on(disk, encoding)
    recovered = await tier.recover(KeepsAll())
    columns = recovered.columns
    assert recovered.is_proven.all()
    found: dict[bytes, tuple[str, int, int]] = {}
    for row, residency in enumerate(columns.residencies.tolist()):
        region, slot = tier.regions.find(residency)
        found[columns.digests[32 * row : 32 * row + 32]] = (region.path.name, region.offset(slot), region.slot_bytes)
    return [found[each.header.chain_digest] for each in CHUNKS]


def test_an_encoded_chunk_that_ends_in_the_next_slot_is_not_served() -> None:
    """Its bytes are right, its header too; but the slot is too small for it, and the next one is another chunk's."""
    wide, small = chunk(1, layouts()["kv many heads"]), [chunk(number) for number in range(2, 12)]

    async def scenario() -> None:
        disk = SimulatedDisk(1)
        tier = tier_on(disk, Encoding.LZ4)
        await tier.recover(KeepsAll())
        places = [tier.regions.find(await write(tier, each)) for each in (wide, *small)]
        (source, slot), (target, _) = places[0], places[1]
        assert target.slot_bytes < source.slot_bytes
        data = disk.read_file(source.path)[source.offset(slot) :][: source.slot_bytes]
        whole = bytearray(disk.read_file(target.path))
        whole[target.offset(0) : target.offset(0) + len(data)] = data
        disk.write_file(target.path, bytes(whole[: target.file_bytes]))
        stored = await tier.open(wide.name, target.number << 32)
        into = [np.empty(slab.byte_count, np.uint8) for slab in wide.layout.slabs]
        with pytest.raises(DataLoss, match="does not end where its slot does"):
            await stored.read(range(len(into)), into)
        stored.close()

    simulate(scenario(), seed=0)
