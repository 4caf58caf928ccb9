"""The simulation finds what it is there to find: services broken on purpose, one promise each."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvstore.arena import Arena, Placement
from kvstore.catalog import ChunkTable, Copies
from kvstore.movement.levels import Levels, _Reached
from kvstore.movement.shared import SharedCopies
from kvstore.presence import PresenceTable, unpack_news
from kvstore.simulated import SimulatedDisk
from kvstore.spec import ChunkState
from tests.sim.cloud import has_cloud
from tests.sim.run import Outcome, run_seed
from tests.sim.steps import every_cut, passage
from tests.sim.test_warm import ARENA_BYTES
from tests.sim.warm import reads_warm

RUNS_MAX = 60

Mutant = Callable[[pytest.MonkeyPatch], None]


def without_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Acknowledges what no fdatasync covered."""
    monkeypatch.setattr(SimulatedDisk, "sync", lambda disk, descriptor: None)


def without_header_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes what lies in the slot for what was asked for."""
    monkeypatch.setattr("kvstore.tiers.nvme.reading.check_header", lambda name, header: header)


def without_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serves what it read, whatever it is."""
    monkeypatch.setattr("kvstore.tiers.nvme.reading.decode_slabs", lambda *args: True)
    monkeypatch.setattr("kvstore.tiers.nvme.reading.are_right", lambda *args: True)


def leases_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evicts what somebody reads."""
    monkeypatch.setattr(ChunkTable, "is_held", lambda table, row: False)


def believed_after_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promises LOCAL on copies that a crash may have torn."""
    monkeypatch.setattr(Copies, "is_proven", Copies.__contains__)


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


def cuts() -> Iterator[Outcome]:
    yield from map(passage, every_cut(stride=1 << 30))


def seeds() -> Iterator[Outcome]:
    yield from map(run_seed, range(RUNS_MAX))


def seeds_with_a_cloud() -> Iterator[Outcome]:
    yield from map(run_seed, filter(has_cloud, range(RUNS_MAX)))


def seeds_with_little_memory() -> Iterator[Outcome]:
    for seed in filter(reads_warm, range(RUNS_MAX)):
        yield run_seed(seed, is_calm=True, arena_bytes=ARENA_BYTES, arena_region_bytes=ARENA_BYTES)


def seeds_that_reuse_slots() -> Iterator[Outcome]:
    """The first that brings it, which few do, and then the others."""
    yield from map(run_seed, dict.fromkeys((50, *range(RUNS_MAX))))


@pytest.mark.parametrize(
    ("mutant", "outcomes"),
    [
        (without_sync, cuts), (believed_after_a_crash, cuts), (without_header_check, seeds_that_reuse_slots),
        (believed_unread, seeds_with_a_cloud), (without_checksums, seeds), (leases_ignored, seeds),
        (shown_for_ever, seeds), (generation_stays, seeds_with_little_memory),
        (generation_too_late, seeds_with_little_memory), (generation_returns, seeds_with_little_memory),
    ],
    ids=lambda each: each.__name__,
)  # fmt: skip
def test_a_broken_service_is_found_out(mutant: Mutant, outcomes: Callable[[], Iterator[Outcome]]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        mutant(monkeypatch)
        found = next((outcome for outcome in outcomes() if outcome.failure is not None), None)
    assert found is not None, f"{mutant.__name__}: {mutant.__doc__} No run finds it."
