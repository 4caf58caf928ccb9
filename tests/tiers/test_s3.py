"""What the S3 tier does with what lies in a bucket, with what endpoints answer, and within its limits. By threads of
this process, against a real server."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from kvstore.chunk import Making, layout_of, making
from kvstore.config import S3Settings
from kvstore.errors import DataLoss, DeadlineExceeded, Exhausted, KVStoreError, PermissionDenied, Unavailable
from kvstore.seams import SystemClock
from kvstore.spec import CacheKind, Encoding, LayerSpec
from kvstore.tiers.s3 import tier as tier_module
from kvstore.tiers.s3 import writing
from kvstore.tiers.s3.allowance import DAY_S, Allowance
from kvstore.tiers.s3.connection import RetryBudget
from kvstore.tiers.s3.depth import are_there
from kvstore.tiers.s3.objects import object_key
from tests.contracts.chunks import LARGE, SMALL, Chunk, chunk
from tests.contracts.s3_stand import S3Stand, tier_of
from tests.contracts.test_shared_tier import TIMEOUT_S, found, write
from tests.fakes import Switch
from tests.specs import small_spec

ALTERATIONS = 10_000 if os.environ.get("KVSTORE_TEST_SCALE") == "full" else 500
AT_ONCE = 8
CHECKSUM_AT = 368


@pytest.fixture
def stand(tmp_path: Any) -> Iterator[S3Stand]:
    made = S3Stand(tmp_path)
    yield made
    made.switches.close()


def put_bytes(stand: S3Stand, what: Chunk, data: bytes) -> None:
    stand.put(what.header.storage_key, data)


def bytes_of(what: Chunk, encoding: Encoding = Encoding.RAW) -> bytes:
    way = Making(header=what.header, layout=what.layout, encoding=encoding, sealing=None)
    return b"".join(piece.tobytes() for piece in way.made(what.pieces)[1])


def there(stand: S3Stand, what: Chunk) -> bytes:
    return stand.server.get(object_key(stand.settings, what.header.storage_key))


def with_header(data: bytes, at: int, value: int) -> bytes:
    """A header whose checksum is right, with one u16 of it changed."""
    page = bytearray(data[: SMALL.header_bytes])
    page[at : at + 2] = value.to_bytes(2, "little")
    page[CHECKSUM_AT : CHECKSUM_AT + 16] = bytes(16)
    page[CHECKSUM_AT : CHECKSUM_AT + 16] = xxhash.xxh3_128_digest(page)
    return bytes(page) + data[SMALL.header_bytes :]


def newer(data: bytes) -> bytes:
    return with_header(with_header(data, 8, 2), 10, 2)


# ---------------------------------------------------------------- what lies there


def altered(data: bytes, other: bytes, random: np.random.Generator) -> bytes:
    """What a store, an operator or an attacker may make of an object."""
    changed = bytearray(data)
    place = int(random.integers(len(data)))
    match int(random.integers(9)):
        case 0 | 1 | 2:
            changed[place] ^= 1 << int(random.integers(8))
        case 3:
            del changed[place:]
        case 4:
            changed = bytearray(other)
        case 5:
            changed = bytearray(newer(data))
        case 6:
            changed = bytearray(with_header(data, 8, 0))
        case 7:
            changed[place:] = bytes(len(data) - place)
        case _:
            changed += other[:place]
    return bytes(changed)


@pytest.mark.parametrize("encoding", [Encoding.RAW, Encoding.LZ4])
def test_no_altered_object_gives_a_wrong_byte(
    stand: S3Stand, encoding: Encoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``found`` fails on any other byte. What is right all the same was altered where no strip lies."""

    monkeypatch.setattr(making, "SAVES_MIN", -1.0)
    tier = tier_of(replace(stand.settings, timeout_s=30.0))  # ten thousand take their time

    async def one(number: int, limit: asyncio.Semaphore) -> str:
        random = np.random.default_rng((5, number))
        what = chunk(number)
        async with limit:
            data = altered(bytes_of(what, encoding), bytes_of(chunk(number + 1), encoding), random)
            await asyncio.to_thread(put_bytes, stand, what, data)
            try:
                return "given" if await found(tier, what) else "miss"
            except DataLoss as error:
                return str(error.fields["reason"])

    async def scenario() -> None:
        limit = asyncio.Semaphore(AT_ONCE)
        outcomes = Counter(await asyncio.gather(*(one(number, limit) for number in range(ALTERATIONS))))
        print(outcomes)
        assert outcomes.total() == ALTERATIONS
        assert 0 < outcomes["given"] < ALTERATIONS // 4
        assert {"checksum", "header", "truncated", "miss"} <= set(outcomes), outcomes
        await tier.close()

    stand.run(scenario)


