"""Whose a bucket is, who may do what there, and the ways to it: what every request says, proxies, encrypted lines."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.chunk import layout_of
from kvstore.config import S3Settings
from kvstore.errors import KVStoreError, PermissionDenied, Unavailable
from kvstore.spec import CacheKind, LayerSpec
from kvstore.tiers.s3 import S3Tier, connection, writing
from kvstore.tiers.s3.listing import examine, pages
from tests.contracts.chunks import Chunk, chunk
from tests.contracts.shared.s3_stand import S3Stand, tier_of
from tests.contracts.shared.stands import found, write
from tests.fakes.forward_proxy import forward_proxy
from tests.fakes.s3_server import STRANGER
from tests.fakes.tls import encrypted, made_certificates
from tests.scenario import scenario
from tests.specs import small_spec

PROBE_S = 10.0
OWNER, OTHER = "123456789012", "210987654321"
WIDE = layout_of(
    small_spec(layers=(LayerSpec(kv_heads=32, k_dim=128, v_dim=128),) * 2, chunk_tokens=200), CacheKind.KV, 200
)
"""6.25 MiB: two parts."""


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "MULTIPART_BYTES", 4 << 20)
    monkeypatch.setattr(writing, "PART_BYTES", 5 << 20)


async def there(tier: S3Tier, what: Chunk) -> bool:
    [found] = await tier.probe([what.header.storage_key], PROBE_S)
    return found


async def said(*calls: Any) -> list[KVStoreError]:
    """What these raise. Each does."""
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(each, KVStoreError) for each in found), found
    return found


# ---------------------------------------------------------------- what every request says


@pytest.mark.usefixtures("parts")
def test_every_request_says_whose_the_bucket_is_and_those_that_make_an_object_which_key(stand: S3Stand) -> None:
    """Also those that nobody sees: of parts, of an upload that is given up, of a scan, and of removals."""
    settings = replace(
        stand.settings, expected_owner=OWNER, sse_kms_key_id="a-key", range_bytes=1 << 20, timeout_s=20.0
    )
    keys = [chunk(number).header.storage_key for number in (1, 2)]

    async def scenario() -> None:
        tier = tier_of(settings)
        for what in (chunk(1), chunk(2, WIDE)):
            await write(tier, what)
            assert await found(tier, what)
            assert await there(tier, what)
        await tier.remove(keys[:1])
        stand.put(keys[0], b"")  # a range of nothing is none: it is asked for by HEAD
        await write(tier, chunk(1))
        [(listed, _)] = await asyncio.to_thread(lambda: list(pages(settings)))
        assert all(each.header for each in await asyncio.to_thread(examine, settings, listed, whole=True))
        await tier.remove(keys)
        stand.switches.denied = frozenset({"PUT"})
        with pytest.raises(PermissionDenied):
            await write(tier, chunk(2, WIDE))
        await tier.close()

    stand.run(scenario)
    kinds: dict[tuple[str, str], set[tuple[bool, bool]]] = {}
    for method, path, headers in stand.switches.asked:
        query = "&".join(sorted(each.partition("=")[0] for each in path.partition("?")[2].split("&")))
        says = headers.get("x-amz-expected-bucket-owner") == OWNER, "x-amz-server-side-encryption" in headers
        kinds.setdefault((method, query), set()).add(says)
        if says[1]:
            assert headers["x-amz-server-side-encryption"] == "aws:kms"
            assert headers["x-amz-server-side-encryption-aws-kms-key-id"] == "a-key"
    made = {kind for kind, says in kinds.items() if says == {(True, True)}}
    assert made == {("PUT", ""), ("POST", "uploads")}
    assert {says for kind, each in kinds.items() if kind not in made for says in each} == {(True, False)}
    part, upload = ("PUT", "partNumber&uploadId"), ("POST", "uploadId")
    assert {("GET", ""), ("HEAD", ""), ("DELETE", ""), part, upload, ("DELETE", "uploadId")} < set(kinds)
    assert any("list-type" in query for _, query in kinds)


@pytest.mark.parametrize("expected", [OWNER, OTHER])
@scenario()
async def test_a_bucket_of_another_owner_is_denied_both_ways(stand: S3Stand, expected: str) -> None:
    """As Amazon's S3 does; moto and Ceph's gateway ask nobody, so the line does it."""
    await write(stand.tier, chunk(1))
    stand.switches.owner = OWNER
    tier = tier_of(replace(stand.settings, expected_owner=expected))
    is_right = expected == OWNER
    assert await there(tier, chunk(1)) == is_right
    assert (await tier.open(chunk(1).name) is not None) == is_right
    if is_right:
        await write(tier, chunk(2))
    else:
        for error in await said(write(tier, chunk(1)), write(tier, chunk(2))):
            assert isinstance(error, PermissionDenied)
            assert "tiers.s3.expected_owner" in error.message
        assert tier.statistics().state == "read-only"
    await tier.close()


@scenario()
async def test_a_bucket_that_is_not_there_is_named(stand: S3Stand) -> None:
    tier = tier_of(replace(stand.settings, bucket="kvstore-tests-nowhere"))
    for error in await said(tier.open(chunk(1).name), write(tier, chunk(1)), there(tier, chunk(1))):
        assert isinstance(error, Unavailable)
        assert "tiers.s3.bucket" in error.message
    await tier.close()


@scenario()
async def test_a_bucket_of_another_region_is_found_where_the_answer_names_it(stand: S3Stand) -> None:
    stand.switches.region = "eu-central-1"
    tier = tier_of(replace(stand.settings, region="us-east-1"))
    await write(tier, chunk(1))
    assert await found(tier, chunk(1))
    assert await there(tier, chunk(1))
    await tier.close()


@scenario()
async def test_credentials_that_expire_while_many_read_cost_nobody_a_chunk(
    stand: S3Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_users: list[tuple[str, str]]
) -> None:
    """The file has new ones by then. Who meets the old ones at once with others takes no client from them."""
    monkeypatch.setattr(connection, "RENEW_S_MIN", 0.0)
    old, new = two_users
    settings = as_user(stand, tmp_path, *old)
    tier = tier_of(settings)
    for number in range(8):
        await write(tier, chunk(number))
    as_user(stand, tmp_path, *new)
    stand.switches.expired = old[0]
    assert all(await asyncio.gather(*(found(tier, chunk(number)) for number in range(8))))
    assert all(await tier.probe([chunk(number).header.storage_key for number in range(8)], 10.0))
    stand.switches.expired = new[0]
    monkeypatch.setattr(connection, "RENEW_S_MIN", 60.0)
    stand.switches.asked.clear()
    for number in range(4):
        with pytest.raises(Unavailable, match="ExpiredToken"):
            await found(tier, chunk(number))
    assert len(stand.switches.asked) == 4, "the same credentials are not read again and again"
    await tier.close()


@scenario()
async def test_credentials_that_come_later_or_are_put_right_need_no_new_start(
    stand: S3Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_users: list[tuple[str, str]]
) -> None:
    """The file has none at first; then another secret of the same key."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(connection, "RENEW_S_MIN", 0.0)
    settings = as_user(stand, tmp_path, *two_users[0])
    Path(settings.credentials_file).write_text("[of-a-test]\nregion = us-east-1\n")  # noqa: ASYNC240 - nothing else runs yet
    tier = tier_of(settings)
    for error in await said(tier.open(chunk(1).name), write(tier, chunk(1)), there(tier, chunk(1))):
        assert isinstance(error, Unavailable)
        assert "no credentials were found" in error.message
    as_user(stand, tmp_path, *two_users[0])
    await write(tier, chunk(1))
    stand.switches.refusals = [(403, "SignatureDoesNotMatch")]
    assert await found(tier, chunk(1))
    await tier.close()


