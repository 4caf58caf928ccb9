"""Shared memory at huge pages' boundaries: what a range holds survives being backed, and a mapping its views."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import Unavailable
from kvstore.seams import mapping
from kvstore.seams.mapping import _MADV_COLLAPSE, HUGE_BYTES, SharedMap, address_of, pages_of
from kvstore.seams.memory import joined


def memfd(byte_count: int) -> int:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, byte_count)
    return descriptor


def mapped_at(address: int) -> bool:
    """Return True when a memfd of ours is. In a child, memory of its own may take the room at once."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:test" in line]
    spans = (line.split()[0].split("-") for line in lines)
    return any(int(low, 16) <= address < int(high, 16) for low, high in spans)


@pytest.mark.parametrize("byte_count", [4096, HUGE_BYTES - 4096, HUGE_BYTES, 3 * HUGE_BYTES + 8192])
def test_a_mapping_begins_where_a_huge_page_may_and_shows_what_others_write(byte_count: int) -> None:
    descriptor = memfd(byte_count)
    ours, theirs = SharedMap(descriptor, byte_count, writable=True), SharedMap(descriptor, byte_count, writable=False)
    os.close(descriptor)
    assert ours.bytes.ctypes.data % HUGE_BYTES == theirs.bytes.ctypes.data % HUGE_BYTES == 0
    ours.bytes[:] = np.arange(byte_count, dtype=np.uint8)
    assert (theirs.bytes == np.arange(byte_count, dtype=np.uint8)).all()


@pytest.mark.parametrize(("offset", "byte_count"), [(0, 5 * HUGE_BYTES), (4096, 3 * HUGE_BYTES), (12288, 8192)])
def test_backing_a_range_changes_no_byte_of_it(offset: int, byte_count: int) -> None:
    size = 5 * HUGE_BYTES
    descriptor = memfd(size)
    ours, theirs = SharedMap(descriptor, size, writable=True), SharedMap(descriptor, size, writable=False)
    os.close(descriptor)
    for page in (0, 3, 700, 1500):  # some pages are there, most are not
        ours.bytes[page * 4096 : (page + 1) * 4096] = page % 251 + 1
    before = theirs.bytes.copy()
    ours.back(offset, byte_count)
    ours.back(offset, byte_count)
    assert (ours.bytes == before).all()
    assert (theirs.bytes == before).all()


def test_a_backed_range_is_in_memory() -> None:
    descriptor = memfd(4 * HUGE_BYTES)
    ours = SharedMap(descriptor, 4 * HUGE_BYTES, writable=True)
    assert os.fstat(descriptor).st_blocks == 0
    ours.back(0, 3 * HUGE_BYTES)
    assert os.fstat(descriptor).st_blocks * 512 >= 3 * HUGE_BYTES
    os.close(descriptor)


