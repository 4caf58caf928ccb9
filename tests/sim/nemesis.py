"""Errors, delays, rot: one thing after another, while the clients go on."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Awaitable, Callable

from kvstore.catalog import NOWHERE
from kvstore.chunk import ChunkLayout
from kvstore.errors import DataLoss
from kvstore.tiers.nvme.slots import RegionFile
from tests.sim.life import Life
from tests.sim.oracle import name_of, place_of, told

FAILING = (
    *("pwrite", "pwrite", "sync", "sync", "pread", "open", "allocate", "remove", "sync_directory", "size"),
    *("rename", "close"),
)
STALL_S_MAX = 30.0


def draw_errors(life: Life, chance: random.Random) -> str:
    """Some methods fail, often or always, from now on."""
    methods = chance.sample(sorted(set(FAILING) - {"close"}), chance.randint(1, 3))
    rate = chance.choice((0.1, 0.5, 1.0))
    for method in methods:
        life.disk.rates[method] = rate, chance.choice((errno.EIO, errno.EIO, errno.ENOSPC))
    return f"{', '.join(methods)} at {rate}"


class Nemesis:
    """What goes wrong in one life."""

    def __init__(self, life: Life, chance: random.Random) -> None:
        self._life = life
        self._chance = chance
        self._trace = life.trace
        self._totals = life.oracle.totals

    async def run(self, stopping: asyncio.Event) -> None:
        """Until told to stop; then nothing fails any more."""
        ways: list[tuple[int, Callable[[], Awaitable[str]]]] = [
            (4, self._errors), (2, self._stall), (3, self._rot_device), (3, self._rot_memory), (1, self._misdirect),
            (2, self._read_again), (1, self._round), (1, self._canary),
        ]  # fmt: skip
        try:
            while not stopping.is_set() and not self._life.is_over:
                await asyncio.sleep(self._chance.choice((0.01, 0.1, 1.0)))
                way = self._chance.choices([way for _, way in ways], [weight for weight, _ in ways])[0]
                self._trace.add("nemesis", f"{way.__name__[1:]}: {await way()}")
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            if not self._life.is_over:
                self._trace.failure = self._trace.failure or error
                self._trace.add("FAILURE", f"nemesis: {error!r}")
                self._life.over.set()
        finally:
            self._calm()

    def _calm(self) -> None:
        self._life.disk.rates.clear()
        for workers in self._life.device_workers:
            workers.stall_s = 0.0

    async def _errors(self) -> str:
        said = draw_errors(self._life, self._chance)
        self._trace.add("nemesis", said)
        await asyncio.sleep(self._chance.choice((0.002, 0.1, 1.0, 5.0)))
        self._life.disk.rates.clear()
        return said

    async def _stall(self) -> str:
        """The device takes its time; memory does not."""
        life = self._life
        for movers in self._chance.choice(((life.readers,), (life.writers,), (life.keepers,), life.device_workers)):
            movers.stall_s = self._chance.choice((0.3, 3.0, STALL_S_MAX))
        self._totals["faults"] += 1
        await asyncio.sleep(self._chance.uniform(0.1, 3.0))
        for workers in self._life.device_workers:
            workers.stall_s = 0.0
        return "over"

    # ------------------------------------------------------------ rot

    def _row_on_device(self) -> int | None:
        life = self._life
        if life.nvme is None:
            return None
        rows = [
            row
            for row in life.table.rows()
            if life.residency(row) != NOWHERE and life.controller.parts.catalog.space_of(row).model_spec is not None
        ]
        return self._chance.choice(rows) if rows else None

    async def _rot_device(self) -> str:
        """A byte of a copy changes; a check of it must find that."""
        life, row = self._life, self._row_on_device()
        if row is None or life.nvme is None:
            return "nothing there"
        residency, name = life.residency(row), life.controller.parts.movement.names.of(row)
        region, slot = life.nvme.regions.find(residency)
        data = life.disk.disk.read_file(region.path)[region.offset(slot) :][: region.slot_bytes]
        place = self._verified_byte(data, name.layout)
        if place is None:
            return "bad already"
        life.disk.disk.flip(region.path, region.offset(slot) + place, 1 << self._chance.randrange(8))
        life.oracle.rotted(place_of(residency))
        said = f"byte {place} of {told(name_of(life, row))} at {place_of(residency)}"
        self._trace.add("nemesis", said)
        self._totals["flips"] += 1
        bad = self._slot_bytes(region, slot)
        await asyncio.sleep(self._chance.choice((0.0, 0.0, 0.05)))
        if self._slot_bytes(region, slot) != bad:
            return f"{said}, written over"
        return f"{said}, {await self._found(row, residency)}"

    def _verified_byte(self, data: bytes, layout: ChunkLayout) -> int | None:
        """A byte that a checksum covers: of the header, or of a strip."""
        try:
            header = self._life.trust.read_header(data, layout, may_be_plain=True)
        except DataLoss:
            return None
        if header is None:
            return None
        if self._chance.random() < 0.3:
            return self._chance.randrange(header.bytes_before(layout))
        stored = header.stored
        offsets = layout.strip_offsets if stored is None else stored.offsets
        lengths = layout.strip_lengths if stored is None else stored.lengths
        strip = self._chance.randrange(layout.strip_count)
        return header.bytes_before(layout) + int(offsets[strip]) + self._chance.randrange(int(lengths[strip]))

    def _slot_bytes(self, region: RegionFile | None, slot: int) -> bytes:
        if region is None or region.path.name not in self._life.disk.disk.names(region.path.parent):
            return b""  # its file was given up
        return self._life.disk.disk.read_file(region.path)[region.offset(slot) :][: region.slot_bytes]

    async def _found(self, row: int, residency: int) -> str:
        """Have the scrub look. Nothing is asserted where reads fail, or the copy went meanwhile."""
        life, errors = self._life, self._life.disk.injected
        region, slot = life.nvme.regions.find(residency) if life.nvme is not None else (None, 0)
        bad = self._slot_bytes(region, slot)
        if life.residency(row) != residency or life.device is None:
            return "gone"
        good = await life.controller.parts.movement.checks.check(life.device, row)
        here = life.residency(row) == residency and life.disk.injected == errors
        if here and self._slot_bytes(region, slot) != bad:
            return "written over"  # what a crash left is written anew before it is promised
        self._trace.check(not (good and here) or life.is_over, f"the scrub does not see rot at {place_of(residency)}")
        return "still there" if good else "found"

    async def _misdirect(self) -> str:
        """The device wrote another chunk's slot over this one, and said nothing."""
        life, row = self._life, self._row_on_device()
        if row is None or life.nvme is None:
            return "nothing there"
        residency = life.residency(row)
        region, slot = life.nvme.regions.find(residency)
        others = [
            each
            for each in life.table.rows()
            if life.residency(each) != NOWHERE and each != row and self._fits(region, each)
        ]
        if not others:
            return "no other chunk of this size"
        source, source_slot = life.nvme.regions.find(life.residency(self._chance.choice(others)))
        data = life.disk.disk.read_file(source.path)[source.offset(source_slot) :][: region.slot_bytes]
        whole = bytearray(life.disk.disk.read_file(region.path))
        whole[region.offset(slot) : region.offset(slot) + region.slot_bytes] = data
        life.disk.disk.write_file(region.path, bytes(whole))
        life.oracle.rotted(place_of(residency))
        self._totals["misdirected"] += 1
        return f"{told(name_of(life, row))} at {place_of(residency)}"

    def _fits(self, region: RegionFile, row: int) -> bool:
        nvme = self._life.nvme
        assert nvme is not None
        return nvme.regions.find(self._life.residency(row))[0].slot_bytes == region.slot_bytes

    async def _rot_memory(self) -> str:
        """A bit of a resident chunk changes; the scrub must find that. Not where chunks go beyond the node before it
        does: what is sent is not read again."""
        life, table = self._life, self._life.table
        rows = list(life.memory.rows()) if life.cloud is None else []
        if not rows:
            return "nothing there"
        row = self._chance.choice(rows)
        placement, layout = life.memory.placement(row), life.controller.parts.movement.names.of(row).layout
        strip = self._chance.randrange(layout.strip_count)
        slab = next(number for number, each in enumerate(layout.slabs) if strip < each.strip_first + each.strip_count)
        place = int(layout.strip_offsets[strip]) - layout.slabs[slab].offset
        place += self._chance.randrange(int(layout.strip_lengths[strip]))
        placement.pieces[1 + slab][place] ^= 1 << self._chance.randrange(8)
        life.oracle.tainted.add((placement.slot, placement.generation))
        self._totals["flips"] += 1
        await asyncio.sleep(self._chance.choice((0.0, 0.0, 0.01)))
        if not life.memory.holds(row, placement):
            return "gone"
        good = await life.controller.parts.movement.checks.check(life.memory, row)
        self._trace.check(not good or life.is_over, f"the scrub does not see rot in row {row}")
        return f"{told(name_of(life, row))} found" if table.digests[row] else "found"

    # ------------------------------------------------------------ the service's own checks

    async def _read_again(self) -> str:
        """A scrub that holds nothing: the slot may change hands as soon as it is read."""
        life, row = self._life, self._row_on_device()
        if row is None or life.device is None:
            return "nothing there"
        return str(await life.controller.parts.movement.checks.check(life.device, row))

    async def _round(self) -> str:
        if not self._life.setup.scrub_bytes_per_s:
            return "off"
        await self._life.controller.parts.movement.checks.round()
        return "done"

    async def _canary(self) -> str:
        life, errors = self._life, self._life.disk.injected
        if life.nvme is None:
            return "no device"
        full = life.controller.parts.counters.snapshot()["canary_failures"]
        works = await life.controller.parts.movement.canaries.canary(life.nvme)
        said = life.controller.parts.counters.snapshot()["canary_failures"] - full
        self._trace.check(works or said, "a canary died in silence")
        return f"{works} after {life.disk.injected - errors} errors"
