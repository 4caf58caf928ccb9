"""The doctor before real engines: a bucket behind a line that denies and ignores, a Redis that is set up badly, a
cluster that lost slots, and rounds that leave nothing behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kvstore_ops.doctor.bucket import look_at_bucket, rules_tell
from kvstore_ops.doctor.engines import cluster_tells, look_at_redis, redis_tells
from kvstore_ops.doctor.finding import Finding, Health
from kvstore_ops.doctor.kernel import accelerators, huge_pages_tell, locked_memory, time_source
from kvstore_ops.sidecar import Sidecar

from kvstore.config import S3Settings
from tests.fakes.redis_server import RedisServer
from tests.fakes.s3_proxy import S3Proxy
from tests.fakes.s3_server import S3Server
from tests.ops.command import run
from tests.ops.test_doctor import by_subject, is_said, settings
from tests.server.raw import eventually
from tests.tiers.redis.test_topology import Cluster

PREFIX = "tests/doctor"
RIGHTS = {"PUT": "s3:PutObject", "GET": "s3:GetObject", "DELETE": "s3:DeleteObject"}


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture
def line(s3: S3Server) -> Iterator[S3Proxy]:
    with S3Proxy(s3.url) as line:
        yield line


def bucket_settings(url: str, s3: S3Server) -> S3Settings:
    return S3Settings(bucket=s3.bucket, endpoint_url=url, addressing="path", prefix=PREFIX, timeout_s=2.0)


def looked(found: S3Settings) -> dict[str, Finding]:
    return by_subject(look_at_bucket(found))


@pytest.mark.s3
def test_a_bucket_that_is_well_is_left_as_it_was(s3: S3Server) -> None:
    found = looked(bucket_settings(s3.url, s3))
    for subject in ("s3 PUT", "s3 GET", "s3 LIST", "s3 DELETE", "s3 conditional writes"):
        assert found[subject].health is Health.GOOD, found[subject]
    assert is_said(found["s3 bucket"], Health.WEAK)  # whose it is, is not checked
    assert "expected_owner" in found["s3 bucket"].remedy
    assert is_said(found["s3 lifecycle"], Health.WEAK)  # none ends incomplete uploads
    assert s3.keys(PREFIX) == []


@pytest.mark.s3
@pytest.mark.parametrize("method", RIGHTS)
def test_each_right_that_is_missing_is_named(s3: S3Server, line: S3Proxy, method: str) -> None:
    line.denied = {method}
    found = looked(bucket_settings(line.url, s3))
    assert is_said(found[f"s3 {method}"], Health.BAD), found
    assert RIGHTS[method] in found[f"s3 {method}"].remedy
    others = [each for name, each in found.items() if name[3:] in RIGHTS and name != f"s3 {method}"]
    assert all(each.health is Health.GOOD for each in others), others
    s3.drop(PREFIX)


@pytest.mark.s3
def test_the_right_to_write_is_tried_with_the_key_of_the_settings(s3: S3Server, line: S3Proxy) -> None:
    """The service's writes have it: a key without rights refuses them all, and a bucket may refuse what has none."""
    sealed = replace(bucket_settings(line.url, s3), sse_kms_key_id="a-key")
    assert looked(sealed)["s3 PUT"].health is Health.GOOD
    puts = [headers for method, _, headers in line.asked if method == "PUT"]
    assert len(puts) == 2
    assert all(each["x-amz-server-side-encryption-aws-kms-key-id"] == "a-key" for each in puts)
    line.denied = frozenset({"PUT"})
    assert "tiers.s3.sse_kms_key_id" in looked(sealed)["s3 PUT"].remedy


@pytest.mark.s3
def test_an_endpoint_that_ignores_conditions_and_a_bucket_of_another_account_are_said(
    s3: S3Server, line: S3Proxy
) -> None:
    line.ignores_conditions = True
    line.owner = "111122223333"
    own = bucket_settings(line.url, s3)
    found = looked(replace(own, expected_owner=line.owner))
    assert is_said(found["s3 conditional writes"], Health.WEAK)
    assert found["s3 bucket"].health is Health.GOOD
    assert is_said(looked(replace(own, expected_owner="999999999999"))["s3 bucket"], Health.BAD)
    absent = looked(replace(own, bucket="kvstore-that-is-not-there"))
    assert is_said(absent["s3 bucket"], Health.BAD)
    assert absent["s3 rights"].health is Health.UNSEEN, "no right is missing, and no object was left"
    assert "s3 DELETE" not in absent
    assert s3.keys(PREFIX) == []


