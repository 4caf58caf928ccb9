"""A device tier that cannot be had: the service runs without it, and says why and which setting to change."""

from __future__ import annotations

import asyncio
import errno
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvstore_client import Durability, connect
from kvstore_ops.sidecar import Sidecar

from kvstore.config import NvmeSettings
from kvstore.config.settings import TierSettings
from kvstore.errors import KVStoreError, Unavailable
from kvstore.seams import FaultPoints, SystemClock
from kvstore.server.tenant import Tenant
from kvstore.server.tiers import TIERS, Builder, Tiers, open_nvme
from kvstore.server.world import TierOwner
from kvstore.tiers import LocalTier, NotOurs
from tests.controller.service import Service
from tests.fakes import FilesSettings, FilesTier
from tests.simulated import SimulatedDisk
from tests.specs import random_cache, small_spec, tokens_of

PLACE = Path("/nvme")
SETTINGS = NvmeSettings(directory=PLACE, capacity_bytes=64 << 20)
SPEC = small_spec()


def attached(disk: SimulatedDisk, tiers: Tiers = TIERS) -> Any:
    """A tenant's controller after its tiers were tried."""
    service = Service()
    world = SimpleNamespace(disk=disk, clock=SystemClock(), faults=FaultPoints(), movers=None)
    tenant: Any = object.__new__(Tenant)
    server = SimpleNamespace(state_directory=Path("/state"))
    tenant.settings = SimpleNamespace(tiers=TierSettings(nvme=SETTINGS), server=server)
    tenant.controller, tenant._parts = service.controller, service.parts
    tenant._world, tenant._tiers, tenant._owner = world, tiers, TierOwner()
    asyncio.run(tenant._attach())
    return service.controller


@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES, errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("method", ["make_directory", "open", "names", "remove", "pwrite"])
def test_a_directory_that_cannot_be_used(method: str, error: int, caplog: pytest.LogCaptureFixture) -> None:
    """Read-only, forbidden, failing, full: whichever call meets it first."""
    disk = SimulatedDisk(1)
    disk.fail(method, error, times=None)
    controller = attached(disk)
    assert len(controller.parts.catalog.table.copies) == 1
    said = controller.stats().tier_problem
    assert said.startswith("the nvme tier is off")
    assert "tiers.nvme.directory" in said
    assert said in caplog.text
    disk.mend()
    assert len(attached(disk).parts.catalog.table.copies) == 2, "it was left locked"


def files_in(directory: Path, error: KVStoreError | OSError | None = None) -> Builder[LocalTier]:
    """A tier of the tests, which cannot be had when there is an error."""

    def build(*_: object) -> LocalTier:
        if error is not None:
            raise error
        return FilesTier(FilesSettings(directory=directory, name=directory.name))

    return Builder(directory.name, f"tiers.{directory.name}.place", build)


SWITCHED_OFF: Builder[LocalTier] = Builder("off", "tiers.off.is_on", lambda *_: None)


def test_any_number_of_tiers_is_taken_into_use_in_their_order(tmp_path: Path) -> None:
    """What is switched off is no problem; what cannot be had is, and keeps no other from being used."""
    broken = [files_in(tmp_path / "one", Unavailable("the first is gone")), files_in(tmp_path / "two", OSError("no"))]
    whole = [files_in(tmp_path / name) for name in ("three", "four")]
    local = (broken[0], *TIERS.local, SWITCHED_OFF, whole[0], broken[1], whole[1])
    found = attached(SimulatedDisk(1), Tiers(local=local)).stats()
    assert [tier.name for tier in found.tiers] == ["nvme", "three", "four"]
    said = ["the one tier is off: the first is gone (tiers.one.place)", "the two tier is off: no (tiers.two.place)"]
    assert found.tier_problem == "; ".join(said)


def test_what_another_tenant_wrote_ends_the_start(tmp_path: Path) -> None:
    """Whichever tier meets it."""
    with pytest.raises(NotOurs):
        attached(SimulatedDisk(1), Tiers(local=(*TIERS.local, files_in(tmp_path, NotOurs("another's")))))


@pytest.mark.parametrize(("kind", "is_warned"), [("btrfs", True), ("zfs", True), ("ext4", False), ("", False)])
def test_a_copy_on_write_file_system_is_warned_of(
    kind: str, is_warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = SimulatedDisk(1)
    monkeypatch.setattr(disk, "file_system", lambda _: kind)
    tier = open_nvme(SETTINGS, disk, SystemClock(), FaultPoints())
    assert ("copy-on-write" in caplog.text) is is_warned
    assert ("tiers.nvme.directory" in caplog.text) is is_warned
    asyncio.run(tier.close(None))


@pytest.mark.parametrize(("capacity_bytes", "is_warned"), [(1 << 20, True), (64 << 20, False)])
def test_a_device_tier_that_is_smaller_than_a_chunk_is_warned_of(
    capacity_bytes: int, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    settings = replace(SETTINGS, capacity_bytes=capacity_bytes)
    tier = open_nvme(settings, SimulatedDisk(1), SystemClock(), FaultPoints())
    assert ("tiers.nvme.capacity_bytes" in caplog.text) is is_warned
    asyncio.run(tier.close(None))


def test_the_service_is_up_without_its_device(tmp_path: Path) -> None:
    """A file stands where the directory should be; then another server has the directory."""
    (tmp_path / "file").write_text("precious")
    tokens, cache = tokens_of(40), random_cache(SPEC, 40)
    with Sidecar("--capacity", "16 MiB", nvme="64 MiB") as other:
        for place, words in ((tmp_path / "file", "cannot"), (other.directory / "nvme", "another kvstore server")):
            environment = {**os.environ, "KVSTORE__TIERS__NVME__DIRECTORY": str(place)}
            own = Sidecar("--capacity", "16 MiB", nvme="64 MiB", environment=environment)
            with own, connect(own.address) as client:
                receipt = client.store(SPEC, tokens, cache)
                assert receipt.wait(10.0) is Durability.MEMORY
                assert client.fetch(SPEC, tokens).token_count == 40
                said = client.stats().tier_problem
                assert words in said
                assert "tiers.nvme.directory" in said
    assert (tmp_path / "file").read_text() == "precious"