def test_pages_are_made_huge_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine whose cores are all taken, a process that is killed in the middle of a larger range lives on."""
    collapsed: list[tuple[int, int]] = []
    advise = mapping._advise

    def noted(address: int, byte_count: int, advice: int) -> int:
        if advice == _MADV_COLLAPSE:
            collapsed.append((address, byte_count))
        return advise(address, byte_count, advice)

    monkeypatch.setattr(mapping, "_advise", noted)
    descriptor = memfd(4 * HUGE_BYTES)
    mapped = SharedMap(descriptor, 4 * HUGE_BYTES, writable=True)
    mapped.back(4096, 3 * HUGE_BYTES)
    os.close(descriptor)
    begin = address_of(mapped.bytes)
    assert collapsed == [(begin + HUGE_BYTES, HUGE_BYTES), (begin + 2 * HUGE_BYTES, HUGE_BYTES)]


def test_a_mapping_that_is_only_read_is_backed_whole() -> None:
    descriptor = memfd(2 * HUGE_BYTES)
    ours = SharedMap(descriptor, 2 * HUGE_BYTES, writable=False)
    pages = pages_of(ours.bytes[5:9].view(np.uint16)[:1])
    assert pages is not None
    assert pages.back()
    assert os.fstat(descriptor).st_blocks * 512 == 2 * HUGE_BYTES
    os.close(descriptor)


def test_what_is_done_before_unmapping_finds_the_pages_there() -> None:
    descriptor = memfd(HUGE_BYTES)
    ours = SharedMap(descriptor, HUGE_BYTES, writable=True)
    os.close(descriptor)
    view = ours.bytes[8:16]
    pages = pages_of(view)
    assert pages is not None
    found: list[bool] = []
    pages.before_unmapping.append(partial(lambda address: found.append(mapped_at(address)), pages.address))
    del pages
    ours.close()
    assert not found, "a view is left"
    del view
    assert found == [True]


def test_memory_of_another_origin_has_no_pages() -> None:
    assert pages_of(np.zeros(4, np.uint8)) is None


def test_a_mapping_lives_as_long_as_its_views() -> None:
    descriptor = memfd(HUGE_BYTES)
    ours = SharedMap(descriptor, HUGE_BYTES, writable=True)
    os.close(descriptor)
    view = ours.bytes[8192:16384].view(np.uint32)[::2]
    address = ours.bytes.ctypes.data
    ours.close()
    ours.close()
    assert ours.bytes.size == 0
    view[:] = 7
    assert mapped_at(address)
    del view
    gc.collect()
    assert not mapped_at(address)


def test_a_refused_mapping_leaves_nothing_behind() -> None:
    read_end, write_end = os.pipe()
    before = Path("/proc/self/maps").read_text().count("---p")
    with pytest.raises(Unavailable, match="cannot map"):
        SharedMap(read_end, HUGE_BYTES, writable=False)
    assert Path("/proc/self/maps").read_text().count("---p") == before
    os.close(read_end)
    os.close(write_end)


def test_a_forked_child_neither_has_the_pages_nor_unmaps_what_lies_there() -> None:
    descriptor = memfd(HUGE_BYTES)
    ours = SharedMap(descriptor, HUGE_BYTES, writable=True)
    address = ours.bytes.ctypes.data
    child = os.fork()
    if child == 0:
        there = mapped_at(address)
        fresh = SharedMap(descriptor, HUGE_BYTES, writable=True)  # may well get the same addresses
        same = fresh.bytes.ctypes.data == address
        ours.close()
        gc.collect()
        os._exit(1 if there else 0 if not same or mapped_at(address) else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(descriptor)


WITHOUT_PAGES = """
import os
from kvstore.errors import Exhausted
from kvstore.seams.mapping import HUGE_BYTES, SharedMap
descriptor = os.memfd_create("test")
os.ftruncate(descriptor, 4096)
try:
    SharedMap(descriptor, 2 * HUGE_BYTES, writable=True).back(0, 2 * HUGE_BYTES)
except Exhausted as error:
    print(error.message)
"""


def test_a_range_whose_pages_the_kernel_refuses_is_an_error_and_not_the_end_of_the_process() -> None:
    """Here for want of a file behind it; with strict overcommit for want of memory. A touch would be SIGBUS."""
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_PAGES], capture_output=True, text=True, timeout=30, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "arena.capacity_bytes" in ended.stdout


def test_an_address_is_told_of_any_array() -> None:
    memory = np.arange(64, dtype=np.uint8)
    fixed = memory[3:9]
    fixed.flags.writeable = False
    for each in (memory, memory[5:7], memory[::2], memory[4:4], fixed):
        assert address_of(each) == each.ctypes.data


def test_arrays_that_touch_become_one_and_nothing_else_changes() -> None:
    memory, other = np.arange(64, dtype=np.uint8), np.arange(8, dtype=np.uint8)
    found = joined([memory[0:4], memory[4:12], memory[16:20], memory[12:16], other, memory[20:24]])
    assert [each.tolist() for each in found] == [
        list(range(12)), list(range(16, 20)), list(range(12, 16)), list(range(8)), list(range(20, 24))
    ]  # fmt: skip
    found[0][0] = 99
    assert memory[0] == 99, "it is the same memory"
    fixed = memory[0:4]
    fixed.flags.writeable = False
    assert not joined([fixed, memory[4:8]])[0].flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        joined([fixed, memory[4:8]])[0][0] = 1
    assert joined([other])[0] is other
    assert joined([]) == []