def test_what_is_damaged_is_replaced_and_what_is_right_adopted(stand: S3Stand) -> None:
    what, other = chunk(1), chunk(1, write=2)

    async def scenario() -> None:
        await write(stand.tier, what)
        await write(stand.other, other)
        assert there(stand, what) == bytes_of(what), "it was adopted"
        assert stand.other.statistics().written_bytes == 0
        for damaged in (b"", bytes_of(what)[:-1], bytes_of(chunk(2)), b"\0" + bytes_of(what)[1:], bytes(5)):
            put_bytes(stand, what, damaged)
            with pytest.raises(DataLoss):
                await found(stand.other, what)
            gets(stand)
            await write(stand.other, other)
            assert there(stand, what) == bytes_of(other)
            if len(damaged) > SMALL.header_bytes:
                assert len(gets(stand)) == 1, "its header and its length tell: no body is read"

    stand.run(scenario)


def test_a_strip_that_failed_its_check_is_put_right_by_the_node_that_read_it(stand: S3Stand) -> None:
    what = chunk(1)

    async def scenario() -> None:
        await write(stand.tier, what)
        for is_read in (True, False):  # a level would be promised on what is only looked at
            stand.flip(what.header.storage_key, what.layout.header_bytes + 7)
            if is_read:
                with pytest.raises(DataLoss):
                    await found(stand.tier, what)
            await write(stand.tier, what)
            assert await found(stand.other, what)
        await write(stand.tier, what)
        assert stand.tier.statistics().written_bytes == 3 * SMALL.total_bytes, "twice more, and no more"

    stand.run(scenario)


def test_what_is_damaged_is_replaced_where_no_etag_ever_matches(stand: S3Stand) -> None:
    what = chunk(1)

    async def scenario() -> None:
        stand.switches.never_matches = True
        put_bytes(stand, what, bytes_of(what)[:-1])
        await write(stand.tier, what)
        assert there(stand, what) == bytes_of(what)
        conditions = [headers.get("If-Match") for method, _, headers in stand.switches.asked if method == "PUT"]
        assert [bool(each) for each in conditions] == [True, False]

    stand.run(scenario)


def test_a_newer_format_is_a_miss_and_stays(stand: S3Stand) -> None:
    what = chunk(1)

    async def scenario() -> None:
        data = newer(bytes_of(what))
        put_bytes(stand, what, data)
        assert await stand.tier.open(what.name) is None
        with pytest.raises(Exhausted, match="newer release"):
            await write(stand.tier, what)
        assert there(stand, what) == data

    stand.run(scenario)


def test_two_nodes_that_write_at_once_leave_one_whole_chunk(stand: S3Stand) -> None:
    ones, others = [chunk(number) for number in range(8)], [chunk(number, write=2) for number in range(8)]

    async def scenario() -> None:
        await asyncio.gather(
            *(write(stand.tier, each) for each in ones), *(write(stand.other, each) for each in others)
        )
        for one, other in zip(ones, others, strict=True):
            assert there(stand, one) in (bytes_of(one), bytes_of(other))

    stand.run(scenario)


def gets(stand: S3Stand) -> list[str]:
    """The ranges that were asked for since the last time."""
    asked = [headers["Range"] for method, _, headers in stand.switches.asked if method == "GET"]
    stand.switches.asked.clear()
    return asked


