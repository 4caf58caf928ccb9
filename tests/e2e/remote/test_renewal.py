"""Files that change while the plane runs: certificates and tokens. No restart, and nobody is disconnected."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
from kvstore_client import TLS, connect
from kvstore_ops.sidecar import TOKEN, Sidecar

from kvstore.config.remote import RemoteSettings
from kvstore.errors import InvalidRequest, Unauthenticated, Unavailable
from kvstore.remote import __main__ as plane
from kvstore.remote.certificates import Certificates
from kvstore.remote.door import Door
from kvstore.remote.renewal import LOOK_INTERVAL_S, RenewedFiles
from kvstore.spec import Durability
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1 import remote_pb2 as rpb
from tests.e2e.remote.certificates import make_certificates, needs_openssl, shown, tls_sidecar
from tests.e2e.remote.peers import SPEC, Peer, left, status
from tests.e2e.remote.silent import SilentPeer
from tests.e2e.test_failures import large_cache, large_spec, until
from tests.security.tenancy import write_private
from tests.specs import random_cache, tokens_of

OTHER = "another-token-of-this-sidecar"
WAIT_S = 6 * LOOK_INTERVAL_S


def is_let_in(sidecar: Sidecar, tls: TLS | None = None, token: str = TOKEN) -> bool:
    try:
        with connect(sidecar.address, tls=tls, token=token, timeout_s=5.0) as client:
            return client.stats().sessions.session_count > 0
    except (Unavailable, Unauthenticated):
        return False


@needs_openssl
def test_renewed_certificates_are_in_use_with_the_next_handshake(tmp_path: Path) -> None:
    """The authority, too. Who is connected stays so."""
    before, after = tmp_path / "before", tmp_path / "after"
    for place in (before, after, tmp_path / "used"):
        place.mkdir()
    make_certificates(before)
    make_certificates(after)
    used = tmp_path / "used"
    for name in ("ca.pem", "server.pem", "server.key"):
        (used / name).write_bytes((before / name).read_bytes())
    old, new = shown(before, "client"), shown(after, "client")
    with tls_sidecar(used, mutual=True) as sidecar, connect(sidecar.address, tls=old) as stays:
        assert is_let_in(sidecar, old)
        assert not is_let_in(sidecar, new)
        (used / "server.pem").write_bytes((after / "server.pem").read_bytes())
        until(lambda: "changed files are not used" in (sidecar.directory / "log").read_text(), WAIT_S)
        assert is_let_in(sidecar, old), "the new certificate without its key is not in use"
        for name in ("server.key", "ca.pem"):  # replaced, as a tool would
            (used / "next").write_bytes((after / name).read_bytes())
            os.replace(used / "next", used / name)
        until(lambda: is_let_in(sidecar, new), WAIT_S)
        assert not is_let_in(sidecar, old)
        assert stays.store(SPEC, tokens_of(40), random_cache(SPEC, 40)).wait(10.0) is Durability.MEMORY


def test_tokens_come_and_go_with_their_file(own_remote: Sidecar) -> None:
    file = own_remote.directory / "tokens"
    with connect(own_remote.address) as client:
        file.write_text(f"{TOKEN}\n{OTHER}\n")
        until(lambda: is_let_in(own_remote, token=OTHER), WAIT_S)
        file.write_text("short\n")
        until(lambda: "changed files are not used" in (own_remote.directory / "log").read_text(), WAIT_S)
        assert is_let_in(own_remote, token=OTHER), "those of a file that is wrong are not in use"
        assert OTHER not in (own_remote.directory / "log").read_text()
        file.write_text(f"{OTHER}\n")
        until(lambda: not is_let_in(own_remote), WAIT_S)
        assert is_let_in(own_remote, token=OTHER)
        with pytest.raises(Unauthenticated):
            client.stats()


def test_a_token_that_is_gone_ends_the_sessions_that_it_opened(own_remote: Sidecar) -> None:
    """Its bearer hears of no chunk any more, and holds nothing."""
    file = own_remote.directory / "tokens"
    file.write_text(f"{TOKEN}\n{OTHER}\n")
    until(lambda: is_let_in(own_remote, token=OTHER), WAIT_S)
    with Peer(own_remote) as gone, Peer(own_remote, OTHER) as stays:
        watches = [
            each.call("unary_stream", "/kvstore.v1.CacheService/Watch", pb.WatchRequest().SerializeToString())
            for each in (gone, stays)
        ]
        for each in watches:
            next(each)
        assert left(own_remote)[0] == 2
        file.write_text(f"{OTHER}\n")
        until(lambda: left(own_remote)[0] == 1, WAIT_S)
        assert status(gone.stream) == "UNAUTHENTICATED"
        assert status(watches[0]) == "UNAUTHENTICATED"
        stays.reserve(SPEC, 1, 1)
        watches[1].cancel()


def test_a_token_that_is_gone_ends_calls_whose_clients_stand_still() -> None:
    """They kept the places of the tenant's other clients, and all of its sessions, as long as their connections lived;
    and a prefix that was being fetched came to its end."""
    environment = {**os.environ, "KVSTORE__REMOTE__CALL_COUNT_MAX": "8"}
    with Sidecar("--capacity", "32 MiB", environment=environment, plane="remote") as sidecar:
        file = sidecar.directory / "tokens"
        file.write_text(f"{TOKEN}\n{OTHER}\n")
        tokens, cache = large_cache(1, 12)
        with connect(sidecar.address) as client:
            assert client.store(large_spec(), tokens, cache).wait(20.0) is Durability.MEMORY
        until(lambda: is_let_in(sidecar, token=OTHER), WAIT_S)
        with Peer(sidecar) as stays, Peer(sidecar, OTHER) as gone, SilentPeer(sidecar, OTHER) as silent:
            reading = gone.fetch(large_spec(), tokens)
            next(reading)
            silent.begin("Connect", rpb.ConnectRequest(version=1).SerializeToString())
            until(lambda: left(sidecar)[0] == 3)

            def is_full() -> bool:
                silent.begin("/kvstore.v1.CacheService/Lookup")  # of those before, some may have been refused
                return status(lambda: [stays.reserve(SPEC, 1, 1)]) == "RESOURCE_EXHAUSTED"

            until(is_full)
            file.write_text(f"{TOKEN}\n")
            until(lambda: left(sidecar)[0] == 1, WAIT_S)
            assert status(reading) == "UNAUTHENTICATED"
            stays.reserve(SPEC, 1, 1)


def test_files_are_read_again_when_they_change_and_only_then(tmp_path: Path) -> None:
    file, read = tmp_path / "file", []
    renewed = RenewedFiles("things", [file, tmp_path / "other"], lambda: read.append(file.exists()))
    renewed.renew()
    assert not read
    file.write_text("a")
    for _ in range(2):
        renewed.renew()
    assert read == [True]
    (tmp_path / "next").write_text("b")
    os.replace(tmp_path / "next", file)  # as long as before
    renewed.renew()
    assert len(read) == 2
    file.unlink()
    renewed.renew()
    assert read[2:] == [False]


def test_a_name_that_is_none_is_of_a_file_that_is_not_there() -> None:
    """Who reads the file says which setting it is."""
    read: list[None] = []
    RenewedFiles("things", [Path("~of-nobody-here/a"), Path("a\0b")], lambda: read.append(None)).renew()
    assert not read
    with pytest.raises(InvalidRequest, match=r"remote\.certificate_file = ~of-nobody-here/a: cannot be read"):
        Certificates("~of-nobody-here/a", "b", "")


def test_files_that_could_not_be_read_are_read_again_although_they_do_not_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Their mode was wrong, or the disk was."""
    tries = []

    def read() -> None:
        tries.append(None)
        if len(tries) < 3:
            raise OSError("it cannot be read now")

    renewed = RenewedFiles("things", [tmp_path / "file"], read)
    (tmp_path / "file").write_text("a")
    for _ in range(5):
        renewed.renew()
    assert len(tries) == 3
    assert caplog.text.count("changed files are not used") == 1