@scenario()
async def test_a_server_that_sends_everybody_elsewhere_is_not_asked_on_and_on(stand: S3Stand) -> None:
    """As one that sends http to https."""
    stand.switches.refusals = [(301, "Moved")] * 1000
    for error in await said(stand.tier.open(chunk(1).name), write(stand.tier, chunk(1))):
        assert isinstance(error, Unavailable)
        assert "tiers.s3.endpoint_url" in error.message
    assert len(stand.switches.asked) == 2


# ---------------------------------------------------------------- who may do what


def as_user(stand: S3Stand, place: Path, access_key: str, secret_key: str) -> S3Settings:
    """By a profile of a file, which comes before the environment."""
    place.mkdir(exist_ok=True)
    file = place / "credentials"
    file.write_text(f"[of-a-test]\naws_access_key_id = {access_key}\naws_secret_access_key = {secret_key}\n")
    return replace(stand.settings, credentials_file=str(file), profile="of-a-test")


@pytest.fixture
def stranger(stand: S3Stand, tmp_path: Path) -> Iterator[S3Settings]:
    """Another user of the server, without any right to the bucket."""
    if STRANGER not in os.environ:
        pytest.skip(f"{STRANGER} names no other user of a server that asks who somebody is: see make test-s3")
    yield as_user(stand, tmp_path, *os.environ[STRANGER].split(":"))
    stand.server.client.delete_bucket_policy(Bucket=stand.server.bucket)