@pytest.mark.s3
def test_a_bucket_that_nobody_serves_is_one_finding() -> None:
    found = S3Settings(bucket="nowhere", endpoint_url="http://127.0.0.1:1", timeout_s=0.5)
    findings = list(look_at_bucket(found))
    assert [is_said(each, Health.BAD) for each in findings] == [True], findings
    (off,) = look_at_bucket(S3Settings())
    assert off.health is Health.UNSEEN


@pytest.mark.s3
def test_a_lifecycle_rule_that_takes_chunks_is_named(s3: S3Server) -> None:
    def put(*rules: Any) -> Finding:
        s3.client.put_bucket_lifecycle_configuration(
            Bucket=s3.bucket, LifecycleConfiguration={"Rules": list(rules)}
        )  # fmt: skip
        return looked(bucket_settings(s3.url, s3))["s3 lifecycle"]

    ends = {"ID": "ends", "Status": "Enabled", "Filter": {"Prefix": ""},
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1}}  # fmt: skip
    takes = {"ID": "takes", "Status": "Enabled", "Filter": {"Prefix": "tests/"}, "Expiration": {"Days": 30}}
    try:
        found = put(ends, takes)
        assert is_said(found, Health.BAD)
        assert "takes" in found.said
        assert put(ends, {**takes, "Filter": {"Prefix": "logs/"}}).health is Health.GOOD
        assert put(ends, {**takes, "Status": "Disabled"}).health is Health.GOOD
    finally:
        s3.client.delete_bucket_lifecycle(Bucket=s3.bucket)


def test_rules_by_prefix() -> None:
    def health(**rule: Any) -> Health:
        return rules_tell([{"Status": "Enabled", **rule}], "kvstore").health

    days = {"Days": 1}
    assert health(Expiration=days) is Health.BAD  # of all
    assert health(Prefix="kvstore/v1/ab", Expiration=days) is Health.BAD
    assert health(Filter={"And": {"Prefix": "kv", "Tags": []}}, Transitions=[days]) is Health.BAD
    assert health(Prefix="kvstore-other/", Expiration=days) is Health.WEAK
    assert health(Expiration={"ExpiredObjectDeleteMarker": True}) is Health.WEAK


def test_a_redis_whose_buffers_forks_and_saves_hurt() -> None:
    with RedisServer("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru") as redis:
        own = settings(TIERS__REDIS__URL=redis.url).settings
        assert by_subject(look_at_redis(own))["redis buffers"].health is Health.GOOD
        with redis.client() as engine:
            engine.config_set("client-output-buffer-limit", "normal 1mb 0 0")
        found = by_subject(look_at_redis(own))["redis buffers"]
        assert is_said(found, Health.BAD)
        assert "normal 0 0 0" in found.remedy
        with redis.client() as engine:
            engine.execute_command("ACL", "SETUSER", "default", "-config")
        assert by_subject(look_at_redis(own))["redis buffers"].health is Health.UNSEEN
    told = {"redis_version": "7.2.4", "maxmemory": 1 << 30, "maxmemory_policy": "allkeys-lru"}
    assert is_said(by_subject(redis_tells({**told, "latest_fork_usec": 400_000}, 1.0, 1.0))["redis forks"], Health.WEAK)
    assert "redis forks" not in by_subject(redis_tells({**told, "latest_fork_usec": 300}, 1.0, 1.0))


def test_a_cluster_and_one_that_lost_slots() -> None:
    with ExitStack() as stack:
        cluster = Cluster(stack, None)
        own = settings(TIERS__REDIS__URL=cluster.url).settings
        found = by_subject(look_at_redis(own))
        assert found["redis cluster"].health is Health.GOOD, found
        assert is_said(found["redis memory"], Health.WEAK)
        cluster.servers[0].client().execute_command("CLUSTER", "DELSLOTS", 0)
        eventually(lambda: by_subject(look_at_redis(own)).get("redis cluster", found["redis"]).health is Health.BAD)
    assert is_said(cluster_tells({"cluster_state": "fail", "cluster_slots_fail": "5461"}), Health.BAD)


