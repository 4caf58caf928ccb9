"""Backs the arena with pages in the background, in steps, within what memory and the control group allow."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from kvstore.arena.arena import Arena
from kvstore.errors import Exhausted, KVStoreError
from kvstore.seams import Clock, Workers
from kvstore.seams.cgroup import group_memory
from kvstore.seams.jobs import NotBegun, done

STEP_BYTES = 16 << 20
RESERVE_SHARE = 0.05
"""Share of available memory that pre-faulting leaves alone."""
_log = logging.getLogger("kvstore.arena")


def available_memory_bytes() -> int:
    """Return how many bytes this process may still take: MemAvailable, or the rest of the control group's limit if that
    is less."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except OSError:
        pass  # no /proc: free pages are the best estimate left
    return min([available, *(each.limit_bytes - each.used_bytes for each in group_memory())])


async def prefault(
    arena: Arena, workers: Workers, clock: Clock, available_bytes: Callable[[], int] = available_memory_bytes
) -> None:
    """Make the whole capacity usable, step by step. Ends early, with one log line, when memory is short."""
    while True:
        if available_bytes() * (1 - RESERVE_SHARE) < STEP_BYTES * 2:
            _log.warning("pre-faulting stopped: memory is short; lower arena.capacity_bytes", extra=_state(arena))
            return
        try:
            region = arena.unbacked()
        except KVStoreError as error:
            _log.warning(error.message, extra=_state(arena))
            return
        if region is None:
            _log.info("arena pre-faulted", extra=_state(arena))
            return
        offset = region.backed
        byte_count = min(STEP_BYTES, region.byte_count - offset)
        try:
            await done(workers, region.mapping.prefault, offset, byte_count)
        except (Exhausted, NotBegun) as error:  # then each page costs a fault at its first use
            _log.warning(error.message, extra=_state(arena))
            return
        region.backed = offset + byte_count
        missing = region.backed - region.usable  # none where an allocation has extended it already
        if missing > 0:
            region.extend(missing)
        await clock.sleep(0)


def _state(arena: Arena) -> dict[str, object]:
    return {"prefaulted_bytes": arena.prefaulted_bytes, "capacity_bytes": arena.capacity_bytes}