def allow(stand: S3Stand, *actions: str) -> None:
    """To the stranger."""
    bucket = f"arn:aws:s3:::{stand.server.bucket}"
    rule = {"Effect": "Allow", "Principal": {"AWS": ["arn:aws:iam:::user/stranger"]},
            "Action": [f"s3:{each}" for each in actions], "Resource": [bucket, f"{bucket}/*"]}  # fmt: skip
    policy = json.dumps({"Version": "2012-10-17", "Statement": [rule]})
    stand.server.client.put_bucket_policy(Bucket=stand.server.bucket, Policy=policy)


@pytest.fixture
def two_users(stand: S3Stand) -> Iterator[list[tuple[str, str]]]:
    """Keys of two users who may read the bucket, and the first may write. Where a server asks nobody who somebody is,
    any do."""
    if STRANGER not in os.environ:
        yield [("old", "secret"), ("new", "secret")]
        return
    allow(stand, "GetObject", "ListBucket")
    access_key, _, secret_key = os.environ[STRANGER].partition(":")
    yield [(os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]), (access_key, secret_key)]
    stand.server.client.delete_bucket_policy(Bucket=stand.server.bucket)


@scenario()
async def test_a_bucket_of_somebody_else_is_a_miss_and_takes_nothing(stand: S3Stand, stranger: S3Settings) -> None:
    await write(stand.tier, chunk(1))
    tier = tier_of(stranger)
    for what in (chunk(1), chunk(2)):
        assert await tier.open(what.name) is None
        assert not await there(tier, what)
        with pytest.raises(PermissionDenied, match="s3:PutObject"):
            await write(tier, what)
    with pytest.raises(Unavailable, match="s3:DeleteObject"):
        await tier.remove([chunk(1).header.storage_key])
    assert await found(stand.tier, chunk(1))
    assert not await found(stand.tier, chunk(2))
    await tier.close()


@pytest.mark.parametrize("lists", [False, True], ids=["what is absent is denied", "what is absent is absent"])
@scenario()
async def test_the_right_to_read_alone_reads(stand: S3Stand, stranger: S3Settings, lists: bool) -> None:
    allow(stand, "GetObject", *(["ListBucket"] if lists else []))
    await write(stand.tier, chunk(1))
    tier = tier_of(stranger)
    assert await found(tier, chunk(1))
    assert await there(tier, chunk(1))
    assert await tier.open(chunk(2).name) is None
    assert not await there(tier, chunk(2))
    with pytest.raises(PermissionDenied, match="s3:PutObject"):
        await write(tier, chunk(2))
    assert tier.statistics().state == "read-only"
    await write(tier, chunk(1))
    await tier.close()


