"""What must be there. Acknowledged copies are promises; every copy that goes has a cause on record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvstore.catalog import NOWHERE, Copies
from kvstore.chunk import ChunkLayout
from kvstore.controller import Settled
from kvstore.errors import DataLoss
from kvstore.movement.eviction import Eviction
from kvstore.movement.loading import Loading
from kvstore.seams.memory import Bytes
from kvstore.spec import Durability, Exactness, MissReason, Provenance
from kvstore.tiers.nvme import Regions
from tests.sim.cloud import Cloud, key_of
from tests.sim.models import SPECS, VALUE_NAMES, Chain, Name, body, version_of
from tests.sim.trace import Trace

if TYPE_CHECKING:
    from tests.sim.life import Life

Place = tuple[int, int]
"""(region, slot) on the device; (slot, generation) in the arena."""


def place_of(residency: int) -> Place:
    return residency >> 32 & 0xFFFFFF, residency & 0xFFFFFFFF


def told(name: Name) -> str:
    return f"{name[0].hex()[:6]}/{name[1].hex()[:8]}"


class Oracle:
    """Outlives the processes. ``must`` maps every chunk whose copy on the device was acknowledged, and not removed
    since, to where that copy lies. ``excused`` are places on the device whose content a test damaged; ``tainted``
    are those of memory."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.must: dict[Name, Place] = {}
        self.excused: set[Place] = set()
        self.tainted: set[Place] = set()
        self.gone: set[Place] = set()
        """Placements that a quarantine took from under their readers."""
        self.hidden: set[Name] = set()
        """What was promised and this process cannot see, for it could not read where it lies."""
        self.closed: set[Name] = set()
        """Values that were hidden once while more keys than the service remembers took the place of others."""
        self.objects: dict[Name, ChunkLayout] = {}
        """What somebody was told to be OBJECT: no object store loses it, whatever becomes of the node."""
        self.oldest: dict[Name, int] = {}
        """The version of a value before which none may be served any more."""
        self._oldest_on_device: dict[Name, int] = {}
        self._versions = 0
        self.totals: Counter[str] = Counter()
        self._owners: dict[Place, Name] = {}
        self._cause = ""

    # ------------------------------------------------------------ promises

    def acknowledged(self, name: Name, place: Place, *, is_tainted: bool) -> None:
        other = self._owners.get(place)
        self.trace.check(other in (None, name), f"{told(name)} was written over {told(other or name)} at {place}")
        self.totals["acknowledged"] += 1
        self.excused.discard(place)
        if is_tainted:
            self.excused.add(place)
            return
        self.withdraw(name)
        self.must[name] = place
        self._owners[place] = name

    def withdraw(self, name: Name) -> None:
        place = self.must.pop(name, None)
        self.hidden.discard(name)
        self.closed.discard(name)
        if place is not None:
            self._owners.pop(place, None)

    def rotted(self, place: Place) -> None:
        """A test damages what lies there."""
        self.excused.add(place)
        owner = self._owners.get(place)
        if owner is not None:
            self.withdraw(owner)

    def claimed_here(self, life: Life, names: list[Name]) -> None:
        """A client was told that the node has these chunks."""
        for name in names:
            self.trace.check(row_of(life, name) is not None, f"{told(name)} is said to be here and is not")

    def claimed_local(self, life: Life, names: list[Name]) -> None:
        """A client was told that these chunks are on the device."""
        for name in names:
            row = row_of(life, name)
            self.trace.check(row is not None, f"{told(name)} is LOCAL and not there")
            residency = life.residency(row or 0)
            self.trace.check(residency != NOWHERE, f"{told(name)} is LOCAL and memory alone has it")
            self.totals["local"] += 1
            if name not in self.must and place_of(residency) not in self.excused:
                self.acknowledged(name, place_of(residency), is_tainted=False)  # a crash left it, and it was believed

    def claimed_beyond(self, cloud: Cloud, settled: Settled, names: Mapping[Name, ChunkLayout], since_s: float) -> None:
        """A client that asked at ``since_s`` was told which levels these whole chunks have reached."""
        if Durability.SHARED not in settled.missing:
            for name in names:
                self.trace.check(
                    cloud.engine.was_there(key_of(name), since_s), f"{told(name)} is SHARED and was not there"
                )
                self.totals["shared"] += 1
        if Durability.OBJECT not in settled.missing:
            for name, layout in names.items():
                self.objects[name] = layout
                self.totals["object"] += 1
            self._verify_objects(cloud, names)

    def verify_objects(self, cloud: Cloud) -> None:
        """Every chunk that is OBJECT lies there, to the bit."""
        self._verify_objects(cloud, self.objects)

    def _verify_objects(self, cloud: Cloud, names: Mapping[Name, ChunkLayout]) -> None:
        for name, layout in names.items():
            value = cloud.objects.values.get(key_of(name))
            self.trace.check(value is not None, f"{told(name)} is OBJECT and not there")
            offset = layout.header_bytes
            for slab in body(name, layout):
                right = (value or b"")[offset : offset + slab.size] == slab.tobytes()
                self.trace.check(right, f"{told(name)} has other bytes in the object store")
                offset += slab.size

    # ------------------------------------------------------------ what may go

    def watch(self, life: Life) -> None:
        """Record why copies go in this process, once its tiers are attached."""
        movement, trace, table = life.controller.parts.movement, self.trace, life.table
        removal, checks = movement.removal, movement.checks
        drop, remove, quarantine, give_up = removal.drop, removal.remove, removal.quarantine, checks._give_up

        def on_drop(copies: Copies, row: int, reason: MissReason, *, erase: bool = False) -> None:
            allowed = self._cause or not table.is_held(row) or life.is_over
            trace.check(allowed, f"row {row} was dropped under a lease")
            if copies is life.device and not life.is_over:
                name = name_of(life, row)
                trace.check(self._cause, f"{told(name)} was forgotten for no reason on record")
                trace.add("oracle", f"{told(name)} {self._cause} from {place_of(copies.residency(row))}")
                self.withdraw(name)
            drop(copies, row, reason, erase=erase)

        def on_give_up(copies: Copies, row: int) -> None:
            with self._because("given up"):
                give_up(copies, row)

        def on_remove(row: int, reason: MissReason, *, erase: bool = False) -> None:
            trace.check(reason is MissReason.STALE, f"removed: {reason.name}")
            with self._because("superseded"):
                remove(row, reason, erase=erase)

        async def on_quarantine(copies: Copies, row: int, residency: int) -> bool:
            if copies.residency(row) != residency:
                pass  # it left while it was read, and was perhaps stored anew: nothing is given up
            elif copies is life.memory and not life.is_over:
                placement = life.memory.placement(row)
                place = placement.slot, placement.generation
                known = place in self.tainted
                trace.check(known, f"{told(name_of(life, row))} in memory is said to be bad and is not")
                self.gone.add(place)
            elif not life.is_over:
                place = place_of(residency)
                owner = self._owners.get(place)
                if owner is not None and place not in self.excused:
                    raise trace.fail(f"{told(owner)} at {place} is said to be bad and is not")
                trace.add("oracle", f"quarantine {place}")
                self.totals["quarantined"] += 1
            return await quarantine(copies, row, residency)

        removal.drop, removal.remove = on_drop, on_remove  # type: ignore[method-assign]
        drop_spare = partial(self._on_drop_spare, life, removal.drop_spare)
        removal.drop_spare = drop_spare  # type: ignore[method-assign]  # watched, as the others above
        removal.quarantine, checks._give_up = on_quarantine, on_give_up  # type: ignore[method-assign]
        self._watch_evictions(life)
        self._watch_moves(life)

    def _on_drop_spare(
        self, life: Life, drop_spare: Callable[[Copies, int, int], None], copies: Copies, row: int, residency: int
    ) -> None:  # fmt: skip
        """One of several copies on the device gives way: what was promised rests on another one."""
        name, place = name_of(life, row), place_of(residency)
        drop_spare(copies, row, residency)
        if copies is not life.device or life.is_over or self.must.get(name) != place:
            return
        self.withdraw(name)
        left = [copies.residency(row)] if row in copies else []
        left += [spare.residency for spare in copies.spares.get(row, ())]
        good = next((each for each in map(place_of, left) if each not in self.excused), None)
        self.trace.add("oracle", f"{told(name)} gave way at {place}, and is at {good}")
        if good is not None:
            self.must[name] = good
            self._owners[good] = name

    def _watch_evictions(self, life: Life) -> None:
        if life.device is None:
            return
        eviction: Eviction = life.device.tier.free_slots.evictor  # type: ignore[attr-defined]  # the device's own, watched
        evict = eviction._give_up

        def on_evict(row: int) -> None:
            held = life.table.is_held(row) and not life.is_over
            self.trace.check(not held, f"row {row} was evicted while it was held")
            self.totals["evictions"] += 1
            with self._because("evicted"):
                evict(row)

        eviction._give_up = on_evict  # type: ignore[method-assign]

    def _watch_moves(self, life: Life) -> None:
        loads, end = life.controller.parts.movement.loads, life.controller.parts.movement.loads._end

        def on_end(loading: Loading) -> None:
            end(loading)
            if loading.lost:
                self.gone.add((loading.placement.slot, loading.placement.generation))

        loads._end = on_end  # type: ignore[method-assign]
        for writes in life.controller.parts.movement.writes:
            keep = writes.target.keep

            def on_keep(row: int, residency: int, keep: Callable[[int, int], None] = keep) -> None:
                if not life.is_over:
                    placement = life.memory.placement(row)
                    is_tainted = (placement.slot, placement.generation) in self.tainted
                    self.acknowledged(name_of(life, row), place_of(residency), is_tainted=is_tainted)
                keep(row, residency)

            writes.target.keep = on_keep  # type: ignore[method-assign]

    @contextmanager
    def _because(self, cause: str) -> Iterator[None]:
        before, self._cause = self._cause, cause
        try:
            yield
        finally:
            self._cause = before

    # ------------------------------------------------------------ after a start

    def recovered(self, life: Life) -> None:
        """Whatever was promised is visible, or lies where the service knows that it could not read."""
        self.tainted.clear()
        self.gone.clear()
        self.hidden.clear()
        if life.nvme is None:
            return  # nothing that this process is told can be written down: see ``replaced``
        self.oldest = dict(self._oldest_on_device)
        for name in list(self.must):
            row = row_of(life, name)
            if row is not None and life.residency(row) != NOWHERE:
                continue
            number, slot = self.must[name]
            region = life.nvme.regions.by_number.get(number)
            unseen = slot in region.unread if region is not None else bool(life.nvme.regions.away)
            if not unseen and name in self.closed:
                self.withdraw(name)
                continue
            said = f"{told(name)} at {self.must[name]} was acknowledged and is not there"
            self.trace.check(unseen and life.disk.injected, said)
            self.totals["hidden"] += 1
            self.hidden.add(name)
            if name in VALUE_NAMES and life.setup.newest_count_max < len(VALUE_NAMES):
                self.closed.add(name)

    def watch_room(self, regions: Regions) -> None:
        """What an operator's smaller capacity takes is no promise any more."""
        surplus = regions.surplus

        def on_surplus(held: dict[int, int]) -> list[str]:
            files = surplus(held)
            gone = {int(name.split("-")[1]) for name in files}
            for name in [name for name, (number, _) in self.must.items() if number in gone]:
                self.withdraw(name)
            self.trace.add("oracle", f"gives up regions {sorted(gone)}")
            self.totals["regions_given_up"] += len(gone)
            return files

        regions.surplus = on_surplus  # type: ignore[method-assign]

    # ------------------------------------------------------------ values

    def is_replaced(self, name: Name) -> None:
        """Somebody begins to store a value. What is hidden under its name is given up by that, whatever comes of it."""
        if name in self.hidden:
            self.withdraw(name)

    def replaced(self, life: Life, name: Name) -> int:
        """A store was claimed: no version older than this is served from now on. Where there is no device that could
        know of it, that holds for this process."""
        self._versions += 1
        self.oldest[name] = self._versions
        if life.nvme is not None:
            self._oldest_on_device[name] = self._versions
        return self._versions

    def served(self, name: Name, oldest: int, found: Sequence[Bytes]) -> int:
        """A reader who came when ``oldest`` was the oldest version got this."""
        version = version_of(name, found)
        self.trace.check(version is not None, f"{told(name)} has other bytes than any version of it")
        self.trace.check((version or 0) >= oldest, f"{told(name)} is version {version}, and {oldest} took its place")
        self.totals["values"] += 1
        return version or 0

    async def verify(self, life: Life) -> None:
        """Read back every promise to the bit."""
        for spec in SPECS:
            life.controller.lookups.lookup(Chain(spec, (0,), hidden=(1,)).query())  # makes its namespaces known
        for name in list(self.must):
            while name in self.must and name not in self.hidden:
                row = row_of(life, name)
                if row is None or life.residency(row) == NOWHERE:
                    raise self.trace.fail(f"{told(name)} at {self.must[name]} was acknowledged and is not there")
                if await self._is_served(life, row, name):
                    break

    async def _is_served(self, life: Life, row: int, name: Name) -> bool:
        """False when the copy the catalog chose was bad: another one may be chosen now."""
        device, found = life.device, life.controller.parts.movement.names.of(row)
        assert device is not None
        residency = device.residency(row)
        target = [np.empty(slab.byte_count, np.uint8) for slab in found.layout.slabs]
        try:
            stored = await device.tier.open(found, residency)
            try:
                await stored.read(range(len(target)), target)
            finally:
                stored.close()
        except DataLoss:
            self.totals["copies_passed_over"] += 1
            await life.controller.parts.movement.removal.quarantine(device, row, residency)
            return False
        if place_of(residency) not in self.excused:
            if name in VALUE_NAMES:
                self.served(name, self.oldest.get(name, 0), target)
            else:
                right = all((one == other).all() for one, other in zip(target, body(name, found.layout), strict=True))
                self.trace.check(right, f"{told(name)} has other bytes on the device")
        self.totals["verified"] += 1
        return True


def name_of(life: Life, row: int) -> Name:
    return life.controller.parts.catalog.space_of(row).fingerprint, life.table.digests[row]


def row_of(life: Life, name: Name) -> int | None:
    space = life.controller.parts.catalog.spaces.find(name[0], Provenance.IN_CONTEXT, Exactness.EXACT)
    return None if space is None else space.index.get(name[1])
