"""What ``kvstore doctor`` finds: of a machine that is well, and of each thing that is not."""

from __future__ import annotations

import errno
import io
import os
import shutil
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import redis
from kvstore_client import connect
from kvstore_ops.doctor.device import look_at_device
from kvstore_ops.doctor.engines import look_at_redis, look_at_settings, look_at_tiers, redis_tells
from kvstore_ops.doctor.finding import Finding, Health, render_findings
from kvstore_ops.doctor.machine import certificate, clock, compiled_copies, kernel, memory, open_files, validity_of
from kvstore_ops.doctor.round import Round
from kvstore_ops.sidecar import TOKEN, Sidecar
from rich.console import Console

from kvstore.config import load
from kvstore.errors import DeadlineExceeded
from kvstore.v1alpha import admin_pb2
from tests.fakes.redis_server import RedisServer
from tests.fakes.tls import made_certificates
from tests.ops.command import run


def settings(**own: str) -> Any:
    environment = {f"KVSTORE__{name}": value for name, value in own.items()}
    return load(None, {"HOME": "/nonexistent", **environment}, {})


def by_subject(findings: Any) -> dict[str, Finding]:
    return {each.subject: each for each in findings}


def is_said(found: Finding, health: Health) -> bool:
    """A finding that is not good says why it matters, and what to do."""
    return found.health is health and bool(found.said and found.why and found.remedy)