def test_the_kernels_services(tmp_path: Path) -> None:
    assert is_said(huge_pages_tell(0), Health.WEAK)
    assert huge_pages_tell(2048).health is Health.GOOD
    assert is_said(locked_memory(1 << 30, 8 << 20), Health.WEAK)
    assert locked_memory(1 << 20, 8 << 20).health is Health.GOOD
    assert locked_memory(1 << 40, -1).health is Health.GOOD
    assert is_said(time_source(False), Health.WEAK)
    assert (time_source(True).health, time_source(None).health) == (Health.GOOD, Health.UNSEEN)
    gpu, gds = accelerators(tmp_path)
    assert (gpu.health, gds.health) == (Health.UNSEEN, Health.UNSEEN)
    for name in ("dev/nvidia0", "proc/driver/nvidia/version", "proc/driver/nvidia-fs/stats"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("NVRM version: 550.1\n")
    gpu, gds = accelerators(tmp_path)
    assert (gpu.health, "550.1" in gpu.said, "loaded" in gds.said) == (Health.GOOD, True, True)


@pytest.mark.s3
def test_rounds_go_through_the_bucket_and_redis_and_leave_nothing(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RedisServer("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru") as redis:
        own = {
            "ARENA__CAPACITY_BYTES": "16 MiB", "TIERS__NVME__DIRECTORY": str(tmp_path / "device"),
            "TIERS__NVME__CAPACITY_BYTES": "32 MiB", "TIERS__REDIS__URL": redis.url, "TIERS__REDIS__WRITE": "never",
            "TIERS__REDIS__LOOKUP_S_MAX": "10 s", "TIERS__S3__BUCKET": s3.bucket, "TIERS__S3__ENDPOINT_URL": s3.url,
            "TIERS__S3__ADDRESSING": "path", "TIERS__S3__PREFIX": PREFIX, "TIERS__S3__LOOKUP_S_MAX": "10 s",
            "TIERS__S3__WRITE": "never", "POLICY__SCRUB_BYTES_PER_S": "0", "POLICY__CANARY_INTERVAL_S": "0",
        }  # fmt: skip
        for name, value in own.items():
            monkeypatch.setenv(f"KVSTORE__{name}", value)
        with Sidecar("--capacity", "16 MiB", nvme="32 MiB") as sidecar:
            socket = sidecar.socket_address.removeprefix("unix://")
            done = run("doctor", "--socket", socket, "--shared", "--json")
            found = {each["subject"]: each for each in done.json}
            assert done.code == 0, [each for each in done.json if each["health"] == "bad"]
            for name in ("dram", "nvme", "redis", "s3"):
                assert found[f"round through {name}"]["health"] == "good", found
            assert run("ls", "--socket", socket, "--json").json["chunks"] == []
        assert s3.keys(PREFIX) == []
        with redis.client() as engine:
            assert not list(engine.scan_iter(match=b"*:c:*"))


@pytest.mark.s3
@pytest.mark.parametrize("is_there", [True, False])
def test_a_chunk_that_never_went_to_a_tier_is_not_said_to_stay_there(
    s3: S3Server, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command has none of the service's settings, so it can remove nothing."""
    own = {"BUCKET": s3.bucket if is_there else "no-such-bucket", "ENDPOINT_URL": s3.url, "ADDRESSING": "path",
           "PREFIX": PREFIX, "LOOKUP_S_MAX": "10 s", "WRITE": "demote" if is_there else "back"}  # fmt: skip
    environment = {**os.environ, **{f"KVSTORE__TIERS__S3__{name}": value for name, value in own.items()}}
    monkeypatch.setenv("KVSTORE__ARENA__CAPACITY_BYTES", "16 MiB")
    with Sidecar("--capacity", "16 MiB", nvme="32 MiB", environment=environment) as sidecar:
        done = run("doctor", "--socket", sidecar.socket_address.removeprefix("unix://"), "--json")
        (found,) = [each for each in done.json if each["subject"] == "round through s3"]
        assert "--shared" in found["said"]
        assert run("ls", "--socket", sidecar.socket_address.removeprefix("unix://"), "--json").json["chunks"] == []
    assert s3.keys(PREFIX) == []


@pytest.mark.redis
def test_a_chunk_that_went_to_a_tier_and_cannot_be_removed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE__ARENA__CAPACITY_BYTES", "16 MiB")
    with RedisServer("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru") as redis:
        own = {"KVSTORE__TIERS__REDIS__URL": redis.url, "KVSTORE__TIERS__REDIS__LOOKUP_S_MAX": "1 s"}
        with Sidecar("--capacity", "16 MiB", nvme="32 MiB", environment={**os.environ, **own}) as sidecar:
            done = run("doctor", "--socket", sidecar.socket_address.removeprefix("unix://"), "--shared", "--json")
        with redis.client() as engine:
            left = list(engine.scan_iter(match=b"*:c:*"))
    found = [each for each in done.json if each["subject"] == "round through redis" and each["health"] == "weak"]
    assert (len(found), len(left)) == (1, 1)
    assert left[0].decode().partition("{")[2].rstrip("}") in found[0]["remedy"]
