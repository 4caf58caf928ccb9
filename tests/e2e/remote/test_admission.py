"""Who is let in to the remote plane, and what a start refuses."""

from __future__ import annotations

import os
from pathlib import Path

import grpc
import psutil
import pytest
from kvstore_client import connect
from kvstore_ops.sidecar import TOKEN, Sidecar

from kvstore.errors import InvalidRequest, Unauthenticated, Unavailable
from kvstore.v1alpha import admin_pb2
from tests.e2e.remote.peers import METHODS, Peer, left, plane_process, status
from tests.security.tenancy import write_private


@pytest.mark.parametrize("token", ["", "x", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "\x00" * 40])
def test_a_wrong_token_is_refused_and_said(remote: Sidecar, token: str) -> None:
    if token.strip():
        with pytest.raises((Unauthenticated, InvalidRequest), match="token"):
            connect(remote.address, token=token)
    for metadata in ((("authorization", f"Bearer {token}"),), (("authorization", token),), ()):
        if any(not value.isprintable() for _, value in metadata):
            continue
        for method in METHODS:
            with grpc.insecure_channel(remote.tcp_address) as channel:
                call = channel.stream_stream(method)(iter([b""]), metadata=metadata, timeout=10)
                assert status(call) == "UNAUTHENTICATED"
    assert left(remote) == (0,) * 7


def test_the_token_may_come_from_the_environment_only_for_tcp(remote: Sidecar) -> None:
    with connect(remote.address) as client:
        assert client.plane == "remote"
    with connect(remote.address, token=TOKEN + "\n") as client:  # as it is read from a file
        assert client.plane == "remote"
    with connect(remote.socket_address) as client:
        assert client.plane == "local"
    with pytest.raises(InvalidRequest, match="unix socket"):
        connect(remote.socket_address, token=TOKEN)


def test_another_sessions_secret_needs_a_token_too(remote: Sidecar) -> None:
    with Peer(remote) as peer:
        request = admin_pb2.StatsRequest().SerializeToString()
        only_secret = (("kvstore-session-bin", peer.secret),)
        for metadata in (only_secret, peer.bearer, (*peer.bearer, ("kvstore-session-bin", bytes(32)))):
            call = lambda metadata=metadata: [peer.call("unary_unary", METHODS[4], request, metadata=metadata)]  # noqa: E731
            assert status(call) == "UNAUTHENTICATED"


@pytest.mark.parametrize("address", ["host:1", "192.0.2.1:9500", "[2001:db8::1]:9500"])
def test_a_token_does_not_travel_in_the_open(address: str) -> None:
    with pytest.raises(InvalidRequest, match="tls"):
        connect(address, token=TOKEN)


def test_no_proxy_is_asked_for_the_way_to_loopback(remote: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would see the token, in the open."""
    monkeypatch.setenv("grpc_proxy", "http://127.0.0.1:9")
    for name in ("no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with connect(remote.address) as client:
        assert client.plane == "remote"


@pytest.mark.parametrize("address", ["127.0.0.1", "tcp://127.0.0.1:1", "/run/kvstore.sock", "::1:9500", "h:99999"])
def test_what_is_no_address_is_said(address: str) -> None:
    with pytest.raises(InvalidRequest, match="address"):
        connect(address, token=TOKEN)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ADDRESS": "0.0.0.0:0"}, "remote.certificate_file"),
        ({"ADDRESS": "192.0.2.7:9500"}, "TLS"),
        ({"ADDRESS": "127.0.0.1:0"}, "remote.token_file"),
        ({"ADDRESS": "127.0.0.1:0", "TOKEN_FILE": "/nonexistent"}, "remote.token_file"),
        ({"ADDRESS": "127.0.0.1:0", "TOKEN_FILE": "~of-nobody-here/a"}, "remote.token_file.*cannot be read"),
        ({"ADDRESS": "127.0.0.1:0", "TOKEN_FILE": "short"}, "at least 16"),
        ({"ADDRESS": "127.0.0.1:0", "TOKEN_FILE": "empty"}, "no token"),
        ({"ADDRESS": "127.0.0.1:0", "TOKEN_FILE": "shown"}, "chmod 600"),
        ({"ADDRESS": "127.0.0.1:0", "CERTIFICATE_FILE": "short"}, "remote.key_file"),
        ({"ADDRESS": "127.0.0.1:0", "TOKEN_FILE": "good", "CERTIFICATE_FILE": "short", "KEY_FILE": "short"}, "PEM"),
        (
            {"ADDRESS": "203.0.113.1:1", "TOKEN_FILE": "good", "CERTIFICATE_FILE": "a", "KEY_FILE": "b"},
            "cannot be read",
        ),
        ({"ADDRESS": "nowhere"}, "HOST:PORT"),
        ({"MESSAGE_BYTES": "8 MiB"}, "1 MiB to 4 MiB"),
    ],
)
def test_a_start_that_would_be_unsafe_is_refused(tmp_path: Path, settings: dict[str, str], words: str) -> None:
    for name, text in (("short", "secret\n"), ("empty", "# nothing\n"), ("good", TOKEN + "\n")):
        write_private(tmp_path / name, text)
    Path(write_private(tmp_path / "shown", TOKEN)).chmod(0o644)
    own = {
        f"KVSTORE__REMOTE__{name}": str(tmp_path / value) if (tmp_path / value).is_file() else value
        for name, value in settings.items()
    }
    with pytest.raises(Unavailable, match=words):
        with Sidecar("--capacity", "16 MiB", environment={**os.environ, **own}):
            pass


def test_a_hashed_token_is_as_good(tmp_path: Path) -> None:
    import hashlib

    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    write_private(tmp_path / "tokens", f"# ours\nsha256:{digest}  # the engine's\n")
    own = {"KVSTORE__REMOTE__ADDRESS": "127.0.0.1:0", "KVSTORE__REMOTE__TOKEN_FILE": str(tmp_path / "tokens")}
    sidecar = Sidecar("--capacity", "16 MiB", environment={**os.environ, **own})
    with sidecar:
        address = remote_address(sidecar)
        with connect(address, token=TOKEN) as client:
            assert client.stats().sessions.session_count == 1
        with pytest.raises(Unauthenticated):
            connect(address, token=hashlib.sha256(TOKEN.encode()).hexdigest())


def remote_address(sidecar: Sidecar) -> str:
    """Where a sidecar that was not told so itself listens."""
    (connection,) = [each for each in plane_process(sidecar).net_connections() if each.status == psutil.CONN_LISTEN]
    return f"127.0.0.1:{connection.laddr.port}"
