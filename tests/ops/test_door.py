"""Each command that asks a sidecar takes what ``connect`` takes, and a socket's path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvstore_client import TLS, connect
from kvstore_ops.cli import app
from kvstore_ops.door import Door, door_of
from kvstore_ops.sidecar import TOKEN, Sidecar
from typer.testing import CliRunner

from kvstore.errors import InvalidRequest, KVStoreError, Unavailable
from kvstore.handoff.passing import open_socket
from tests.specs import random_cache, small_spec, tokens_of

SPEC = small_spec()
HERE = "unix:///run/kvstore.sock"


@pytest.fixture(scope="module")
def both() -> Iterator[Sidecar]:
    """A sidecar that is reached by its socket and over TCP."""
    with pytest.MonkeyPatch.context() as patch, Sidecar("--capacity", "16 MiB", plane="remote") as running:
        patch.setenv("KVSTORE_TOKEN", TOKEN)
        yield running


def said(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None:
        raise result.exception
    return result.stdout


@pytest.mark.parametrize("form", ["url", "path", "tcp"])
@pytest.mark.parametrize("option", ["--socket", "--address"])
def test_every_command_takes_every_form_of_an_address(
    both: Sidecar, form: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = both.socket_address
    address = {"url": url, "path": url.removeprefix("unix://"), "tcp": both.tcp_address}[form]
    place = (option, address)
    assert json.loads(said("status", *place, "--json"))["server_pid"] == both.pid

    tokens = tokens_of(SPEC.chunk_tokens)
    (tmp_path / "prompt.json").write_text(json.dumps([int(each) for each in tokens]))
    with connect(url) as client:
        client.store(SPEC, tokens, random_cache(SPEC, SPEC.chunk_tokens)).wait()
    prompt = ("--model", SPEC.model_id, "--prompt", str(tmp_path / "prompt.json"))
    assert json.loads(said("locate", *prompt, *place, "--json"))[0]["prefixes"]

    monkeypatch.setattr("kvstore_ops.watch.follow", lambda events, count, as_json: print(len(events.epoch)))
    assert int(said("watch", *place)) > 0


def test_what_an_address_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_SOCKET", "/run/kvstore.sock")
    for same in (None, HERE, "/run/kvstore.sock"):
        assert door_of(same) == door_of(same, "default") == Door(HERE)
    assert door_of("kvstore.sock").address == "unix://kvstore.sock"
    assert door_of("run/kvstore.sock").address == "unix://run/kvstore.sock"
    assert door_of(HERE, "red").address == "unix:///run/red/kvstore.sock"
    assert door_of("host:9500") == Door("host:9500")
    monkeypatch.setenv("KVSTORE_SOCKET", "host:9500")
    assert door_of(None) == Door("host:9500")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_tenants_in_closed_directories_are_tenants() -> None:
    """Somebody opened the directory above them by hand."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        for name, mode in (("closed", 0o700), ("empty", 0o755), ("open", 0o755)):
            tenant = Path(place, name)
            tenant.mkdir()
            if name != "empty":
                (tenant / "kvstore.sock").touch()
            tenant.chmod(mode)
        Path(place, "kvstore.sock").touch()
        os.seteuid(65534)
        try:
            assert Door(f"unix://{place}/kvstore.sock").tenants_beside() == ["closed", "open"]
        finally:
            os.seteuid(0)


def test_the_environment_may_name_another_host(both: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_SOCKET", both.tcp_address)
    assert json.loads(said("status", "--json"))["server_pid"] == both.pid
    with connect() as client:
        assert client.plane == "remote"


def test_what_tls_means() -> None:
    assert door_of("host:1", tls="system").tls is True
    assert door_of("host:1", tls="ca").tls == TLS(ca_file="ca")
    assert door_of("host:1", tls="ca,own,key").tls == TLS(ca_file="ca", certificate_file="own", key_file="key")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--address", "127.0.0.1:9", "--tenant", "red"), "the token in \\$KVSTORE_TOKEN"),
        (("--address", "127.0.0.1:9", "--tls", "ca,own"), "--tls ca,own: use system"),
        (("--address", "http://127.0.0.1:9"), "HOST:PORT"),
        (("--address", "elsewhere.example:9"), "not this host"),
        (("--socket", HERE, "--tls", "system"), "a unix socket serves its own user"),
        (("--address", "unix://"), "use unix:///path/to/kvstore.sock"),
        (("--address", "unix:///"), "use unix:///path/to/kvstore.sock"),
    ],
)
def test_what_cannot_be_asked_is_said(arguments: tuple[str, ...], word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_TOKEN", TOKEN)
    with pytest.raises(InvalidRequest, match=word):
        said("status", *arguments)


def test_a_wrong_token_is_refused(both: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_TOKEN", "another-token-of-nobody")
    with pytest.raises(KVStoreError, match="token"):
        said("status", "--address", both.tcp_address)


def test_a_sidecar_that_hangs_is_named_with_what_to_do(tmp_path: Path) -> None:
    with open_socket() as listener:
        listener.bind(str(tmp_path / "data.sock"))
        listener.listen()
        opened_none = f"^the sidecar on {tmp_path}/kvstore.sock took the connection and opened no session"
        with pytest.raises(Unavailable, match=f"{opened_none} .no answer within 0.2 s.: it is ending, stopped or over"):
            connect(f"unix://{tmp_path}/kvstore.sock", timeout_s=0.2)


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), float("inf")])
def test_a_timeout_that_is_no_wait_is_refused(timeout_s: float) -> None:
    with pytest.raises(InvalidRequest, match=f"^timeout_s {timeout_s}: use more than 0 s, and 86,400 s at most$"):
        connect(HERE, timeout_s=timeout_s, required=False)


def test_a_wrong_way_to_a_port_is_told_in_one_line(both: Sidecar) -> None:
    """gRPC's own log would tell of the handshake, too."""
    command = [sys.executable, "-m", "kvstore_ops.entry", "tiers", "--address", both.address, "--tls", "system"]
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert done.returncode == 4
    (line,) = done.stderr.splitlines()
    assert "--tls" in line
