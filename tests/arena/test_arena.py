"""Extents never overlap, never leak, and a generation never returns."""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.arena import Arena, Placement, Staging, prefault
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.seams import FaultPoints, SystemMemory
from kvstore.seams.memory import Mapping
from tests.faulty_workers import FaultyWorkers, cancelled, refused
from tests.simulated import BytearrayMemory, InlineWorkers, ManualClock
from tests.simulated.memory import POISON

PAGE = 4096


class ArenaMachine(RuleBasedStateMachine):
    """Allocations and frees against a list of what is out."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(BytearrayMemory(), FaultPoints(), capacity_bytes=40 * PAGE, region_bytes=16 * PAGE)
        self.out: list[tuple[Placement, int]] = []
        self.generations: set[tuple[int, int]] = set()
        self.number = 0

    @rule(pieces=st.lists(st.integers(1, 6), min_size=2, max_size=6))
    def allocate(self, pieces: list[int]) -> None:
        sizes = tuple(piece * PAGE for piece in pieces)
        placement = self.arena.allocate(sizes)
        if placement is None:
            return
        assert [piece.size for piece in placement.pieces] == list(sizes)
        assert (placement.slot, placement.generation) not in self.generations
        self.generations.add((placement.slot, placement.generation))
        self.number = self.number % 200 + 1
        for piece in placement.pieces:
            piece[:] = self.number
        self.out.append((placement, self.number))

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.out:
            placement, _ = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
            self.arena.free(placement)
            assert all((piece == POISON).all() for piece in placement.pieces)

    @rule(data=st.data(), pages=st.integers(1, 12))
    def free_run(self, data: st.DataObject, pages: int) -> None:
        """Only what lies in a run goes; then the run can be had."""
        if not self.out:
            return
        first, _ = data.draw(st.sampled_from(self.out))
        slots = self.arena.run_from(first, pages * PAGE)
        region, start = self.arena.regions[first.extents[0].region], first.extents[0].offset
        if slots is None:
            assert start + pages * PAGE > region.usable
            return
        stop = start + pages * PAGE
        for placement, number in list(self.out):
            lies_there = any(
                extent.region == region.index and extent.offset < stop and extent.offset + extent.byte_count > start
                for extent in placement.extents
            )
            assert lies_there == (placement.slot in slots)
            if lies_there:
                self.out.remove((placement, number))
                self.arena.free(placement)
        offset, size = max((a, size) for a, size in zip(region._offsets, region._sizes, strict=True) if a <= start)
        assert offset + size >= stop

    @invariant()
    def nobody_wrote_over_another(self) -> None:
        for placement, number in self.out:
            assert all((piece == number).all() for piece in placement.pieces)

    @invariant()
    def every_byte_is_accounted_for(self) -> None:
        held = sum(placement.byte_count for placement, _ in self.out)
        free = sum(size for region in self.arena.regions for size in region._sizes)
        assert self.arena.used_bytes == held
        usable = sum(region.usable for region in self.arena.regions)
        assert held + free == usable <= self.arena.capacity_bytes
        assert self.arena.chunk_count == len(self.out)
        for region in self.arena.regions:
            runs = list(zip(region._offsets, region._sizes, strict=True))
            assert all(a + size < b for (a, size), (b, _) in zip(runs, runs[1:], strict=False)), "not joined"


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_chunk_is_split_only_where_it_must_be() -> None:
    arena = Arena(BytearrayMemory(), FaultPoints(), capacity_bytes=8 * PAGE, region_bytes=4 * PAGE)
    first = arena.allocate((PAGE, 2 * PAGE))
    second = arena.allocate((PAGE, PAGE, PAGE))
    third = arena.allocate((PAGE, PAGE))
    assert first is not None
    assert second is not None
    assert third is not None
    assert [len(each.extents) for each in (first, second, third)] == [1, 1, 2]
    assert arena.allocate((PAGE, PAGE)) is None


@pytest.mark.parametrize("pieces", [(PAGE, 8 * PAGE), (5 * PAGE, 4 * PAGE)])
def test_what_could_never_fit_names_the_setting(pieces: tuple[int, ...]) -> None:
    arena = Arena(BytearrayMemory(), FaultPoints(), capacity_bytes=8 * PAGE, region_bytes=4 * PAGE)
    with pytest.raises(InvalidRequest, match=r"arena\.capacity_bytes"):
        arena.allocate(pieces)


def test_the_generation_changes_before_the_bytes_are_given_away() -> None:
    faults = FaultPoints()
    arena = Arena(BytearrayMemory(), faults, capacity_bytes=8 * PAGE, region_bytes=8 * PAGE)
    placement = arena.allocate((PAGE, PAGE))
    assert placement is not None
    placement.pieces[1][:] = 7
    seen = []

    def look() -> None:
        generation = arena.generations.bytes.view(np.uint64)[placement.slot]
        seen.append((int(generation) != placement.generation, bool((placement.pieces[1] == 7).all())))

    faults.arm("arena.free.bumped", look)
    arena.free(placement)
    assert seen == [(True, True)]


async def test_prefault_stops_when_memory_is_short_and_the_arena_still_serves() -> None:
    arena = Arena(BytearrayMemory(), FaultPoints(), capacity_bytes=96 << 20, region_bytes=48 << 20)
    left = iter([1 << 40, 1 << 40, 0])
    await prefault(arena, InlineWorkers(), ManualClock(), lambda: next(left))
    assert arena.prefaulted_bytes == 32 << 20
    for _ in range(2):
        assert arena.allocate((PAGE, 30 << 20)) is not None


@pytest.mark.parametrize("way", [refused, cancelled], ids=lambda way: way.__name__)
async def test_a_prefault_that_no_mover_takes_ends_and_the_arena_still_serves(way: Any) -> None:
    arena = Arena(BytearrayMemory(), FaultPoints(), capacity_bytes=64 << 20, region_bytes=64 << 20)
    workers = FaultyWorkers()
    workers.fail(way, 1)
    await prefault(arena, workers, ManualClock(), lambda: 1 << 40)
    assert (arena.prefaulted_bytes, len(workers.names)) == (16 << 20, 2)
    assert arena.allocate([1 << 20]) is not None


async def test_prefault_ends_without_an_error_when_the_machine_shares_no_more_memory() -> None:
    memory = BytearrayMemory()
    arena = Arena(memory, FaultPoints(), capacity_bytes=96 << 20, region_bytes=48 << 20)

    def refuse(name: str, byte_count: int) -> Mapping:
        raise Unavailable(f"cannot share {byte_count} bytes of memory")

    assert arena.allocate((PAGE, 30 << 20)) is not None
    memory.read_only_to_others = refuse  # type: ignore[method-assign]
    await prefault(arena, InlineWorkers(), ManualClock(), lambda: 1 << 40)
    assert arena.prefaulted_bytes == 48 << 20


@pytest.fixture
def region() -> int:
    mapping = SystemMemory().read_only_to_others("test", 1 << 16)
    mapping.bytes[:] = 5
    descriptor = os.dup(mapping.descriptor)
    assert int(mapping.bytes[9]) == 5
    return descriptor


def test_a_receiver_of_a_region_can_only_read(region: int) -> None:
    assert mmap.mmap(region, 1 << 16, prot=mmap.PROT_READ)[9] == 5
    with pytest.raises(PermissionError):
        mmap.mmap(region, 1 << 16)
    with pytest.raises(PermissionError):
        os.write(region, b"x")
    with pytest.raises(PermissionError):
        os.pwrite(region, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(region, 0)
    with pytest.raises(PermissionError):
        os.ftruncate(region, 1 << 20)
    punch = 0x03  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.fallocate(region, punch, ctypes.c_long(0), ctypes.c_long(4096)) == -1
    with pytest.raises(PermissionError):
        fcntl.fcntl(region, 1033, 0x08)  # no further seals
    reopened = os.open(f"/proc/self/fd/{region}", os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(reopened, 1 << 16)
    with pytest.raises(PermissionError):
        os.write(reopened, b"x")
    with pytest.raises(PermissionError):
        os.open(f"/proc/self/fd/{region}", os.O_RDWR | os.O_TRUNC)


def test_staging_can_be_written_and_not_shrunk() -> None:
    mapping = SystemMemory().writable_by_others("test", 1 << 16)
    theirs = mmap.mmap(mapping.descriptor, 1 << 16)
    theirs[3] = 9
    assert int(mapping.bytes[3]) == 9
    with pytest.raises(PermissionError):
        os.ftruncate(mapping.descriptor, 0)


@pytest.mark.parametrize("run", [(-1, 1), (-64, 64), (0, -1), (0, 65), (64, 1), (65, 0), (1 << 62, 1)])
def test_a_run_of_staging_lies_inside_it(run: tuple[int, int]) -> None:
    staging = Staging(7, BytearrayMemory().writable_by_others("test", 64), 64)
    assert staging.run(63, 1).size == 1
    assert staging.run(64, 0).size == 0
    with pytest.raises(InvalidRequest, match="outside"):
        staging.run(*run)


def test_a_limit_on_file_sizes_is_named() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(Unavailable, match="ulimit -f"):
            SystemMemory().writable_by_others("test", 8192)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
