"""Moves to a bucket, moves to shared tiers that do not answer, and the drain of the whole service."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from kvstore_client import Client, connect
from kvstore_ops.operators.draining import drain_service
from kvstore_ops.sidecar import Sidecar

from kvstore.spec import Durability, Tier
from kvstore.v1alpha import admin_pb2
from tests.e2e.stored import STEP, Stored, both, chunks_of
from tests.fakes.redis_server import RedisServer
from tests.fakes.s3_server import S3Server
from tests.ops.command import Done, run
from tests.security.tenancy import client_of, tenants_sidecar
from tests.server.raw import eventually
from tests.specs import random_cache, small_spec, tokens_of

pytestmark = pytest.mark.s3
PREFIX = "tests/drains"


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


def settings(s3: S3Server, redis: RedisServer) -> dict[str, str]:
    own = {
        "TIERS__REDIS__URL": redis.url, "TIERS__REDIS__WRITE": "never", "TIERS__REDIS__LOOKUP_S_MAX": "1 s",
        "TIERS__S3__BUCKET": s3.bucket, "TIERS__S3__ENDPOINT_URL": s3.url, "TIERS__S3__ADDRESSING": "path",
        "TIERS__S3__WRITE": "never", "TIERS__S3__CHUNK_BYTES_MIN": "0", "TIERS__S3__LOOKUP_S_MAX": "1 s",
        "TIERS__S3__PREFIX": PREFIX, "POLICY__SCRUB_BYTES_PER_S": "0", "POLICY__CANARY_INTERVAL_S": "0",
    }  # fmt: skip
    return {**os.environ, **{f"KVSTORE__{name}": value for name, value in own.items()}}


@pytest.fixture(scope="module")
def sidecar(s3: S3Server, redis: RedisServer) -> Iterator[Sidecar]:
    with Sidecar("--capacity", "16 MiB", nvme="64 MiB", environment=settings(s3, redis)) as running:
        yield running


@pytest.fixture
def client(sidecar: Sidecar) -> Iterator[Client]:
    with connect(sidecar.address) as client:
        yield client


@pytest.fixture
def say(sidecar: Sidecar) -> Any:
    def said(*arguments: str) -> Done:
        return run(*arguments, "--socket", sidecar.address.removeprefix("unix://"))

    return said


def test_a_model_moves_to_the_bucket_and_comes_back_on_use(s3: S3Server, client: Client, say: Any) -> None:
    stored, other = Stored(client, 3, tail=4), Stored(client, 1)
    words, done = both(say, stored, "move", "--model", stored.name, "--to", "s3", "--yes")
    assert words == {"written": 3, "given up by faster tiers": 3, "not taken there": 1}  # S3 keeps what it took
    assert done.code == 0
    assert len(s3.keys(PREFIX)) == 3
    assert [each["token_count"] for each in chunks_of(say, stored.name).values()] == [4]
    assert [each.tier for each in client.lookup(stored.spec, stored.tokens).chunks[:3]] == [Tier.S3] * 3
    assert stored.hit_count == len(stored.tokens)
    assert other.hit_count == STEP


@pytest.mark.parametrize("name", ["s3", "redis"])
@pytest.mark.parametrize("how", ["gone", "stalled"])
def test_a_move_to_a_tier_that_does_not_answer_is_one_line_and_changes_nothing(
    s3: S3Server, redis: RedisServer, client: Client, say: Any, name: str, how: str
) -> None:
    stored = Stored(client, 3)
    before = chunks_of(say, stored.name)
    stop, again = {
        ("s3", "gone"): (s3.stop, s3.start), ("s3", "stalled"): (s3.stand_still, s3.go_on),
        ("redis", "gone"): (redis.kill, redis.start), ("redis", "stalled"): (redis.stop, redis.go_on),
    }[name, how]  # fmt: skip
    stop()
    try:
        for words in (("--yes",), ("--dry-run",)):
            began_s = time.monotonic()
            done = say("move", "--model", stored.name, "--to", name, *words)
            assert time.monotonic() - began_s < 20, "it was waited for"
            assert done.code == 4, done
            assert done.err.strip().count("\n") == 0, done.err
            assert all(each in done.err for each in (name, "nothing was changed", "kvstore tiers"))
    finally:
        again()
    assert chunks_of(say, stored.name) == before
    assert stored.hit_count == 3 * STEP
    eventually(lambda: say("move", "--model", stored.name, "--to", name, "--yes").code == 0, 30.0)
    assert stored.hit_count == 3 * STEP


def test_a_chunk_that_is_damaged_where_it_leaves_is_not_blamed_on_the_tier_that_lacks_it(
    sidecar: Sidecar, client: Client, say: Any
) -> None:
    stored = Stored(client, 2)
    assert say("evict", "--model", stored.name, "--tier", "memory", "--yes").code == 0
    body = random_cache(stored.spec, len(stored.tokens), stored.number)[0][0][:, STEP:].tobytes()[:64]
    for path in sidecar.directory.rglob("region-*.kvs"):
        at = path.read_bytes().find(body)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes([body[0] ^ 1]))
    done = say("move", "--model", stored.name, "--to", "s3", "--yes", "--json")
    assert done.code == 10
    assert done.json["outcomes"]["failed"]["chunk_count"] == 1
    assert "failed its check" in done.json["problem"], done.json["problem"]
    assert stored.hit_count == STEP
    assert Stored(client, 2).hit_count == 2 * STEP  # one of these has the row of the chunk that is lost
    done = say("drain")
    assert done.code == 0, done  # and is not taken for one that S3 refused


def test_one_tier_is_flushed_and_the_others_keep_theirs(client: Client, say: Any) -> None:
    stored = Stored(client, 2)
    assert say("evict", "--all", "--tier", "nvme").code == 9
    dry = say("evict", "--all", "--tier", "nvme", "--dry-run", "--json").json["outcomes"]
    done = say("evict", "--all", "--tier", "nvme", "--yes", "--json")
    assert done.json["outcomes"] == dry
    assert say("ls", "--tier", "nvme", "--json").json["chunks"] == []
    assert stored.hit_count == 2 * STEP  # memory has them
    refused = say("evict", "--all", "--tier", "s3", "--yes")
    assert (refused.code, "kvstore scan --delete" in refused.err) == (2, True)


def test_a_drained_service_takes_no_stores_and_a_stop_loses_nothing(sidecar: Sidecar, client: Client, say: Any) -> None:
    stored, late = Stored(client, 2), Stored(client, 1)
    assert say("evict", "--model", stored.name, "--tier", "nvme", "--yes").code == 0
    late.tokens = tokens_of(STEP, 999)
    eventually(lambda: client.stats().backlog_chunk_count == 0)  # of earlier tests: else some are written meanwhile

    def store() -> Durability:
        return client.store(late.spec, late.tokens, random_cache(late.spec, STEP, late.number)).wait(10)

    assert say("drain", "--service").code == 9
    assert say("drain", "--service", "--tier", "nvme", "--yes").code == 2
    dry = say("drain", "--service", "--dry-run", "--json").json
    assert store() is Durability.LOCAL
    assert say("evict", "--model", late.name, "--yes").code == 0
    done = say("drain", "--service", "--yes", "--json")
    assert (done.code, done.json["outcomes"]) == (0, dry["outcomes"])
    assert list(dry["outcomes"]) == ["written"]  # what was flushed from the device, and is in memory alone
    assert "can be stopped" in done.err
    assert store() is Durability.NONE
    assert client.stats().counters["store_refused_chunks"]
    assert "drains the service" in say("top", "--count", "1").out
    assert any("drains the service" in each for each in say("tiers", "--json").json["absent"])
    assert stored.hit_count == 2 * STEP  # it serves on
    assert both(say, stored, "drain", "--service", "--end")[1].code == 0
    assert store() is Durability.LOCAL
    assert say("drain", "--service", "--yes").code == 0
    sidecar.stop()
    sidecar.start()
    with connect(sidecar.address) as again:
        stored.client = again
        assert stored.hit_count == 2 * STEP
        stored.tokens = tokens_of(STEP, 998)
        stored.store()  # a start ends the drain


@pytest.mark.parametrize("has_embedded", [False, True])
def test_what_a_stop_would_lose_is_counted(has_embedded: bool) -> None:
    """A Redis that the service runs itself ends with it, and gives nothing back."""
    environment = {**os.environ, "KVSTORE__TIERS__REDIS__EMBEDDED": str(has_embedded).lower()}
    with Sidecar("--capacity", "8 MiB", nvme="0", environment=environment) as own, connect(own.address) as client:
        model = small_spec(model_id="alone")
        assert client.store(model, tokens_of(2 * STEP), random_cache(model, 2 * STEP)).wait(10) is Durability.MEMORY
        socket = own.address.removeprefix("unix://")
        dry = run("drain", "--service", "--dry-run", "--json", "--socket", socket).json["outcomes"]
        done = run("drain", "--service", "--yes", "--json", "--socket", socket)
        assert done.code == 10
        assert done.json["outcomes"]["in memory alone"] == dry["in memory alone"]
        assert dry["in memory alone"]["chunk_count"] == 2
        assert has_embedded or done.json["outcomes"] == dry  # else some may wait for it in one of the two
        assert "can be stopped" not in done.err


def test_a_drained_service_keeps_the_value_that_it_does_not_replace(client: Client, say: Any) -> None:
    old, new = b"old" * 1000, b"new" * 1000

    def found() -> bytes:
        value = client.get_bytes("drained", "key")
        return b"" if value is None else bytes(value)

    assert client.put_bytes("drained", "key", old).wait(10) is Durability.LOCAL
    assert say("drain", "--service", "--yes").code == 0
    assert client.put_bytes("drained", "key", new).wait(10) is Durability.NONE
    assert found() == old
    assert say("drain", "--service", "--end").code == 0
    assert found() == old
    assert client.put_bytes("drained", "key", new).wait(10) is Durability.LOCAL
    assert found() == new


def test_all_tenants_are_drained_or_the_one_that_is_named() -> None:
    model = small_spec(model_id="drained")
    with tenants_sidecar("--capacity", "16 MiB", nvme="64 MiB") as own, client_of(own, "a") as other:
        socket = own.socket_address.removeprefix("unix://")

        def store(seed: int) -> Durability:
            return other.store(model, tokens_of(STEP, seed), random_cache(model, STEP, seed)).wait(10)

        assert store(1) is Durability.LOCAL
        done = run("drain", "--service", "--tenant", "default", "--yes", "--socket", socket)
        assert (done.code, "as far as this tenant goes" in done.err) == (0, True)
        assert store(2) is Durability.LOCAL
        done = run("drain", "--service", "--yes", "--socket", socket)
        assert (done.code, "tenant a:" in done.err, "can be stopped" in done.err) == (0, True, True)
        assert store(3) is Durability.NONE
        told = run("drain", "--service", "--end", "--json", "--socket", socket)
        documents = json.loads("[" + told.out.replace("}\n{", "},{") + "]")
        assert (told.code, [each["tenant"] for each in documents]) == (0, ["default", "a", "b"])
        assert store(4) is Durability.LOCAL


def test_the_socket_of_one_tenant_drains_no_other_and_says_so() -> None:
    with tenants_sidecar("--capacity", "16 MiB", nvme="64 MiB") as own:
        door = own.directory / "run" / "a" / "kvstore.sock"
        done = run("drain", "--service", "--yes", "--json", "--socket", str(door))
        assert (done.code, "as far as this tenant goes" in done.err) == (0, True), done
        assert done.json["tenant"] == "a"


def test_tenants_that_cannot_be_seen_are_not_called_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tenants have users of their own, only the server's may read the directory of all sockets."""
    with tenants_sidecar("--capacity", "16 MiB", nvme="64 MiB") as own:
        socket = own.socket_address.removeprefix("unix://")
        monkeypatch.setattr("os.access", lambda _path, _mode: False)
        done = run("drain", "--service", "--yes", "--socket", socket)
        assert (done.code, "can be stopped" in done.err) == (10, False), done
        assert "other tenants may be there" in done.err
        told = run("status", "--json", "--socket", socket)
        assert (told.json["tenants"], "other tenants may be there" in told.err) == ({}, True)
        found = run("tiers", "--tenant", "nobody", "--socket", socket)
        assert (found.code, "this user may not read which" in found.err) == (2, True), found