@pytest.fixture
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a service with a small arena and a device tier, for the doctor, too."""
    own = {
        "KVSTORE__ARENA__CAPACITY_BYTES": "16 MiB", "KVSTORE__TIERS__NVME__CAPACITY_BYTES": "32 MiB",
        "KVSTORE__TIERS__NVME__DIRECTORY": str(tmp_path / "device"), "KVSTORE__TIERS__REDIS__LOOKUP_S_MAX": "1 s",
    }  # fmt: skip
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    return own


def test_a_service_that_is_well_has_every_byte_come_back_through_each_tier(
    surroundings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with RedisServer("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru") as server:
        monkeypatch.setenv("KVSTORE__TIERS__REDIS__URL", server.url)
        with Sidecar("--capacity", "16 MiB", nvme="32 MiB") as sidecar:
            socket = sidecar.socket_address.removeprefix("unix://")
            done = run("doctor", "--socket", socket, "--shared", "--json")
            found = {each["subject"]: each for each in done.json}
            bad = [each for each in done.json if each["health"] == "bad"]
            assert not bad
            assert done.code == 0
            for subject in ("store", "round through dram", "round through nvme", "round through redis", "sidecar"):
                assert found[subject]["health"] == "good", found[subject]
            assert {"kernel", "open files", "memory", "clock", "device room", "device writes", "redis memory"} <= set(
                found
            )
            left = run("models", "--socket", socket, "--json").json
            assert not [each for each in left if each["model_id"] == "kvstore-doctor"]
            status = run("status", "--socket", socket, "--json").json
            assert not any(each["served"]["token_count"] for each in status["models"])  # no engine was saved anything
            measured = [each for each in status["rates"] if each["sample_count"]]
            assert {each["tier"] for each in measured} == {"nvme", "redis"}
            assert all(each["least_bytes"] > 128 << 10 for each in measured)  # what was read tells more than a latency
            server.kill()
            done = run("doctor", "--socket", socket, "--json")
            assert done.code == 11
            (lost,) = [each for each in done.json if each["subject"] == "redis"]
            assert lost["health"] == "bad"
            assert "tiers.redis.url" in lost["remedy"]
    assert not list(Path(surroundings["KVSTORE__TIERS__NVME__DIRECTORY"]).glob(".doctor*"))


@pytest.mark.usefixtures("surroundings")
def test_the_doctor_leaves_nothing_in_a_server_that_the_sidecar_runs_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE__TIERS__REDIS__EMBEDDED", "true")
    monkeypatch.setenv("KVSTORE__TIERS__REDIS__EMBEDDED_BYTES", "16 MiB")
    with Sidecar("--capacity", "16 MiB", nvme="32 MiB") as sidecar:
        monkeypatch.setenv("KVSTORE__SERVER__STATE_DIRECTORY", str(sidecar.directory))
        left_behind = sidecar.directory / "redis" / "an-earlier-tenant" / "redis.sock"
        left_behind.parent.mkdir()
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(str(left_behind))
        done = run("doctor", "--socket", sidecar.socket_address.removeprefix("unix://"), "--shared", "--json")
        found = {each["subject"]: each for each in done.json}
        assert found["round through redis"]["health"] == "good", found["round through redis"]
        assert "the sidecar runs it itself" in found["redis"]["said"]
        with redis.Redis(unix_socket_path=str(sidecar.directory / "redis" / "default" / "redis.sock")) as server:
            assert not list(server.scan_iter("*:c:*"))
            run("doctor", "--socket", sidecar.socket_address.removeprefix("unix://"), "--json")
            assert not list(server.scan_iter("*:c:*"))  # nor what the service wrote there by tiers.redis.write


def test_no_sidecar_is_said_and_the_rest_is_looked_at(surroundings: dict[str, str]) -> None:
    done = run("doctor", "--socket", "/nonexistent/kvstore.sock", "--json")
    assert done.code == 11
    found = {each["subject"]: each for each in done.json}
    assert found["sidecar"]["health"] == "bad"
    assert "kvstore serve" in found["sidecar"]["remedy"]
    assert found["device writes"]["said"]
    assert run("doctor", "--socket", "/nonexistent/kvstore.sock").code == 11


def test_a_sidecar_without_a_free_session_is_not_said_to_be_down() -> None:
    one = {**os.environ, "KVSTORE__LIMITS__SESSION_COUNT_MAX": "1"}
    with Sidecar("--capacity", "8 MiB", environment=one) as full, connect(full.address) as client:
        client.connect_now()
        done = run("doctor", "--socket", full.address.removeprefix("unix://"), "--json")
    found = {each["subject"]: each for each in done.json}
    assert (done.code, found["sessions"]["health"], found["sidecar"]["health"]) == (11, "bad", "good")
    assert "limits.session_count_max" in found["sessions"]["said"]


@pytest.mark.parametrize(
    ("release", "health"),
    [("5.2.0-generic", Health.BAD), ("5.15.0-91-generic", Health.WEAK), ("6.8.0", Health.GOOD), ("odd", Health.BAD)],
)
def test_kernels(release: str, health: Health) -> None:
    assert kernel(release).health is health
    assert health is Health.GOOD or is_said(kernel(release), health)


def test_how_clients_copy() -> None:
    ways = [(True, True), (True, False), (False, False)]
    found = [compiled_copies(*way) for way in ways]
    assert [each.health for each in found] == [Health.GOOD, Health.GOOD, Health.WEAK]
    assert ["AVX2" in str(each) for each in found] == [False, True, False]


def test_what_the_settings_ask_for_and_the_machine_lacks() -> None:
    assert is_said(memory(settings(ARENA__CAPACITY_BYTES="900 TiB")), Health.BAD)
    assert memory(settings(ARENA__CAPACITY_BYTES="16 MiB")).health is Health.GOOD
    many = open_files(settings(LIMITS__SESSION_COUNT_MAX="90000000", ARENA__CAPACITY_BYTES="16 MiB"))
    assert is_said(many, Health.BAD)
    assert "limits.session_count_max" in many.said
    assert is_said(clock(0.0), Health.BAD)


def test_the_device(tmp_path: Path) -> None:
    own = {"TIERS__NVME__DIRECTORY": str(tmp_path), "ARENA__CAPACITY_BYTES": "16 MiB"}
    found = by_subject(look_at_device(settings(TIERS__NVME__CAPACITY_BYTES="900 TiB", **own).settings))
    assert is_said(found["device room"], Health.BAD)
    assert "MB/s" in found["device reads"].said
    assert not list(tmp_path.iterdir())
    none = by_subject(look_at_device(settings(TIERS__NVME__CAPACITY_BYTES="0", **own).settings))
    assert none["device"].health is Health.UNSEEN


def test_a_full_device_is_not_said_to_be_anothers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", no_room)
    own = {"TIERS__NVME__DIRECTORY": str(tmp_path), "ARENA__CAPACITY_BYTES": "16 MiB"}
    found = by_subject(look_at_device(settings(TIERS__NVME__CAPACITY_BYTES="1 MiB", **own).settings))
    assert found["device rate"].remedy == "free some of the device"
    assert not list(tmp_path.iterdir())


def test_the_sample_is_written_into_no_file_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = tmp_path / "others"
    others.write_text("theirs")
    home = tmp_path / "device"
    home.mkdir()
    monkeypatch.setattr("secrets.token_hex", lambda _: "guessed")
    own = {"TIERS__NVME__DIRECTORY": str(home), "ARENA__CAPACITY_BYTES": "16 MiB"}
    for plant in (lambda at: at.symlink_to(others), lambda at: at.hardlink_to(others)):
        plant(home / ".doctor-guessed")
        found = by_subject(look_at_device(settings(TIERS__NVME__CAPACITY_BYTES="1 MiB", **own).settings))
        assert is_said(found["device rate"], Health.BAD)
        assert others.read_text() == "theirs"
        (home / ".doctor-guessed").unlink()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")
def test_certificates_that_ended_end_soon_or_are_none(tmp_path: Path) -> None:
    made_certificates(tmp_path)  # valid for two days
    name, now_s = str(tmp_path / "server.crt"), time.time()
    begins_s, ends_s = validity_of((tmp_path / "server.crt").read_text())
    assert abs(begins_s - now_s) < 3600
    assert abs(ends_s - begins_s - 2 * 86400) < 60
    assert is_said(certificate("remote.certificate_file", name, now_s), Health.WEAK)
    assert is_said(certificate("remote.certificate_file", name, ends_s + 1), Health.BAD)
    assert is_said(certificate("remote.certificate_file", name, begins_s - 60), Health.BAD)
    for wrong in ("absent", "server.key"):
        assert is_said(certificate("remote.certificate_file", str(tmp_path / wrong), now_s), Health.BAD)
    cut = (tmp_path / "server.crt").read_text().splitlines()
    (tmp_path / "cut").write_text("\n".join([*cut[:3], cut[-1]]))
    assert is_said(certificate("remote.certificate_file", str(tmp_path / "cut"), now_s), Health.BAD)


@pytest.mark.parametrize(
    ("told", "subject"),
    [
        ({"redis_version": "5.0.7"}, "redis"),
        ({"maxmemory": 0}, "redis memory"),
        ({"maxmemory_policy": "noeviction"}, "redis memory"),
        ({"aof_enabled": 1}, "redis disk"),
    ],
)
def test_a_redis_that_is_set_up_badly(told: dict[str, Any], subject: str) -> None:
    well = {"redis_version": "7.2.4", "maxmemory": 1 << 30, "maxmemory_policy": "allkeys-lru", "aof_enabled": 0}
    assert {each.health for each in redis_tells(well, 100.0, 101.0)} == {Health.GOOD}
    assert is_said(by_subject(redis_tells({**well, **told}, 100.0, 101.0))[subject], Health.WEAK)
    assert is_said(by_subject(redis_tells(well, 100.0, 200.0))["redis clock"], Health.WEAK)


def test_a_redis_that_is_not_there() -> None:
    (found,) = look_at_redis(settings(TIERS__REDIS__URL="redis://127.0.0.1:1").settings)
    assert is_said(found, Health.BAD)


def test_tiers_that_are_not_well() -> None:
    tiers = [
        admin_pb2.TierReport(stats=admin_pb2.TierStats(name="a", state="up")),
        admin_pb2.TierReport(stats=admin_pb2.TierStats(name="b", state="failing")),
        admin_pb2.TierReport(stats=admin_pb2.TierStats(name="c", state="up"), problem="access denied"),
        admin_pb2.TierReport(stats=admin_pb2.TierStats(name="d", state="up"), stalled_seconds=60),
        admin_pb2.TierReport(stats=admin_pb2.TierStats(name="e", state="up"), is_draining=True),
        admin_pb2.TierReport(stats=admin_pb2.TierStats(name="f", state="up", quarantined_bytes=4096)),
    ]
    found = list(look_at_tiers(admin_pb2.TiersResponse(tiers=tiers, absent=["the s3 tier is off"])))
    healths = [Health.GOOD, Health.BAD, Health.BAD, Health.BAD, Health.WEAK, Health.WEAK, Health.BAD]
    assert [each.health for each in found] == healths
    assert all(is_said(each, each.health) for each in found[1:])


def test_a_tier_that_only_the_sidecar_has_is_said() -> None:
    """Else a bucket without credentials would pass for good: nobody has asked it for anything yet."""
    shared = [admin_pb2.TierReport(stats=admin_pb2.TierStats(name=name, is_shared=True)) for name in ("redis", "s3")]
    report = admin_pb2.TiersResponse(tiers=[admin_pb2.TierReport(stats=admin_pb2.TierStats(name="nvme")), *shared])
    (found,) = look_at_settings(report, settings(TIERS__REDIS__URL="redis://127.0.0.1:1").settings)
    assert is_said(found, Health.WEAK)
    assert found.subject == "settings of s3"
    assert not list(look_at_settings(report, settings(TIERS__REDIS__EMBEDDED="true", TIERS__S3__BUCKET="b").settings))


def test_a_token_without_the_right_is_said(surroundings: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with Sidecar("--capacity", "16 MiB", plane="remote") as sidecar:
        monkeypatch.setenv("KVSTORE_TOKEN", TOKEN)
        done = run("doctor", "--address", sidecar.tcp_address, "--json")
        (found,) = [each for each in done.json if each["subject"] == "round"]
        assert found["health"] == "not looked at"
        assert "admin" in found["said"]


def test_what_engines_say_is_harmless_on_the_screen() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    evil = "\x1b[2J[red]"
    console.print(render_findings([Finding("redis", Health.BAD, evil, evil, evil)]))
    assert "\x1b[2J" not in console.export_text()


@pytest.mark.parametrize("is_noted", [True, False])
def test_what_may_stay_in_a_tier_is_said_though_the_service_does_not_answer_any_more(is_noted: bool) -> None:
    def locate(*_: object) -> None:
        raise DeadlineExceeded("no answer")

    one = Round.__new__(Round)
    one._remove, one._client = lambda *_: "no credentials", cast("Any", SimpleNamespace(locate=locate))
    one._spec = one._tokens = cast("Any", None)
    found = list(one._removed("s3", b"key", is_noted=is_noted))
    assert [each.said for each in found] == ["the doctor's chunk may stay there: no credentials"] * is_noted
