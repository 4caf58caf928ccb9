"""The simulation finds what it is there to find: services broken on purpose, one promise each."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvstore.catalog import ChunkTable
from kvstore.seams import SimulatedDisk
from kvstore.tiers.nvme import Regions
from tests.sim.run import Outcome, run_seed

RUNS_MAX = 60

Mutant = Callable[[pytest.MonkeyPatch], None]


def without_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Acknowledges what no fdatasync covered."""
    monkeypatch.setattr(SimulatedDisk, "sync", lambda disk, descriptor: None)


def slots_reused_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives a slot to the next chunk while somebody reads it."""

    def give_back(regions: Regions, residency: int) -> None:
        region, slot = regions.find(residency)
        region.free.append(slot)

    monkeypatch.setattr(Regions, "give_back", give_back)


def without_header_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes what lies in the slot for what was asked for."""
    monkeypatch.setattr("kvstore.tiers.nvme.tier.check_header", lambda name, header: header)


def without_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serves what it read, whatever it is."""
    monkeypatch.setattr("kvstore.tiers.nvme.tier.decode_slab", lambda *args: True)


def leases_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evicts what somebody reads."""
    monkeypatch.setattr(ChunkTable, "is_held", lambda table, row: False)


MUTANTS: list[tuple[Mutant, int]] = [
    (without_sync, 0), (slots_reused_early, 32), (without_header_check, 32), (without_checksums, 0),
    (leases_ignored, 0),
]  # fmt: skip
"""Each with a seed to begin with: where it was found once."""


def outcomes(first_seed: int) -> Iterator[Outcome]:
    for seed in range(first_seed, first_seed + RUNS_MAX):
        yield run_seed(seed)


@pytest.mark.parametrize(("mutant", "first_seed"), MUTANTS, ids=lambda each: getattr(each, "__name__", ""))
def test_a_broken_service_is_found_out(mutant: Mutant, first_seed: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        mutant(monkeypatch)
        found = next((outcome for outcome in outcomes(first_seed) if outcome.failure is not None), None)
    assert found is not None, f"{mutant.__name__}: {mutant.__doc__} No run of {RUNS_MAX} finds it."
