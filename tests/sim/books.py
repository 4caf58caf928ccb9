"""What must add up when nobody is doing anything."""

from __future__ import annotations

import asyncio
from collections import Counter

from kvstore.catalog import ROOT_ROW, ChunkTable, Namespace
from kvstore.keys import ROOT_DIGEST
from kvstore.tiers.nvme import Regions
from tests.presence.shown import difference
from tests.sim.disk import DIRECTORY
from tests.sim.life import Life
from tests.sim.oracle import place_of
from tests.simulated.disk import DiskStopped

QUIET_S_MAX = 290.0
STEP_S = 0.25


async def settle_down(life: Life) -> None:
    """Wait for quiet, then for books that balance: what is off for good is a leak."""
    loop = asyncio.get_running_loop()
    until = loop.time() + QUIET_S_MAX
    found = "the service is busy"
    while loop.time() < until and not life.over.is_set():
        await asyncio.sleep(STEP_S)
        if life.controller.parts.movement.backlog_count or life.controller.parts.movement.loads.loading_bytes:
            continue
        try:
            found = imbalance(life) or _of_room(life)
        except DiskStopped:  # the process ended, and none of its tasks has seen that yet
            return
        if not found:
            return
    life.trace.check(life.over.is_set(), f"the books do not balance: {found}")


def imbalance(life: Life) -> str:
    """What does not add up; empty when all does."""
    return _of_rows(life) or difference(life.controller.parts.catalog) or _of_memory(life) or _of_device(life)


def _of_rows(life: Life) -> str:
    table, spaces = life.table, life.controller.parts.catalog.spaces.numbered
    visible = [row for space in spaces for row in space.index.values()]
    ghosts = [row for space in spaces for row in space.ghosts.values()]
    if sorted(visible + ghosts) != list(table.rows()):
        return f"{len(visible)} chunks and {len(ghosts)} ghosts in {len(list(table.rows()))} rows"
    for row in visible:
        if not table.is_resident(row):
            return f"row {row} is visible and nowhere"
    for row in ghosts:
        if not table.is_needed(row):
            return f"ghost {row} that nobody needs"
        if table.is_resident(row):
            return f"ghost {row} holds a copy"
    children = Counter(table.parents[row] for row in visible + ghosts if table.parents[row] != ROOT_ROW)
    for row in visible + ghosts:
        if table.child_counts[row] != children[row]:
            return f"row {row} counts {table.child_counts[row]} children and has {children[row]}"
    if table._holds:
        return f"holds {table._holds}"
    if any(space.pending for space in spaces):
        return "a pending store that nobody makes"
    for space in spaces:
        if problem := _of_tails(space, table):
            return problem
    return ""


def _of_tails(space: Namespace, table: ChunkTable) -> str:
    """Every partial chunk that can be found is told of by its length, and no other."""
    lengths: dict[bytes, int] = {}
    for row in space.index.values() if space.model_spec is not None else ():
        if space.is_tail(table.token_counts[row]):
            parent = ROOT_DIGEST if table.parents[row] == ROOT_ROW else table.digests[table.parents[row]]
            lengths[parent] = lengths.get(parent, 0) | 1 << table.token_counts[row]
    told = {parent: space.tails.bits(parent, table.token_counts) for parent in space.tails}
    return "" if told == lengths else f"tails of {len(lengths)} parents, told of {len(told)}, or of other lengths"


def _of_memory(life: Life) -> str:
    stats, arena = life.controller.stats(), life.arena
    rows = list(life.memory.rows())
    resident = sum(life.memory.placement(row).byte_count for row in rows)
    if arena.used_bytes != resident + stats.reserved_bytes + stats.loading_bytes:
        return f"{arena.used_bytes} bytes used: {resident} resident, {stats.reserved_bytes} reserved"
    if arena.chunk_count != len(rows) or arena.used_bytes > arena.capacity_bytes:
        return f"{arena.chunk_count} chunks, {arena.used_bytes} bytes in the arena"
    free = sum(region.free_bytes for region in arena.regions)
    if free + arena.used_bytes != sum(region.usable for region in arena.regions):
        return f"{free} bytes free and {arena.used_bytes} used of {sum(region.usable for region in arena.regions)}"
    held = (stats.leased_bytes, stats.lease_count, stats.reservation_count, stats.staging_bytes, stats.ticket_bytes)
    if any(held) or stats.reserved_bytes or stats.loading_bytes:
        return f"leases, reservations, staging, tickets: {held}"
    return ""


def _of_room(life: Life) -> str:
    """Whatever memory holds makes way while nobody holds it."""
    wanted = life.setup.arena_region_bytes // 8192 * 4096
    placement = life.controller.parts.movement.room.allocate((wanted,), frozenset())
    if placement is None:
        return f"no room for {wanted} bytes: {len(list(life.memory.rows()))} chunks do not go"
    life.arena.free(placement)
    return ""


def _of_device(life: Life) -> str:
    nvme, device = life.nvme, life.device
    if nvme is None or device is None:
        return ""
    said, regions = nvme.statistics(), nvme.regions
    parts = said.allocated_bytes + said.free_bytes + said.quarantined_bytes + said.overhead_bytes
    if said.file_bytes != parts:
        return f"files of {said.file_bytes} bytes hold {parts}"
    there = sum(
        len(life.disk.disk.read_file(DIRECTORY / name))
        for name in life.disk.disk.names(DIRECTORY)
        if name.startswith("region-")
    )
    counted = said.file_bytes + regions.lost_bytes  # what an error hid may be gone, or not
    most = counted + regions.hidden_bytes
    fits = there == counted if not life.disk.injected else there <= most or life.disk.has_failed_to_remove
    if not fits:
        return f"{there} bytes on the device, {said.file_bytes} in the account, {regions.lost_bytes} lost"
    if counted > said.capacity_bytes:
        return f"{counted} bytes of files, {regions.lost_bytes} of them lost, in a capacity of {said.capacity_bytes}"
    others = sum(map(len, device.spares.values()))
    rows = list(device.rows())
    places = [place_of(device.residency(row)) for row in rows]
    if len(set(places)) != len(places):
        return "two chunks in one slot"
    if said.chunk_count != len(rows) + others:
        return f"{said.chunk_count} slots in use, {len(rows)} chunks and {others} further copies"
    return _of_slots(regions)


def _of_slots(regions: Regions) -> str:
    for region in regions.by_number.values():
        idle = [*region.free, *region.quarantined, *region.unread, *region.unerased]
        if len(set(idle)) != len(idle):
            return f"region {region.number} has a slot free twice"
        if region.readers or region.leaving:
            return f"region {region.number} has readers {region.readers}"
    return ""
