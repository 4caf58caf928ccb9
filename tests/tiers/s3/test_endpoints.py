"""What the S3 tier makes of what endpoints answer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from kvstore.config import S3Settings
from kvstore.errors import DeadlineExceeded, Exhausted, PermissionDenied, Unavailable
from kvstore.tiers import IS_FULL
from kvstore.tiers.s3 import writing
from kvstore.tiers.s3.connection import RetryBudget, connection_count
from kvstore.tiers.s3.objects import READ_S_MAX
from kvstore.tiers.s3.refusals import Refused
from kvstore.tiers.s3.writing import Condition
from tests.contracts.chunks import LARGE, chunk
from tests.contracts.shared.s3_stand import S3Stand, tier_of
from tests.contracts.shared.stands import TIMEOUT_S, found, write
from tests.fakes import Switch
from tests.fakes.switches import POLL_S
from tests.scenario import scenario
from tests.tiers.s3.objects import bytes_of, there


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
@scenario()
async def test_what_an_endpoint_refuses_is_unavailable_and_says_what_to_set(
    stand: S3Stand, status: int, code: str, words: str
) -> None:
    await write(stand.tier, chunk(1))
    for call in (lambda: stand.tier.open(chunk(1).name), lambda: write(stand.tier, chunk(2))):
        stand.switches.refusals = [(status, code)] * 8
        with pytest.raises(Unavailable, match=words):
            await call()
        stand.switches.refusals = []
    assert await found(stand.tier, chunk(1))


@pytest.mark.parametrize(
    ("code", "words", "is_full"),
    [("QuotaExceeded", "quota", True), ("XMinioStorageFull", "quota", True), ("EntityTooLarge", "limit", False)],
)
@scenario()
async def test_a_store_that_is_full_refuses_all_and_one_that_has_a_limit_a_chunk(
    stand: S3Stand, code: str, words: str, is_full: bool
) -> None:
    await write(stand.other, chunk(1))
    stand.switches.full = code
    with pytest.raises(Exhausted, match=words) as caught:
        await write(stand.tier, chunk(2))
    assert (IS_FULL in caught.value.fields) is is_full
    assert await found(stand.tier, chunk(1))


@scenario()
async def test_what_is_denied_is_a_miss_to_read_and_a_refusal_to_write(stand: S3Stand) -> None:
    """Without the right to list, what is not there is denied."""
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


@scenario()
async def test_a_store_without_conditions_is_written_without(stand: S3Stand) -> None:
    await write(stand.tier, chunk(0))
    stand.switches.asked.clear()
    stand.switches.refusals = [(404, "NoSuchKey"), (501, "NotImplemented")]
    await write(stand.tier, chunk(1))
    conditions = [headers.get("If-None-Match") for method, _, headers in stand.switches.asked if method == "PUT"]
    assert conditions == ["*", None]
    stand.switches.ignores_conditions = True
    await write(stand.other, chunk(1, write=2))
    assert there(stand, chunk(1)) == bytes_of(chunk(1))


async def test_the_first_writes_to_a_store_without_conditions_all_go_without() -> None:
    """They are on their way side by side when the first refusal comes."""
    store, both = SimpleNamespace(is_conditional=True), asyncio.Barrier(2)

    async def put(_place: object, _bodies: object, condition: Condition, *_: object) -> None:
        if condition:
            await both.wait()
            raise Refused("NotImplemented", 501)

    async def written() -> bool:
        return await writing._put(put, S3Settings(bucket="bucket"), {}, [], {"IfNoneMatch": "*"}, store)

    async with asyncio.timeout(TIMEOUT_S):
        assert await asyncio.gather(written(), written()) == [True, True]


@scenario()
async def test_a_request_says_whose_the_bucket_is_and_what_it_checks_to(stand: S3Stand) -> None:
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


@scenario()
async def test_retries_have_a_budget(stand: S3Stand) -> None:
    """A store that refuses everything hears hardly more than if nobody tried again."""
    await write(stand.tier, chunk(1))
    stand.switches.refusals = [(503, "SlowDown")] * 2
    assert await found(stand.tier, chunk(1)), "it was tried again"
    stand.switches.asked.clear()
    stand.switches.refusals = [(503, "SlowDown")] * 1000
    for _ in range(20):
        with pytest.raises(Unavailable):
            await stand.tier.open(chunk(1).name)
    assert len(stand.switches.asked) <= 20 + RetryBudget.MOST


@pytest.mark.parametrize("code", ["SlowDown", "TooManyRequests", "Throttling"])
@scenario()
async def test_a_question_that_is_asked_to_slow_down_says_so(stand: S3Stand, code: str) -> None:
    """The answer to a HEAD has a status and no body: nobody can look into the log of Amazon's S3."""
    stand.switches.refusals = [(429 if code == "TooManyRequests" else 503, code)] * 20
    with pytest.raises(Unavailable, match="fewer requests"):
        await stand.tier.probe([chunk(1).header.storage_key], TIMEOUT_S)
    with pytest.raises(Unavailable, match="fewer requests"):
        await stand.tier.open(chunk(1).name)


@scenario()
async def test_a_denial_names_the_rights_on_the_key_of_the_settings(stand: S3Stand) -> None:
    """Amazon's S3 says AccessDenied, too, of a key that may not be used."""
    stand.switches.denied = frozenset({"PUT"})
    with pytest.raises(PermissionDenied, match=r"tiers\.s3\.sse_kms_key_id.*kms:GenerateDataKey"):
        await write(stand.tier, chunk(1))