def test_a_tenant_that_cannot_be_asked_keeps_no_other_from_its_drain_and_is_not_called_drained() -> None:
    """Its directory may be closed to this user; here nobody listens in it."""
    with tenants_sidecar("--capacity", "16 MiB", nvme="64 MiB") as own:
        (own.directory / "run" / "Z").mkdir()
        (own.directory / "run" / "Z" / "kvstore.sock").touch()
        (own.directory / "run" / "0").mkdir()
        (own.directory / "run" / "0" / "kvstore.sock").touch()
        socket = own.socket_address.removeprefix("unix://")
        done = run("drain", "--service", "--yes", "--socket", socket)
        assert (done.code, "can be stopped" in done.err) == (10, False), done
        assert done.err.count("no sidecar answers") == 2
        model = small_spec(model_id="drained")
        for name in ("a", "b"):
            with client_of(own, name) as other:
                assert other.store(model, tokens_of(STEP), random_cache(model, STEP)).wait(10) is Durability.NONE


@pytest.mark.parametrize("refuses", [True, False])
def test_a_service_that_goes_on_taking_stores_is_not_called_drained(
    refuses: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """An older release knows no such drain and says that all went well; or another operator ended it meanwhile."""
    request = admin_pb2.ChangeRequest(drain=admin_pb2.Drain(service=True))
    answer = admin_pb2.ChangeResponse(is_last=True, refuses_stores=refuses)
    client = SimpleNamespace(connect_now=lambda: None, stats=lambda: admin_pb2.StatsResponse(tenant="a"))
    door: Any = SimpleNamespace(socket=None, open=lambda: nullcontext(client))
    with nullcontext() if refuses else pytest.raises(typer.Exit) as ended:
        drain_service(door, request, lambda *_, **__: answer, is_whole=True)
    assert ("can be stopped" in capsys.readouterr().err) is refuses
    assert refuses or ended.value.exit_code == 10
