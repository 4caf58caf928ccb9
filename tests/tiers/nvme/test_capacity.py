"""The device's capacity is what it was, whatever room others leave: only a smaller setting makes it smaller, and what
goes then is said before it goes."""

from __future__ import annotations

import errno
import logging
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.config import LoadedSettings
from kvstore.config.load import load
from kvstore.seams import FaultPoints, SystemClock, SystemDisk
from kvstore.server.tiers import open_nvme
from kvstore.units import parse_bytes
from tests.scenario import scenario
from tests.tiers.service import KIB, DeviceService

TENANT = {"tenants.other.secret_file": "/nowhere"}


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The room that the file system says it has."""
    room = SimpleNamespace(bytes=700 << 20)

    def statvfs(_: Any) -> SimpleNamespace:
        return SimpleNamespace(f_bavail=room.bytes // 4096, f_frsize=4096)

    monkeypatch.setattr(os, "statvfs", statvfs)
    return room


def loaded(home: Path, **more: object) -> LoadedSettings:
    flags = {"server.state_directory": str(home), **{name.replace("__", "."): value for name, value in more.items()}}
    return load(None, {}, flags)


def capacity(home: Path, **more: object) -> int:
    return loaded(home, **more).settings.tiers.nvme.capacity_bytes


def lived(home: Path, **more: object) -> None:
    """One start and stop of the device tier, for each tenant."""
    settings = loaded(home, **more)
    for name in settings.settings.tenant_names:
        nvme = settings.of_tenant(name).tiers.nvme
        tier = open_nvme(nvme, SystemDisk(), SystemClock(), FaultPoints())
        tier._directory.close()
        for workers in tier._pace:
            workers.close()


def test_the_default_is_chosen_once(tmp_path: Path, free: SimpleNamespace) -> None:
    chosen = capacity(tmp_path)
    assert chosen == 70 << 20
    lived(tmp_path)
    for free.bytes in (1 << 20, 0, 1 << 50):
        assert capacity(tmp_path) == chosen
        lived(tmp_path)


def test_what_was_set_last_is_the_default(tmp_path: Path, free: SimpleNamespace) -> None:
    """A setting that goes away takes nothing with it."""
    for size in ("90 MiB", "20 MiB"):
        lived(tmp_path, tiers__nvme__capacity_bytes=size)
        assert capacity(tmp_path) == parse_bytes(size)


def test_files_without_a_word_about_their_capacity_fit(tmp_path: Path, free: SimpleNamespace) -> None:
    """As a release that did not keep it leaves them."""
    (tmp_path / "nvme").mkdir()
    with (tmp_path / "nvme" / "region-00000-12288.kvs").open("wb") as file:
        file.truncate(100 << 20)
    free.bytes = 4 << 20
    assert capacity(tmp_path) == 100 << 20
    (tmp_path / "nvme" / "capacity").write_text("nonsense")
    assert capacity(tmp_path) == 100 << 20


def test_tenants_keep_theirs(tmp_path: Path, free: SimpleNamespace) -> None:
    lived(tmp_path, **TENANT, tenants__other__nvme_capacity_bytes="30 MiB")
    free.bytes = 1 << 20
    found = loaded(tmp_path, **TENANT)
    assert found.of_tenant("other").tiers.nvme.capacity_bytes == 30 << 20
    assert found.settings.tiers.nvme.capacity_bytes == 70 << 20
    found = loaded(tmp_path, **TENANT, tiers__nvme__capacity_bytes="9 MiB")
    assert found.of_tenant("other").tiers.nvme.capacity_bytes == 9 << 20


def test_what_a_smaller_capacity_takes_is_said_before_it_goes(caplog: pytest.LogCaptureFixture) -> None:
    service = DeviceService(arena_chunks=32)
    there: list[list[str]] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "given up now" in record.getMessage():
                names = [path.name for path in service.region_files()]
                assert set(record.files) <= set(names)  # type: ignore[attr-defined]
                there.append(record.files)  # type: ignore[attr-defined]

    async def scenario() -> None:
        for number in range(12):
            await service.keep(number)
        before = {path.name for path in service.region_files()}
        service.capacity_bytes = 60 * KIB
        await service.restart()
        gone = before - {path.name for path in service.region_files()}
        assert gone
        assert [set(files) for files in there] == [gone]
        service.balance()

    listener = Listener()
    logging.getLogger("kvstore.nvme").addHandler(listener)
    try:
        service.run(scenario)
    finally:
        logging.getLogger("kvstore.nvme").removeHandler(listener)


@pytest.mark.parametrize(("capacity_kib", "now", "later"), [(140, 5, 10), (80, 5, 5), (60, 0, 0)])
@scenario(lambda: DeviceService(arena_chunks=32))
async def test_a_file_that_a_start_cannot_open_goes_as_a_full_one_would(
    service: DeviceService, capacity_kib: int, now: int, later: int
) -> None:
    """Of three files one is half empty, and the device refuses the first page of a full one. The cap holds all the
    same, and what can be served is not given up for what cannot."""
    for number in range(12):
        await service.keep(number)
    service.capacity_bytes = capacity_kib * KIB
    refuse = partial(service.disk.fail, "pread", errno.EIO, path_contains="region-00000", times=1)
    await service.restart(meanwhile=refuse)
    service.balance()
    assert service.nvme.statistics().chunk_count == now
    await service.restart()
    service.balance()
    assert service.nvme.statistics().chunk_count == later