@scenario()
async def test_the_right_to_write_alone_writes(stand: S3Stand, stranger: S3Settings) -> None:
    allow(stand, "PutObject")
    await write(stand.tier, chunk(1))
    tier = tier_of(stranger)
    assert await tier.open(chunk(1).name) is None
    assert not await there(tier, chunk(1))
    with pytest.raises(PermissionDenied, match="s3:GetObject"):
        await write(tier, chunk(1, write=1))
    assert await found(stand.tier, chunk(1))
    await write(tier, chunk(2))
    assert len(stand.server.keys(stand.settings.prefix)) == 2
    await tier.close()


@pytest.mark.usefixtures("stranger")
def test_keys_that_the_server_does_not_know_are_named(stand: S3Stand, tmp_path: Path) -> None:
    right = os.environ[STRANGER].partition(":")[0]
    for access_key, word in (("nobodys-key", "tiers.s3.credentials_file"), (right, "secret key is wrong")):

        async def scenario(access_key: str = access_key, word: str = word) -> None:
            tier = tier_of(as_user(stand, tmp_path / access_key, access_key, "not-the-secret"))
            for error in await said(tier.open(chunk(1).name), write(tier, chunk(1)), there(tier, chunk(1))):
                assert isinstance(error, Unavailable)
                assert word in error.message
                assert "not-the-secret" not in error.message
            await tier.close()

        asyncio.run(scenario())


# ---------------------------------------------------------------- the way there


async def use(tier: S3Tier) -> None:
    """Each kind of request."""
    await write(tier, chunk(1))
    assert await found(tier, chunk(1))
    assert await there(tier, chunk(1))
    await tier.remove([chunk(1).header.storage_key])
    assert not await there(tier, chunk(1))
    await tier.close()


@pytest.mark.parametrize("how", ["setting", "environment"])
@scenario()
async def test_a_proxy_carries_every_request(stand: S3Stand, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    # A connection of an older test whose port this one was given again would know no proxy.
    monkeypatch.setattr(connection, "_connections", {})
    async with forward_proxy() as proxy:
        if how == "environment":
            monkeypatch.setenv("HTTP_PROXY", proxy.url)
        await use(tier_of(replace(stand.settings, proxy=proxy.url if how == "setting" else "")))
        monkeypatch.delenv("HTTP_PROXY", raising=False)
        asked = [method for method, _, _ in stand.switches.asked]
        assert len(asked) >= 6
        assert [method for method, _ in proxy.asked] == asked
        assert {place for _, place in proxy.asked} == {stand.switches.url.partition("//")[2]}


@scenario()
async def test_an_encrypted_line_goes_through_a_proxy_and_wants_the_right_certificate(
    stand: S3Stand, tmp_path: Path
) -> None:
    made_certificates(tmp_path)
    host, _, upstream_port = stand.switches.url.partition("//")[2].partition(":")
    async with encrypted((host, int(upstream_port)), tmp_path) as port, forward_proxy() as proxy:
        settings = replace(
            stand.settings, endpoint_url=f"https://127.0.0.1:{port}", proxy=proxy.url, ca_file=f"{tmp_path}/ca.crt"
        )
        await use(tier_of(settings))
        assert set(proxy.asked) == {("CONNECT", f"127.0.0.1:{port}")}
        assert len(stand.switches.asked) >= 6
        for wrong in ("", f"{tmp_path}/stranger.crt", f"{tmp_path}/absent"):
            tier = tier_of(replace(settings, ca_file=wrong))
            for error in await said(tier.open(chunk(1).name), write(tier, chunk(1))):
                assert isinstance(error, Unavailable)
                assert "tiers.s3.ca_file" in error.message
            await tier.close()


@scenario()
async def test_a_proxy_that_is_away_is_named(stand: S3Stand) -> None:
    async with forward_proxy() as proxy:
        gone = proxy.url
    tier = tier_of(replace(stand.settings, proxy=gone))
    for error in await said(tier.open(chunk(1).name), write(tier, chunk(1)), there(tier, chunk(1))):
        assert isinstance(error, Unavailable)
        assert "tiers.s3.proxy" in error.message
    assert not stand.switches.asked, "nothing goes by another way"
    await tier.close()
