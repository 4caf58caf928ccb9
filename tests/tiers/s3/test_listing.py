"""A bucket's list, from stores that page it badly: told, rather than read for ever or taken for whole."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from kvstore.chunk.header import HEADER_BYTES_MAX
from kvstore.config import S3Settings
from kvstore.errors import Unavailable
from kvstore.tiers.pace import BYTES_PER_S_MIN
from kvstore.tiers.s3 import listing
from kvstore.tiers.s3.listing import Listed
from kvstore.tiers.s3.looking import Looked
from kvstore.tiers.s3.objects import object_key
from kvstore.tiers.s3.refusals import Refused
from tests.contracts.chunks import chunk
from tests.contracts.shared.s3_stand import S3Stand
from tests.contracts.shared.stands import write
from tests.scenario import scenario

SETTINGS = S3Settings(bucket="bucket", prefix="p")


def row(number: int) -> dict[str, Any]:
    key = object_key(SETTINGS, number.to_bytes(32, "big"))
    return {"Key": key, "ETag": f'"{number}"', "Size": 1, "LastModified": datetime.now(UTC)}


class Store:
    """Gives these pages, one after the other, the last one again and again."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self._answers = answers
        self.tokens: list[str] = []

    async def ask(self, request: Any) -> Any:
        return await request(self)

    async def list_objects_v2(self, **options: Any) -> dict[str, Any]:
        self.tokens.append(options.get("ContinuationToken", ""))
        assert len(self.tokens) < 10, "it is read for ever"
        return self._answers[min(len(self.tokens), len(self._answers)) - 1]


def listed(store: Store, monkeypatch: pytest.MonkeyPatch) -> int:
    def finished(settings: S3Settings, action: str, work: Any, deadline_s: float) -> Any:
        return asyncio.run(work(store))

    monkeypatch.setattr(listing, "finished", finished)
    return sum(len(found) for found, _ in listing.pages(SETTINGS))


def test_pages_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(
        {"Contents": [row(1)], "IsTruncated": True, "NextContinuationToken": "a"},
        {"IsTruncated": True, "NextContinuationToken": "b"},
        {"Contents": [row(2), row(3)], "IsTruncated": False, "NextContinuationToken": "c"},
    )
    assert listed(store, monkeypatch) == 3
    assert store.tokens == ["", "a", "b"]


@pytest.mark.parametrize(
    "answer",
    [
        {"Contents": [row(1)], "IsTruncated": True, "NextContinuationToken": "again"},
        {"Contents": [row(1)], "IsTruncated": True},
    ],
    ids=["the same page", "no word of the next"],
)
def test_a_list_that_cannot_be_read_to_its_end_is_an_error(
    answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Unavailable, match=r"tiers\.s3"):
        listed(Store(answer), monkeypatch)


def test_objects_that_are_read_whole_have_time_for_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of large ones takes an operator's own line longer than any fixed time."""
    given: list[tuple[int, float]] = []

    def finished(settings: S3Settings, action: str, work: Any, deadline_s: float) -> list[Any]:
        given.append((sum(each.byte_count for each in work.args[1]), deadline_s))
        return []

    monkeypatch.setattr(listing, "finished", finished)
    small = [Listed(bytes([number]) * 32, "", 60 << 20, 0.0) for number in range(64)]
    listing.examine(SETTINGS, [*small, Listed(bytes(32), "", 1 << 30, 0.0)], whole=True)
    assert len(given) == 2
    assert all(deadline_s >= byte_count / BYTES_PER_S_MIN for byte_count, deadline_s in given)


async def test_a_header_that_says_it_is_longer_than_any_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever can write to the bucket would choose how much memory a scan takes."""
    first = bytearray(listing.HEADER_BYTES)
    first[:16] = b"KVSCHUNK" + bytes(4) + (HEADER_BYTES_MAX + 1).to_bytes(4, "little")
    asked: list[int] = []

    async def first_bytes(_place: object, byte_count: int, _connection: object) -> Looked:
        asked.append(byte_count)
        return Looked(bytes(first), "etag", 5 << 30)

    monkeypatch.setattr(listing, "first_bytes", first_bytes)
    [found] = await listing._all(SETTINGS, [Listed(bytes(32), "", 5 << 30, 0.0)], listing._by_header, 1, Store())  # type: ignore[arg-type]  # it is asked nothing
    assert found.reason
    assert asked == [listing.HEADER_BYTES]


@scenario()
async def test_a_store_that_is_busy_for_a_while_ends_no_scan(stand: S3Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have read for hours, and would begin anew. One that stays busy ends it."""
    monkeypatch.setattr(listing, "PAUSES_S", (0.01,) * 20)
    for number in range(2):
        await write(stand.tier, chunk(number))

    def busy(count: int) -> None:
        assert not stand.switches.refusals
        stand.switches.refusals = [(503, "SlowDown")] * count

    def scan() -> None:
        busy(15)
        [(found, _)] = listing.pages(stand.settings)
        for whole in (False, True):
            busy(15)
            assert all(each.header for each in listing.examine(stand.settings, found, whole=whole))
        busy(15)
        listing.delete_objects(stand.settings, found)
        busy(1000)
        with pytest.raises(Unavailable, match="SlowDown"):
            list(listing.pages(stand.settings))

    await asyncio.to_thread(scan)
    assert not stand.server.keys(stand.settings.prefix)