@scenario()
async def test_a_store_that_lacks_something_else_keeps_its_conditions(stand: S3Stand) -> None:
    """One without keys of its own answers so to a key of the settings."""
    absent = (404, "NoSuchKey")
    stand.switches.refusals = [absent, (501, "NotImplemented"), (501, "NotImplemented")]
    with pytest.raises(Unavailable, match=r"tiers\.s3\.sse_kms_key_id"):
        await write(stand.tier, chunk(1))
    stand.switches.asked.clear()
    await write(stand.tier, chunk(1))
    [headers] = [headers for method, _, headers in stand.switches.asked if method == "PUT"]
    assert headers["If-None-Match"] == "*"


@scenario()
async def test_misses_earn_retries_as_hits_do(stand: S3Stand) -> None:
    """A node that finds nothing in a bucket has none left after its first few refusals, for ever."""
    stand.switches.refusals = [(503, "SlowDown")] * 1000
    for _ in range(20):
        with pytest.raises(Unavailable):
            await stand.tier.open(chunk(1).name)
    stand.switches.refusals = []
    for number in range(2 * int(1 / RetryBudget.EARNED)):
        assert await stand.tier.open(chunk(number).name) is None
    stand.switches.refusals = [(503, "SlowDown")]
    assert await stand.tier.open(chunk(1).name) is None, "it was tried again"


@scenario()
async def test_a_question_that_is_refused_fails_no_lookup(stand: S3Stand) -> None:
    """A lookup of a long chain is a dozen: of a store that refuses one in twenty most lookups would fail, and after
    three of them the tier would be left alone. One that refuses all hears hardly more."""
    keys = [chunk(number).header.storage_key for number in range(20)]
    for number in range(12):
        await write(stand.tier, chunk(number))
    for number in range(3):
        stand.switches.refusals = [(503, "SlowDown")]
        answers = await stand.tier.probe(keys, TIMEOUT_S, [len(keys)])
        assert list(answers) == [True] * 12 + [False] * 8, number
    stand.switches.asked.clear()
    stand.switches.refusals = [(503, "SlowDown")] * 1000
    for _ in range(20):
        with pytest.raises(Unavailable):
            await stand.tier.probe(keys[:1], TIMEOUT_S)
    assert len(stand.switches.asked) <= 20 + RetryBudget.MOST


@scenario()
async def test_a_kept_connection_that_was_closed_is_no_failure(stand: S3Stand) -> None:
    await write(stand.tier, chunk(1))
    stand.switches.abort_count = 1
    assert list(await stand.tier.probe([chunk(1).header.storage_key], TIMEOUT_S)) == [True]
    stand.switches.abort_count = 1
    assert await found(stand.tier, chunk(1))


@scenario()
async def test_a_probe_ends_in_time_and_a_cut_body_is_read_again(stand: S3Stand) -> None:
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


@scenario()
async def test_a_body_that_ceases_in_the_middle_is_given_up(stand: S3Stand) -> None:
    """Nothing more comes, and the connection stays: as an open chunk is read, and as one is opened."""
    what = chunk(1, LARGE)
    await write(stand.tier, what)
    stored = await stand.tier.open(what.name)
    assert stored is not None
    target = [np.empty(slab.byte_count, np.uint8) for slab in LARGE.slabs]
    stand.switches.stall_at = 4000
    async with asyncio.timeout(READ_S_MAX):
        with pytest.raises(Unavailable, match=r"ReadTimeoutError.*tiers\.s3\.endpoint_url.*tiers\.s3\.timeout_s"):
            await stored.read(range(len(target)), target)
        with pytest.raises(Unavailable, match=r"ReadTimeoutError.*tiers\.s3\.endpoint_url"):
            await stand.tier.open(what.name)
    assert stand.tier.stalled_s() == 0.0
    stand.switches.turn_off()
    assert await found(stand.tier, what)


@scenario()
async def test_a_lookup_does_not_wait_until_bodies_have_passed(stand: S3Stand) -> None:
    """As many as its process reads at once, for however many tenants."""
    what, tiers = chunk(1, LARGE), [tier_of(stand.settings) for _ in range(4)]
    slabs = range(len(LARGE.slabs))
    await write(stand.tier, what)
    targets = [[np.empty(slab.byte_count, np.uint8) for slab in LARGE.slabs] for _ in range(16)]
    opened = [await tiers[number % 4].open(what.name) for number in range(16)]
    stand.switches.asked.clear()
    stand.switches.stall_at = 0
    reading = [asyncio.create_task(each.read(slabs, to)) for each, to in zip(opened, targets, strict=True) if each]
    while len(stand.switches.asked) < connection_count(stand.settings):  # noqa: ASYNC110 - another thread counts
        await asyncio.sleep(POLL_S)
    assert list(await stand.tier.probe([what.header.storage_key], TIMEOUT_S)) == [True]
    stand.switches.turn_off()
    await asyncio.gather(*reading, return_exceptions=True)
    for tier in tiers:
        await tier.close()


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (403, "SignatureDoesNotMatch", "secret key"),
        (403, "InvalidAccessKeyId", "tiers.s3.credentials_file"),
        (403, "RequestTimeTooSkewed", "clock"),
        (400, "AuthorizationHeaderMalformed", "tiers.s3.region"),
    ],
)
@scenario()
async def test_a_lookup_is_told_what_to_set_although_its_answers_have_no_words(
    stand: S3Stand, status: int, code: str, words: str
) -> None:
    """To a HEAD a wrong key and a clock that is wrong look like what is not there, which no node would be told of."""
    await write(stand.tier, chunk(1))
    stand.switches.refusals = [(status, code)] * 8
    with pytest.raises(Unavailable, match=words):
        await stand.tier.probe([chunk(1).header.storage_key], READ_S_MAX)
    stand.switches.refusals = []
    assert list(await stand.tier.probe([chunk(1).header.storage_key], READ_S_MAX)) == [True]