@needs_openssl
async def test_what_changes_while_a_start_reads_the_files_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_certificates(tmp_path)
    doors: list[Door] = []
    names = {"certificate_file": "server.pem", "key_file": "server.key", "client_ca_file": "ca.pem"}
    places = {name: str(tmp_path / file) for name, file in names.items()}
    files = [write_private(tmp_path / "tokens", TOKEN), places["certificate_file"]]

    async def look(renewed: Sequence[RenewedFiles], _: object) -> None:
        for each in renewed:
            each.renew()
        await doors[0].server.stop(None)

    def changed(read: Callable[..., object], file: str, *given: object) -> object:
        done = read(*given)
        Path(file).write_text(Path(file).read_text() + "\n")
        return done

    for read, file in zip(("AccessTokens", "Certificates"), files, strict=True):
        monkeypatch.setattr(plane, read, partial(changed, getattr(plane, read), file))
    monkeypatch.setattr(plane, "keep_renewing", look)
    monkeypatch.setattr(plane, "Door", lambda *given, **named: doors.append(Door(*given, **named)) or doors[0])
    monkeypatch.setattr(plane, "start_thread", lambda *_: None)
    tenant = {"name": "default", "token_file": files[0], "setting": "tokens", "socket_directory": str(tmp_path)}
    remote = {**asdict(RemoteSettings()), **places, "address": "127.0.0.1:0", "tenants": [tenant]}
    with caplog.at_level(logging.INFO):
        await plane._serve(remote)
    said = [each.__dict__["what"] for each in caplog.records if each.message == "changed files are in use"]
    assert said == ["tokens", "certificates"]