@pytest.mark.parametrize("whole", [False, True])
@scenario()
async def test_an_object_that_was_stored_anew_since_it_was_listed_is_as_old_as_it_is(
    stand: S3Stand, whole: bool
) -> None:
    """A page takes minutes to read whole. A node that puts damage right meanwhile, and is told OBJECT, would lose it to
    a deletion by age."""
    await write(stand.tier, chunk(1))
    [([now], _)] = await asyncio.to_thread(lambda: list(listing.pages(stand.settings)))
    before = now._replace(etag='"of-another-one"', byte_count=now.byte_count - 1, modified_s=now.modified_s - 3600)
    [found] = await asyncio.to_thread(listing.examine, stand.settings, [before], whole=whole)
    assert found.listed.modified_s == pytest.approx(now.modified_s, abs=1.0)


def examined(stand: S3Stand) -> list[Listed]:
    [(found, _)] = listing.pages(stand.settings)
    return [each.listed for each in listing.examine(stand.settings, found, whole=True)]


@pytest.mark.parametrize("never_matches", [False, True])
@scenario()
async def test_a_deletion_spares_what_was_stored_anew_since_it_was_examined(
    stand: S3Stand, never_matches: bool
) -> None:
    """A node may have put damage right meanwhile, and was told OBJECT. Ceph's gateway finds no match for any ETag."""
    for number in range(3):
        await write(stand.tier, chunk(number))
    stand.switches.never_matches = never_matches

    def scan() -> None:
        mended, kept, doomed = examined(stand)
        stand.put(mended.storage_key, b"other bytes")
        kept = kept._replace(modified_s=kept.modified_s - 3600)  # of the same bytes, and written since
        assert listing.delete_objects(stand.settings, [mended, kept, doomed]) == [False, False, True]
        assert listing.delete_objects(stand.settings, [doomed]) == [True], "it is gone"
        assert {each.storage_key for each in examined(stand)} == {mended.storage_key, kept.storage_key}

    await asyncio.to_thread(scan)


async def begun_deletion(stand: S3Stand) -> tuple[listing.Listed, asyncio.Task[list[bool]]]:
    """The one object, and its deletion, whose DELETE is on its way."""
    await write(stand.tier, chunk(1))
    [doomed] = await asyncio.to_thread(examined, stand)
    asked = stand.switches.hears("DELETE")
    done = asyncio.create_task(asyncio.to_thread(listing.delete_objects, stand.settings, [doomed]))
    assert await asyncio.to_thread(asked.wait, 10)
    return doomed, done


@scenario()
async def test_a_store_that_looks_at_the_etag_of_a_deletion_spares_what_comes_at_that_moment(stand: S3Stand) -> None:
    stand.switches.matches_deletes = True
    doomed, done = await begun_deletion(stand)
    stand.put(doomed.storage_key, b"other bytes")
    stand.switches.turn_on()
    assert await done == [False]
    assert stand.server.get(object_key(stand.settings, doomed.storage_key)) == b"other bytes"
    [doomed] = await asyncio.to_thread(examined, stand)
    stand.switches.hears("")
    assert await asyncio.to_thread(listing.delete_objects, stand.settings, [doomed]) == [True]


@scenario()
async def test_a_deletion_leaves_alone_what_another_node_writes_at_that_moment(stand: S3Stand) -> None:
    """The write may end at any time: a deletion without a condition would take what it brought."""
    doomed, done = await begun_deletion(stand)
    stand.switches.hears("")
    stand.switches.refusals = [(409, "ConditionalRequestConflict")]
    stand.switches.turn_on()
    assert await done == [False]
    assert await asyncio.to_thread(examined, stand) == [doomed]


async def test_only_the_object_that_was_refused_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "PAUSES_S", (0.0,))
    asked: list[int] = []

    async def examined(settings: S3Settings, each: Listed, connection: Any) -> int:
        asked.append(each.byte_count)
        if asked == [0, 1, 2]:
            raise Refused("SlowDown")
        return each.byte_count

    objects = [Listed(bytes(32), "", number, 0.0) for number in range(4)]
    assert await listing._all(SETTINGS, objects, examined, 1, Store()) == [0, 1, 2, 3]  # type: ignore[arg-type]  # it is asked nothing
    assert asked == [0, 1, 2, 2, 3]
