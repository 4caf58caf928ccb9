"""The simulation finds what it is there to find: services broken on purpose, one promise each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvstore.arena import Arena, Placement
from kvstore.catalog import ChunkTable, Copies
from kvstore.movement.levels import Levels, _Reached
from kvstore.movement.queue import Priority
from kvstore.movement.shared import SharedCopies
from kvstore.movement.writes import Writes
from kvstore.presence import PresenceTable, unpack_news
from kvstore.spec import ChunkState
from tests.sim.cloud import has_cloud
from tests.sim.run import Outcome, run_seed
from tests.sim.steps import every_cut, passage
from tests.sim.test_warm import ARENA_BYTES
from tests.sim.warm import reads_warm
from tests.tiers.test_mutants import without_header_check, without_sync

RUNS_MAX = 60

Mutant = Callable[[pytest.MonkeyPatch], None]


def without_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serves what it read, whatever it is."""
    monkeypatch.setattr("kvstore.chunk.slabs.decode_slabs", lambda *args: True)
    monkeypatch.setattr("kvstore.chunk.slabs.settle_runs", lambda *args: True)


def leases_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evicts what somebody reads."""
    monkeypatch.setattr(ChunkTable, "is_held", lambda table, row: False)


def believed_after_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promises LOCAL on copies that a crash may have torn."""
    monkeypatch.setattr(Copies, "is_proven", Copies.__contains__)


def deaf_to_its_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes on where it is cancelled."""
    lane = Writes._lane

    async def deaf(writes: Writes, classes: Collection[Priority]) -> None:
        try:
            await lane(writes, classes)
        except asyncio.CancelledError:
            await lane(writes, classes)

    monkeypatch.setattr(Writes, "_lane", deaf)


def believed_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promises OBJECT on what a tier merely says."""
    monkeypatch.setattr(SharedCopies, "is_seen", SharedCopies.__contains__)
    monkeypatch.setattr(Levels, "_confirmed", confirmed)


async def confirmed(*_: object) -> _Reached:
    return _Reached("", True)


def shown_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets clients see chunks that went."""
    put = PresenceTable.put
    monkeypatch.setattr(PresenceTable, "put", lambda table, tag, news: put(table, tag, news) if is_hit(news) else None)


def generation_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives memory away behind the back of who copies from it."""
    monkeypatch.setattr(Arena, "free", freed_without_news)


def generation_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives memory away before its generation changes."""

    def free(arena: Arena, placement: Placement) -> None:
        freed_without_news(arena, placement)
        arena._values[placement.slot] += np.uint64(1)

    monkeypatch.setattr(Arena, "free", free)


def generation_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the same two generations in turns."""
    free = Arena.free

    def freed(arena: Arena, placement: Placement) -> None:
        free(arena, placement)
        arena._values[placement.slot] = 3 - placement.generation

    monkeypatch.setattr(Arena, "free", freed)


def freed_without_news(arena: Arena, placement: Placement) -> None:
    for extent in placement.extents:
        region = arena.regions[extent.region]
        region.mapping.forget(extent.offset, extent.byte_count)
        region.give_back(extent.offset, extent.byte_count)
    arena._slots.append(placement.slot)
    arena.used_bytes -= placement.byte_count
    arena.chunk_count -= 1


def is_hit(news: int) -> bool:
    return unpack_news(news).state is ChunkState.HIT


def cuts() -> Iterator[Callable[[], Outcome]]:
    return (partial(passage, cut) for cut in every_cut(stride=1 << 30))


def seeds() -> Iterator[Callable[[], Outcome]]:
    return (partial(run_seed, seed) for seed in range(RUNS_MAX))


def seeds_with_a_cloud() -> Iterator[Callable[[], Outcome]]:
    return (partial(run_seed, seed) for seed in filter(has_cloud, range(RUNS_MAX)))


def seeds_with_little_memory() -> Iterator[Callable[[], Outcome]]:
    little: Any = {"is_calm": True, "arena_bytes": ARENA_BYTES, "arena_region_bytes": ARENA_BYTES}
    return (partial(run_seed, seed, **little) for seed in filter(reads_warm, range(RUNS_MAX)))


@pytest.mark.parametrize(
    ("mutant", "runs", "first"),
    [
        (without_sync, cuts, 29), (believed_after_a_crash, cuts, 36), (without_header_check, seeds, 26),
        (believed_unread, seeds_with_a_cloud, 0), (without_checksums, seeds, 0), (leases_ignored, seeds, 0),
        (shown_for_ever, seeds, 0), (generation_stays, seeds_with_little_memory, 1),
        (generation_too_late, seeds_with_little_memory, 2), (generation_returns, seeds_with_little_memory, 1),
        (deaf_to_its_stop, seeds, 0),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)  # fmt: skip
def test_a_broken_service_is_found_out(
    mutant: Mutant, runs: Callable[[], Iterator[Callable[[], Outcome]]], first: int
) -> None:
    """``first``: the run that found it last time begins, then come those behind it and those before."""
    every = list(runs())
    with pytest.MonkeyPatch.context() as monkeypatch:
        mutant(monkeypatch)
        found = any(run().failure is not None for run in every[first:] + every[:first])
    assert found, f"{mutant.__name__}: {mutant.__doc__} No run finds it."
