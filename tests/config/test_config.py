"""Settings: four sources in order, and mistakes that name where they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.config import load
from kvstore.errors import InvalidRequest
from kvstore.units import format_bytes, parse_bytes, parse_duration


def test_flags_beat_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text('[arena]\ncapacity_bytes = "1 GiB"\nprefault = false\n[server]\nlog_level = "debug"\n')
    environment = {"KVSTORE__ARENA__CAPACITY_BYTES": "2 GiB", "KVSTORE__SERVER__METRICS_PORT": "1234", "HOME": "/h"}
    loaded = load(file, environment, {"arena.capacity_bytes": "3 GiB", "server.metrics_port": None})
    settings = loaded.settings
    assert settings.arena.capacity_bytes == 3 << 30
    assert settings.arena.prefault is False
    assert settings.server.metrics_port == 1234
    assert settings.server.log_level == "debug"
    assert settings.server.state_directory == Path("/h/.local/state/kvstore")
    assert settings.limits.leased_bytes_max == 3 << 30
    assert loaded.origins["arena.capacity_bytes"] == "--capacity"
    assert loaded.origins["server.metrics_port"] == "KVSTORE__SERVER__METRICS_PORT"
    assert loaded.origins["server.log_level"] == str(file)
    assert loaded.is_default("limits.session_count_max")
    assert len(loaded.rows()) == len(loaded.origins)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[arena]\ncapacity = 1\n", ["capacity_bytes", "did you mean"]),
        ("[arenas]\n", ["arena", "did you mean"]),
        ("capacity = 1\n", ["capacity is no setting", "below their section"]),
        ("arena = 1\n", ["[arena]"]),
        ("[server]\nmetrics_port = 1.5\n", ["server.metrics_port", "1.5 is not a whole number"]),
        ("[tenants.default]\nuid = 'bob'\n", ["tenants.default.uid", "'bob' is not a whole number"]),
        ("[tier.nvme]\nencoding = 'raw'\n", ["[tier]", "did you mean 'tiers'?"]),
        ("[server]\nnode = 1\n", ["server.node", "in quotes"]),
        ("[server]\nlog_level = 'loud'\n", ["server.log_level", "use one of debug, info"]),
        ("[tiers.s3]\nbucket = 'my bucket'\n", ["tiers.s3.bucket", "no blanks"]),
        ('[arena]\nprefault = "maybe"\n', ["arena.prefault"]),
        ("[arena]\nregion_bytes = 5000\n", ["arena.region_bytes", "4096"]),
        ("[controller]\ndeadline_s = 0\n", ["controller.deadline_s"]),
        ("[policy]\neviction = 'fifo'\n", ["policy.eviction", "lru"]),
        ("[tiers.redos]\n", ["tiers.redos", "did you mean 'tiers."]),
        ("[[[", ["TOML"]),
        (
            "[server]\nstate_directory = '/mnt/fast'\n[tiers.nvme]\ndirectory = '/mnt/x/../fast'\n",
            ["tiers.nvme.directory", "it is server.state_directory, too", "/nvme"],
        ),
        ("[arena]\ncapacity_bytes = " + "9" * 5000, ["TOML"]),
        ("[arena]\ncapacity_bytes = " + "[" * 5000, ["TOML"]),
        (
            "[policy]\ncanary_interval_s = inf\n",
            ["policy.canary_interval_s", "inf is too large", "36500 d"],
        ),
        ("[controller]\ndeadline_s = nan\n", ["controller.deadline_s", "no number"]),
        ("[tiers.redis]\nttl_s = 1e300\n", ["tiers.redis.ttl_s", "too large"]),
        ("[tiers.s3]\nrange_bytes = 4611686018427387904\n", ["tiers.s3.range_bytes", "too large"]),
        ("[limits]\ntoken_count_max = 4611686018427387904\n", ["limits.token_count_max", "too large"]),
        ("[limits]\nconnection_idle_s_max = '25 d'\n", ["limits.connection_idle_s_max", "24 d"]),
        ("[limits]\nmessage_bytes_max = '2 GiB'\n", ["limits.message_bytes_max", "1 GiB"]),
        ("[remote]\nconnection_count_max = 3_000_000_000\n", ["remote.connection_count_max", "2147483647"]),
        ("[limits]\ncall_count_max = 3_000_000_000\n", ["limits.call_count_max", "536870911"]),
        ("[events]\nbuffer_count = 3_000_000_000\n", ["events.buffer_count", "2147483647"]),
        ("[events]\nendpoint = 'tcp://127.0.0.1:65536'\n", ["events.endpoint", "tcp://127.0.0.1:PORT"]),
        ("[events]\nendpoint = 'tcp://127.0.0.1:'\n", ["events.endpoint", "tcp://127.0.0.1:PORT"]),
        ("[tracing]\nendpoint = 'http://127.0.0.1:65536'\n", ["tracing.endpoint", "http://HOST:PORT"]),
        (
            "[events]\nendpoint = 'ipc:///e'\nreplay_endpoint = 'ipc:///e'\n",
            ["events.replay_endpoint", "it is events.endpoint, too"],
        ),
        ("[server]\nmetrics_host = ''\n", ["server.metrics_host", "every address", "127.0.0.1"]),
        ("[server]\nstate_directory = ''\n", ["server.state_directory", "'' is not a path"]),
        ("[server]\nstate_directory = true\n", ["server.state_directory", "True is not a path"]),
        ('[tiers.nvme]\ndirectory = "a\\u0000b"\n', ["tiers.nvme.directory", "is not a path"]),
        ("[server]\nsocket_directory = '/a%20b'\n", ["server.socket_directory", "no %, ? or #"]),
        ("[server]\nsocket_directory = '/a#b'\n", ["server.socket_directory", "no %, ? or #"]),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text(text)
    with pytest.raises(InvalidRequest) as caught:
        load(file)
    for word in [str(file), *words]:
        assert word in caught.value.message


def test_units() -> None:
    assert [parse_bytes(text) for text in ("64 GiB", "1.5kB", "7", 9)] == [64 << 30, 1500, 7, 9]
    assert [parse_duration(text) for text in ("30 s", "250ms", "2 min", 4)] == [30.0, 0.25, 120.0, 4.0]
    assert [format_bytes(count) for count in (5, 1536, 64 << 30)] == ["5 B", "1.5 KiB", "64 GiB"]
    for bad in ("", "GiB", "-1", "1 parsec", "1 1", "9" * 400, "1e3", None, True):
        with pytest.raises(InvalidRequest):
            parse_bytes(bad)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest):
            parse_duration(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("ARENA__CAPACITY", "1", ["arena.capacity", "did you mean 'capacity_bytes'"]),
        ("ARENAS__CAPACITY_BYTES", "1", ["[arenas]", "did you mean 'arena'"]),
        ("", "1", ["is no setting", "SECTION__NAME"]),
        ("ARENA__CAPACITY_BYTES", "1 parsec", ["arena.capacity_bytes", "64 GiB"]),
        ("ARENA__CAPACITY_BYTES", "8191", ["arena.capacity_bytes", "8 KiB"]),
        ("ARENA__PREFAULT", "maybe", ["arena.prefault", "true or false"]),
        ("SERVER__METRICS_PORT", "65536", ["server.metrics_port", "0..65535"]),
        ("SERVER__METRICS_PORT", "-1", ["server.metrics_port", "0..65535"]),
        ("SERVER__LOG_LEVEL", "loud", ["server.log_level", "info"]),
        ("SERVER__STATE_DIRECTORY", "~no_such_user_here/x", ["server.state_directory", "a path"]),
        ("SERVER__SOCKET_DIRECTORY", "/" + "x" * 99, ["server.socket_directory", "99"]),
        ("SERVER__SOCKET_DIRECTORY", "/" + "ü" * 45, ["server.socket_directory", "99 bytes"]),
        ("SERVER__STATE_DIRECTORY", "", ["server.state_directory", "a path"]),
        ("LIMITS__LEASE_COUNT_MAX", "-1", ["limits.lease_count_max", "0 or more"]),
        ("LIMITS__SESSION_COUNT_MAX", "0", ["limits.session_count_max", "1 or more"]),
        ("LIMITS__MODEL_COUNT_MAX", "0", ["limits.model_count_max", "1 or more"]),
        ("LIMITS__MESSAGE_BYTES_MAX", "4095", ["limits.message_bytes_max", "4 KiB"]),
    ],
)
def test_a_mistake_in_the_environment_is_named(name: str, text: str, words: list[str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        load(None, {f"KVSTORE__{name}": text, "HOME": "/h"})
    for word in [f"KVSTORE__{name}", *words]:
        assert word in caught.value.message


@pytest.mark.parametrize("wrong", ["KVSTORE_{}_{}", "KVSTORE_{}__{}", "KVSTORE__{}_{}"])
@pytest.mark.parametrize("parts", [("ARENA", "CAPACITY_BYTES"), ("TIERS__NVME", "DIRECTORY")])
def test_a_variable_that_lacks_underscores_is_not_passed_over(wrong: str, parts: tuple[str, str]) -> None:
    right = "KVSTORE__{}__{}".format(*parts)
    with pytest.raises(InvalidRequest, match=f"is no setting: .* two underscores between them: {right}$"):
        load(None, {wrong.format(*parts): "1", "HOME": "/h"})
    load(None, {"KVSTORE_SOCKET": "/run/kvstore.sock", "KVSTORE_PORT_9500_TCP": "tcp://10.0.0.1:9500", "HOME": "/h"})


def test_a_mistake_in_a_flag_is_named() -> None:
    for flag, value in (("server.metrics_port", "70000"), ("server.metrics_port", True)):
        with pytest.raises(InvalidRequest, match="--metrics-port"):
            load(None, {"HOME": "/h"}, {flag: value})
    for flag, name in (("arena.capacity_bytes", "--capacity"), ("tiers.nvme.capacity_bytes", "--nvme")):
        with pytest.raises(InvalidRequest, match=f"^{name}: {flag}: 'much' is not a size"):
            load(None, {"HOME": "/h"}, {flag: "much"})
    with pytest.raises(InvalidRequest, match="did you mean 'metrics_port'"):
        load(None, {"HOME": "/h"}, {"server.metric_port": 1})


def test_a_device_directory_that_may_not_be_looked_at_stops_no_settings(tmp_path: Path) -> None:
    """The tier itself reports the problem with its directory."""
    there = tmp_path / ("x" * 300) / "nvme"
    assert load(None, {"HOME": "/h"}, {"tiers.nvme.directory": there}).settings.tiers.nvme.directory == there


def test_limits_of_ranges_are_inside_them() -> None:
    environment = {"HOME": "/h", "KVSTORE__ARENA__CAPACITY_BYTES": "8 KiB", "KVSTORE__SERVER__METRICS_PORT": "65535"}
    settings = load(None, environment).settings
    assert (settings.arena.capacity_bytes, settings.server.metrics_port) == (8192, 65535)


def test_derived_defaults_follow_what_they_derive_from() -> None:
    loaded = load(None, {"HOME": "/h", "XDG_STATE_HOME": "/s", "KVSTORE__ARENA__CAPACITY_BYTES": "1 GiB"})
    assert loaded.settings.server.state_directory == Path("/s/kvstore")
    assert loaded.settings.server.socket_directory == Path("/s/kvstore/run")
    assert loaded.settings.limits.pin_bytes_max == 1 << 29
    assert loaded.is_default("limits.pin_bytes_max")
    assert not loaded.is_default("arena.capacity_bytes")
    runtime = load(None, {"HOME": "/h", "XDG_RUNTIME_DIR": "/r"}).settings
    assert runtime.server.socket_directory == Path("/r/kvstore")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"absent\.toml: cannot be read"):
        load(tmp_path / "absent.toml")


def test_a_password_in_another_url_is_not_shown() -> None:
    for name in ("TRACING__ENDPOINT", "EVENTS__ENDPOINT"):
        with pytest.raises(InvalidRequest, match=r"tcp://\*\*\*@host:1: use") as caught:
            load(None, {"HOME": "/h", f"KVSTORE__{name}": "tcp://me:secret-word@host:1"})
        assert "secret-word" not in caught.value.message
    with pytest.raises(InvalidRequest, match=r"server\.socket_directory = /a:b@c/#/kvstore\.sock"):  # no URL
        load(None, {"HOME": "/h", "KVSTORE__SERVER__SOCKET_DIRECTORY": "/a:b@c/#"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bucket", "a/b"),
        ("prefix", "/kvstore"),
        ("prefix", "a//b"),
        ("endpoint_url", "localhost:9000"),
        ("proxy", "http://user:secret-word@proxy"),
        ("addressing", "host"),
        ("write", "through"),
        ("reader_count", "0"),
        ("range_bytes", "1"),
        ("day_bytes_max", "-1"),
    ],
)
def test_a_mistake_about_the_bucket_is_named_and_no_secret_is(name: str, value: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        load(None, {f"KVSTORE__TIERS__S3__{name.upper()}": value})
    assert f"tiers.s3.{name}" in caught.value.message
    assert "secret-word" not in caught.value.message
