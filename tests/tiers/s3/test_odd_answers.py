"""Answers that no S3 store gives, and objects that give no bytes: named as what they are, never taken for chunks, for
damage, or for an empty bucket."""

from __future__ import annotations

import asyncio
import logging

import pytest

from kvstore.errors import Exhausted, Unavailable
from kvstore.tiers import UploadState
from kvstore.tiers.s3.depth import HEAD_COUNT_MAX
from kvstore.tiers.s3.listing import examine, pages
from tests.contracts.chunks import LARGE, chunk
from tests.contracts.shared.s3_stand import S3Stand
from tests.contracts.shared.stands import found, write
from tests.scenario import scenario
from tests.tiers.s3.objects import archive, bytes_of, there

LOGIN = "<html>Who are you?</html>"
ARCHIVED = (403, "InvalidObjectState")


@pytest.mark.parametrize("drops", ["etag", "content-length", "content-range", "range"])
@scenario()
async def test_a_proxy_that_drops_a_header_is_named_and_condemns_no_object(stand: S3Stand, drops: str) -> None:
    """Without its range a request is answered by the whole object: nothing says then that it is damaged."""
    what = chunk(1, LARGE)
    await write(stand.tier, what)
    before = there(stand, what)
    stand.switches.drops = frozenset({drops})
    for call in (found(stand.other, what), write(stand.other, chunk(1, LARGE, write=1))):
        with pytest.raises(Unavailable, match=r"proxy.*tiers\.s3\.endpoint_url"):
            await call
    stand.switches.drops = frozenset()
    await write(stand.other, chunk(1, LARGE, write=1))
    assert there(stand, what) == before == bytes_of(what)


@scenario()
async def test_a_page_in_the_place_of_the_store_has_no_chunk(stand: S3Stand) -> None:
    """It answers a HEAD as an object does, but for the ETag: a move would give up the node's copies for it."""
    await write(stand.tier, chunk(1))
    keys = [chunk(1).header.storage_key]
    assert list(await stand.tier.probe(keys, 10.0)) == [True]
    stand.switches.page = LOGIN
    with pytest.raises(Unavailable, match=r"no S3 store.*tiers\.s3\.endpoint_url"):
        await stand.tier.probe(keys, 10.0)
    stand.switches.turn_off()
    assert list(await stand.tier.probe(keys, 10.0)) == [True]


@scenario()
async def test_a_page_that_takes_a_chunk_has_stored_nothing(stand: S3Stand) -> None:
    """The proxy's session ends between the look and the write."""
    heard = stand.switches.hears("PUT")
    writing = asyncio.create_task(write(stand.tier, chunk(1)))
    await asyncio.to_thread(heard.wait, 10)
    stand.switches.page = LOGIN
    stand.switches.turn_on()
    with pytest.raises(Unavailable, match=r"no S3 store.*tiers\.s3\.endpoint_url"):
        await writing
    stand.switches.turn_off()
    await write(stand.tier, chunk(1))
    assert there(stand, chunk(1)) == bytes_of(chunk(1))


@pytest.mark.parametrize("status", [200, 204, 404])
@scenario()
async def test_what_is_no_store_is_named_also_to_a_scan(stand: S3Stand, status: int) -> None:
    """A page that lets nobody through, or a web server where the endpoint was thought to be: no bucket is empty."""
    await write(stand.tier, chunk(1))
    stand.switches.page, stand.switches.page_status = LOGIN if status != 204 else " ", status
    with pytest.raises(Unavailable, match=r"no S3 store.*tiers\.s3\.endpoint_url"):
        await asyncio.to_thread(lambda: list(pages(stand.settings)))
    with pytest.raises(Unavailable, match=r"no S3 store.*tiers\.s3\.endpoint_url"):
        await write(stand.tier, chunk(2))
    stand.switches.turn_off()


@scenario()
async def test_an_answer_that_is_kept_before_the_store_is_named(stand: S3Stand) -> None:
    await write(stand.tier, chunk(1))
    stand.switches.refusals = [(304, "")]
    with pytest.raises(Unavailable, match="cache"):
        await stand.tier.open(chunk(1).name)


@scenario()
async def test_an_archived_object_is_a_miss_that_stays_and_is_no_denial(
    stand: S3Stand, caplog: pytest.LogCaptureFixture
) -> None:
    """A bucket's rule moved it. Nobody can tell what it is, so nobody replaces it; others are read and written."""
    await write(stand.tier, chunk(1))
    stand.switches.refusals = [ARCHIVED]
    with caplog.at_level(logging.WARNING):
        assert await stand.tier.open(chunk(1).name) is None
    assert "archive" in caplog.text
    assert "denies" not in caplog.text
    stand.switches.refusals = [ARCHIVED]
    with pytest.raises(Exhausted, match="kvstore doctor"):
        await write(stand.tier, chunk(1, write=1))
    assert stand.tier.statistics().state == "up"
    await write(stand.tier, chunk(2))
    assert there(stand, chunk(1)) == bytes_of(chunk(1))


@pytest.mark.parametrize("whole", [False, True], ids=["headers", "all bytes"])
@scenario()
async def test_a_scan_counts_archived_objects_and_goes_on(stand: S3Stand, whole: bool) -> None:
    for number in range(3):
        await write(stand.tier, chunk(number))
    [(listed, _)] = await asyncio.to_thread(lambda: list(pages(stand.settings)))
    stand.switches.refusals = [ARCHIVED]
    examined = await asyncio.to_thread(examine, stand.settings, listed, whole=whole)
    assert sorted(each.reason for each in examined) == ["", "", "archived"]


@pytest.mark.parametrize("count", [3, 20])
@scenario()
async def test_no_promise_rests_on_an_archived_object_and_it_is_not_sent_again(stand: S3Stand, count: int) -> None:
    """A HEAD finds it, and no GET reads it. A chain goes on behind it: that is a hint."""
    keys = [chunk(number).header.storage_key for number in range(count)]
    for number in range(count):
        await write(stand.tier, chunk(number))
    archive(stand, keys[1])
    expected = [None if number == 1 else True for number in range(count)]
    assert list(await stand.tier.probe(keys, 10.0)) == expected
    states = await stand.tier.claim([*keys, bytes(32)], 1.0, 10.0)
    assert states == [UploadState.THERE] * count + [UploadState.FREE]
    if count > HEAD_COUNT_MAX:
        assert list(await stand.tier.probe(keys, 10.0, [count])) == [True] * count
    assert await stand.tier.open(chunk(1).name) is None