def test_a_chunk_takes_one_request_and_one_more_where_that_was_the_wrong_guess(
    stand: S3Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is encoded, and where its slabs take more than a range. After the first that is encoded nothing of the
    next is read in vain."""
    monkeypatch.setattr(making, "SAVES_MIN", -1.0)
    whole, page = f"bytes=0-{SMALL.total_bytes - 1}", f"bytes=0-{SMALL.header_bytes - 1}"
    body = f"bytes={SMALL.header_bytes}-{SMALL.total_bytes - 1}"
    encoder = tier_of(replace(stand.settings, encoding="lz4"))

    async def scenario() -> None:
        for number in range(3):
            await write(stand.other, chunk(number))
        for number in range(3, 6):
            await write(encoder, chunk(number))
        gets(stand)
        assert [await found(stand.tier, chunk(0)), gets(stand)] == [True, [whole]]
        assert stand.tier.statistics().read_bytes == SMALL.body_bytes
        for number, asked in ((3, whole), (4, page)):
            assert await found(stand.tier, chunk(number))
            first, second = gets(stand)
            assert first == asked
            assert second.startswith(f"bytes={SMALL.header_bytes}-")
        assert [await found(stand.tier, chunk(1)), gets(stand)] == [True, [page, body]]
        assert [await found(stand.tier, chunk(2)), gets(stand)] == [True, [whole]]
        small = tier_of(replace(stand.settings, range_bytes=4096))
        assert await found(small, chunk(2))
        assert gets(stand)[0] == page
        for each in (encoder, small):
            await each.close()

    stand.run(scenario)


def test_large_chunks_go_in_parts_and_no_part_is_left(stand: S3Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "MULTIPART_BYTES", 4 << 20)
    monkeypatch.setattr(writing, "PART_BYTES", 5 << 20)
    wide = small_spec(layers=(LayerSpec(kv_heads=32, k_dim=128, v_dim=128),) * 2, chunk_tokens=400)
    what = chunk(1, layout_of(wide, CacheKind.KV, 400))
    stand.settings = replace(stand.settings, range_bytes=1 << 20)

    async def scenario() -> None:
        tier = stand.node()
        await write(tier, what)
        assert await found(tier, what)
        assert there(stand, what) == bytes_of(what)
        await tier.remove([what.header.storage_key])
        stand.switches.denied = frozenset({"PUT"})  # the parts; the upload is begun by POST
        with pytest.raises(PermissionDenied, match="s3:PutObject"):
            await write(tier, what)
        stand.switches.turn_off()
        uploads = stand.server.client.list_multipart_uploads(Bucket=stand.server.bucket).get("Uploads", [])
        assert not uploads
        assert await tier.open(what.name) is None
        await tier.close()

    stand.run(scenario)


def test_byte_movers_carry_chunks_of_thousands_of_strips(stand: S3Stand) -> None:
    command = [sys.executable, "-m", "tests.tiers.s3_movers", stand.server.url, stand.server.bucket]
    subprocess.run(command, check=True, timeout=60)


# ---------------------------------------------------------------- what endpoints answer


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (404, "NoSuchBucket", "tiers.s3.bucket"),
        (403, "SignatureDoesNotMatch", "secret key"),
        (403, "InvalidAccessKeyId", "tiers.s3.credentials_file"),
        (403, "RequestTimeTooSkewed", "clock"),
        (400, "AuthorizationHeaderMalformed", "tiers.s3.region"),
        (301, "PermanentRedirect", "tiers.s3.region"),
        (400, "IllegalLocationConstraintException", "tiers.s3.region"),
        (400, "InvalidRequest", "tiers.s3.sse_kms_key_id"),
        (503, "SlowDown", "fewer requests"),
        (500, "Odd", "Odd"),
        (400, "KMS.DisabledException", "tiers.s3.sse_kms_key_id"),
    ],
)
def test_what_an_endpoint_refuses_is_unavailable_and_says_what_to_set(
    stand: S3Stand, status: int, code: str, words: str
) -> None:
    async def scenario() -> None:
        await write(stand.tier, chunk(1))
        for call in (lambda: stand.tier.open(chunk(1).name), lambda: write(stand.tier, chunk(2))):
            stand.switches.refusals = [(status, code)] * 8
            with pytest.raises(Unavailable, match=words):
                await call()
            stand.switches.refusals = []
        assert await found(stand.tier, chunk(1))

    stand.run(scenario)


def test_what_is_denied_is_a_miss_to_read_and_a_refusal_to_write(stand: S3Stand) -> None:
    """Without the right to list, what is not there is denied."""

    async def scenario() -> None:
        await write(stand.tier, chunk(1))
        stand.switches.denied = frozenset({"GET", "HEAD"})
        assert await stand.tier.open(chunk(1).name) is None
        assert list(await stand.tier.probe([chunk(1).header.storage_key], TIMEOUT_S)) == [False]
        await write(stand.tier, chunk(2))
        with pytest.raises(PermissionDenied, match="s3:GetObject"):
            await write(stand.tier, chunk(1))
        stand.switches.denied = frozenset({"PUT"})
        with pytest.raises(PermissionDenied, match="s3:PutObject"):
            await write(stand.tier, chunk(3))
        assert stand.tier.statistics().state == "read-only"
        assert await found(stand.tier, chunk(2))

    stand.run(scenario)


def test_a_store_without_conditions_is_written_without(stand: S3Stand) -> None:
    async def scenario() -> None:
        await write(stand.tier, chunk(0))
        stand.switches.asked.clear()
        stand.switches.refusals = [(404, "NoSuchKey"), (501, "NotImplemented")]
        await write(stand.tier, chunk(1))
        conditions = [headers.get("If-None-Match") for method, _, headers in stand.switches.asked if method == "PUT"]
        assert conditions == ["*", None]
        stand.switches.ignores_conditions = True
        await write(stand.other, chunk(1, write=2))
        assert there(stand, chunk(1)) == bytes_of(chunk(1))

    stand.run(scenario)


def test_a_request_says_whose_the_bucket_is_and_what_it_checks_to(stand: S3Stand) -> None:
    async def scenario() -> None:
        tier = tier_of(replace(stand.settings, expected_owner="123456789012", sse_kms_key_id="a-key"))
        await write(tier, chunk(1))
        assert await found(tier, chunk(1))
        await tier.probe([chunk(1).header.storage_key], TIMEOUT_S)
        await tier.close()
        asked = stand.switches.asked
        assert {method for method, _, _ in asked} == {"GET", "HEAD", "PUT"}
        assert {headers["x-amz-expected-bucket-owner"] for _, _, headers in asked} == {"123456789012"}
        put = next(headers for method, _, headers in asked if method == "PUT")
        assert put["x-amz-checksum-crc32"]
        assert put["x-amz-server-side-encryption-aws-kms-key-id"] == "a-key"
        assert put["If-None-Match"] == "*"
        assert "Expect" not in put

    stand.run(scenario)


def test_retries_have_a_budget(stand: S3Stand) -> None:
    """A store that refuses everything hears hardly more than if nobody tried again."""

    async def scenario() -> None:
        await write(stand.tier, chunk(1))
        stand.switches.refusals = [(503, "SlowDown")] * 2
        assert await found(stand.tier, chunk(1)), "it was tried again"
        stand.switches.asked.clear()
        stand.switches.refusals = [(503, "SlowDown")] * 1000
        for _ in range(20):
            with pytest.raises(Unavailable):
                await stand.tier.open(chunk(1).name)
        assert len(stand.switches.asked) <= 20 + RetryBudget.MOST

    stand.run(scenario)


def test_a_kept_connection_that_was_closed_is_no_failure(stand: S3Stand) -> None:
    async def scenario() -> None:
        await write(stand.tier, chunk(1))
        stand.switches.abort_count = 1
        assert list(await stand.tier.probe([chunk(1).header.storage_key], TIMEOUT_S)) == [True]
        stand.switches.abort_count = 1
        assert await found(stand.tier, chunk(1))

    stand.run(scenario)


def test_a_probe_ends_in_time_and_a_cut_body_is_read_again(stand: S3Stand) -> None:
    async def scenario() -> None:
        await write(stand.tier, chunk(1, LARGE))
        stand.switches.turn_on(Switch.STALLED)
        with pytest.raises(DeadlineExceeded):
            await stand.tier.probe([chunk(1).header.storage_key], 0.1)
        stand.switches.turn_off()
        stand.switches.cut_at = 5000
        with pytest.raises(Unavailable, match=r"tiers\.s3\.endpoint_url"):
            await found(stand.tier, chunk(1, LARGE))
        stand.switches.turn_off()
        assert await found(stand.tier, chunk(1, LARGE))

    stand.run(scenario)


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize("limit", ["day_bytes_max", "day_request_count_max"])
def test_a_day_has_its_limit(stand: S3Stand, limit: str) -> None:
    async def scenario() -> None:
        tier = tier_of(replace(stand.settings, **{limit: 100_000 if limit == "day_bytes_max" else 10}))
        with pytest.raises(Exhausted, match=f"tiers.s3.{limit}"):
            for number in range(100):
                await write(tier, chunk(number))
        before = len(stand.switches.asked)
        assert await tier.open(chunk(0).name) is None
        assert list(await tier.probe([chunk(0).header.storage_key], TIMEOUT_S)) == [False]
        assert len(stand.switches.asked) == before, "nothing was asked"
        assert tier.statistics().state == "failing"
        assert await found(stand.other, chunk(0))
        await tier.close()

    stand.run(scenario)


class Hand(SystemClock):
    """A clock that is moved by hand; sleepers wake at once."""

    now_s = 1e6

    def monotonic(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return self.now_s + 1e9

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds


async def test_bytes_pass_at_their_pace_and_a_new_day_begins(stand: S3Stand) -> None:
    clock = Hand()
    allowance = Allowance(replace(stand.settings, bytes_per_s_max=1000, day_bytes_max=5000), clock)
    began_s = clock.now_s
    for _ in range(5):
        await allowance.turn(1000)
        assert not allowance.reached
        allowance.used(1000, 1)
    assert 3.0 <= clock.now_s - began_s <= 4.0
    assert allowance.reached == "day_bytes_max"
    clock.now_s += DAY_S
    assert not allowance.reached
    await allowance.turn(50_000)
    with pytest.raises(Exhausted, match="bytes_per_s_max"):
        await allowance.turn(1)


@pytest.mark.parametrize("ends", ["stop", "kill"])
async def test_a_days_limit_outlives_the_process(tmp_path: Path, ends: str) -> None:
    """One that is killed may forget a thousandth of the limit, and does not begin the day anew."""
    clock, account = Hand(), tmp_path / "s3" / "default"
    settings = S3Settings(bucket="a-bucket", day_bytes_max=5_000_000)
    first = Allowance(settings, clock, account)
    assert not first.reached
    for _ in range(499):
        first.used(10_000, 1)
    first.used(3_000, 1)
    if ends == "stop":
        first.keep()
    clock.now_s = 50.0  # the machine was started anew: its monotonic clock, too
    clock.wall = lambda: 1e9 + 1e6 + 100
    second = Allowance(settings, clock, account)
    assert not second.reached
    second.used(7_000 + 5_000 * (ends == "kill"), 1)
    assert second.reached == "day_bytes_max"
    clock.wall = lambda: 1e9 + 1e6 + DAY_S + 1
    assert not second.reached


async def test_an_account_that_cannot_be_kept_is_told_and_limits_hold(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = S3Settings(bucket="a-bucket", day_request_count_max=10)
    (tmp_path / "odd").write_text("[1, 2")
    for account in (tmp_path / "odd", tmp_path / "odd" / "below a file"):
        allowance = Allowance(settings, Hand(), account)
        assert not allowance.reached
        allowance.used(0, 10)
        assert allowance.reached == "day_request_count_max"
    assert "is not kept" in caplog.text
    assert Allowance(settings, Hand(), tmp_path / "odd").reached


def test_a_large_chunk_on_a_slow_line_is_no_stall(stand: S3Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the tier, that others go on asking; one of the same size that was to be sent long ago is."""

    async def scenario() -> None:
        for rate, is_stalled in ((1.0, False), (1e12, True)):
            monkeypatch.setattr(tier_module, "SLOW_BYTES_PER_S", rate)
            stand.switches.turn_off()
            await stand.tier.remove([chunk(1).header.storage_key])
            looked = stand.switches.hears("PUT")
            sending = asyncio.ensure_future(write(stand.tier, chunk(1)))
            await asyncio.to_thread(looked.wait, 10.0)
            assert bool(stand.tier.stalled_s()) == is_stalled
            stand.switches.turn_off()
            await sending
        assert stand.tier.stalled_s() == 0.0

    stand.run(scenario)


def test_small_chunks_are_none_of_its(stand: S3Stand) -> None:
    tier = tier_of(replace(stand.settings, chunk_bytes_min=SMALL.total_bytes + 1))
    assert not tier.takes(SMALL)
    assert tier.takes(LARGE)
    asyncio.run(tier.close())


# ---------------------------------------------------------------- how far a chain goes on


@pytest.mark.parametrize("count", [1, 7, 8, 9, 100, 128, 1000])
async def test_a_chain_is_found_to_its_end_in_few_questions(count: int) -> None:
    for length in {0, 1, 2, count // 3, count - 1, count}:
        asked: list[int] = []

        async def is_there(key: int, length: int = length, asked: list[int] = asked) -> bool:
            asked.append(key)
            return key < length

        answers, question_count = await are_there(range(count), is_there, [count])
        assert answers == [key < length for key in range(count)]
        assert len(asked) == len(set(asked)) == question_count
        assert question_count <= (8 if count <= 8 else 19 if count <= 128 else 33)
        assert length or count <= 8 or question_count == 1, "what is nowhere costs one"


async def test_what_is_no_chain_is_asked_for_key_by_key() -> None:
    """A chain whose first chunk is missing says nothing of the next one."""
    there = {key for key in range(60) if key % 3 or key > 50}

    async def is_there(key: int) -> bool:
        return key in there

    assert await are_there(range(60), is_there) == ([key in there for key in range(60)], 60)
    starts = {0: 20, 20: 0, 25: 30, 55: 5}  # chains of 20, 5, 30 and 5 keys, and how much of each is there
    expected = [any(start <= key < start + count for start, count in starts.items()) for key in range(60)]

    async def leads(key: int) -> bool:
        return expected[key]

    answers, count = await are_there(range(60), leads, [20, 5, 30, 5])
    assert answers == expected
    assert count < 40


async def test_a_question_that_fails_fails_all() -> None:
    async def is_there(key: int) -> bool:
        raise Unavailable("away")

    with pytest.raises(KVStoreError, match="away"):
        await are_there(range(100), is_there, [100])
