"""A record of the newest writes that was refused may be on the device all the same: what it says then must not be said
of a later value."""

from __future__ import annotations

import asyncio
import errno

import pytest

from kvstore.errors import KVStoreError
from kvstore.spec import Durability
from kvstore.tiers.nvme import newest
from tests.scenario import scenario
from tests.tiers.nvme.test_newest import NEW, OLD, RETRY_S, the_file_does_not_open
from tests.tiers.service import HOME
from tests.tiers.values import ValueService


async def refused_and_there(service: ValueService) -> None:
    """The record took the place of the one before, and that was not synced. The format's sync comes first."""
    assert await service.put(OLD) is Durability.LOCAL
    service.disk.fail("pwrite", errno.EIO, path_contains="region-00000")
    service.disk.fail("sync_directory", errno.EIO, after=1)
    with pytest.raises(KVStoreError):
        await service.put(NEW)
    assert newest.NEWEST_FILE in service.disk.names(HOME)
    service.disk.mend()


@pytest.mark.parametrize("is_power_cut", [False, True], ids=["kill", "power cut"])
@pytest.mark.parametrize("waits", [False, True], ids=["at once", "after the erasure"])
@scenario(lambda: ValueService())
async def test_a_value_behind_a_record_that_was_refused_stays(
    service: ValueService, waits: bool, is_power_cut: bool
) -> None:
    await refused_and_there(service)
    if waits:
        await asyncio.sleep(2 * RETRY_S)
        assert newest.NEWEST_FILE not in service.disk.names(HOME), "nothing older lies anywhere"
    assert await service.put(3) is Durability.LOCAL
    await service.restart(kill=True, meanwhile=service.disk.crash if is_power_cut else lambda: None)
    assert await service.get() == 3
    service.balance()


@scenario(lambda: ValueService())
async def test_a_record_that_was_refused_is_written_again_though_it_says_the_same(service: ValueService) -> None:
    """Nobody knows whether it is there."""
    await refused_and_there(service)
    record = service.nvme.erasures.newest
    marks = dict(record._marks)
    service.disk.remove(HOME / newest.NEWEST_FILE)
    record.note(marks, frozenset({("region-00000", 0)}))
    assert newest.NEWEST_FILE in service.disk.names(HOME)


@pytest.mark.parametrize("method", ["open", "pwrite"])
def test_a_record_that_never_took_the_place_of_another_says_nothing(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would close a file that cannot be read, in which an acknowledged value lies."""
    monkeypatch.setattr(newest, "COUNT_MAX", 0)
    service = ValueService()

    async def scenario() -> None:
        assert await service.put(9, "other") is Durability.LOCAL
        await the_file_does_not_open(service, 1)
        service.disk.fail(method, errno.ENOSPC, path_contains=newest.NEWEST_FILE)
        with pytest.raises(KVStoreError):
            await service.put(NEW)
        await asyncio.sleep(2 * RETRY_S)
        service.disk.mend()
        await service.restart(kill=True)
        assert await service.get("other") == 9
        service.balance()

    service.run(scenario)
