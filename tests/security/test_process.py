"""What others on the host can learn of the service's processes and files: nothing."""

from __future__ import annotations

import hmac
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from kvstore_client import connect
from kvstore_ops.sidecar import TOKEN, Sidecar

from kvstore.errors import InvalidRequest, Unauthenticated, Unavailable
from kvstore.remote import tokens
from kvstore.remote.tokens import AccessTokens, TokenFile, read_tokens
from kvstore.units import split_address
from tests.e2e.remote.certificates import make_certificates, needs_openssl, shown, tls_sidecar
from tests.security.tenancy import write_private
from tests.server.confined import confined
from tests.server.raw import eventually
from tests.specs import random_cache, small_spec, tokens_of

PEEK = """
import ctypes, os, sys
for right in range(64):
    ctypes.CDLL(None).prctl(24, right, 0, 0, 0)  # PR_CAPBSET_DROP: what runs after exec has no rights but its user's
os.execv(sys.argv[1], sys.argv[1:])
"""


def ordinary(*command: str) -> subprocess.Popen[bytes]:
    """A process of this user without the rights of root."""
    return subprocess.Popen([sys.executable, "-c", PEEK, *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def peek(pid: int, name: str) -> bytes:
    """What another process of the same user reads of a process."""
    with ordinary("/bin/cat", f"/proc/{pid}/{name}") as reader:
        return reader.communicate(timeout=30)[0]


@pytest.fixture(scope="module")
def careless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """A sidecar started by somebody whose files anybody may read."""
    tokens_file = write_private(tmp_path_factory.mktemp("tokens") / "tokens", "a-token-of-some-length")
    own = {"KVSTORE__REMOTE__ADDRESS": "127.0.0.1:0", "KVSTORE__REMOTE__TOKEN_FILE": tokens_file}
    before = os.umask(0)
    try:
        with confined(2048, 2048, "--capacity", "16 MiB", nvme="16 MiB", **own) as (sidecar, line):
            os.umask(before)
            assert "ready" in line
            yield sidecar
    finally:
        os.umask(before)


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_memory_and_secrets_of_its_processes_are_closed_to_others_of_the_same_user(careless: Sidecar) -> None:
    with ordinary("/bin/sleep", "60") as open_to_all:
        eventually(lambda: bool(peek(open_to_all.pid, "maps")))
        open_to_all.kill()
    pids = [careless.pid, *children(careless.pid)]
    assert len(pids) >= 4, "the server, its byte movers and the remote plane"
    for pid in pids:
        assert peek(pid, "environ") == b"", pid
        assert peek(pid, "maps") == b"", pid


def test_its_files_are_its_own_whatever_the_umask_was(careless: Sidecar) -> None:
    spec = small_spec()
    with connect(careless.socket_address) as client:
        client.store(spec, tokens_of(160), random_cache(spec, 160)).wait(20)
    made = [path for path in careless.directory.rglob("*") if path.name != "log"]
    assert {"lock", "run", "nvme", "kvstore.sock", "data.sock"} <= {path.name for path in made}
    assert any(path.suffix == ".kvs" for path in made)
    for path in made:
        assert not stat.S_IMODE(path.lstat().st_mode) & 0o077, path
    for pid in (careless.pid, *children(careless.pid)):  # what libraries make, too, and sockets before they are ours
        assert "Umask:\t0077\n" in Path(f"/proc/{pid}/status").read_text()


def test_what_it_makes_is_its_own_from_the_first_moment(careless: Sidecar) -> None:
    """gRPC makes its socket itself, in a directory that other users may pass through where one has a tenant: it must
    not be open until it is given away."""
    for pid in (careless.pid, *careless.mover_pids()):
        assert "Umask:\t0077" in Path(f"/proc/{pid}/status").read_text().splitlines(), pid


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o666])
def test_a_token_file_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = Path(write_private(tmp_path / "tokens", "a-token-of-some-length"))
    assert len(read_tokens(path, "remote.token_file")) == 1
    path.chmod(mode)
    with pytest.raises(InvalidRequest, match=r"remote\.token_file.*chmod 600") as caught:
        read_tokens(path, "remote.token_file")
    assert "a-token" not in caught.value.message


def test_what_is_no_token_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "binary").write_bytes(b"\xff" * 40)
    (tmp_path / "binary").chmod(0o600)
    long = write_private(tmp_path / "long", "a-token-of-some-length\n" * 60_000)
    for path in (tmp_path / "absent", tmp_path, tmp_path / "pipe", tmp_path / "binary", Path(long)):
        with pytest.raises(InvalidRequest, match=r"remote\.token_file"):
            read_tokens(path, "remote.token_file")


def test_the_last_token_of_a_tenant_can_be_taken_back(tmp_path: Path) -> None:
    """A file without one is none to begin with; while the service runs, it may be half written for a moment."""
    path = Path(write_private(tmp_path / "tokens", "a-token-of-some-length"))
    kept = TokenFile("b", Path(write_private(tmp_path / "other", "a-token-of-another-tenant")), "t")
    file = TokenFile("a", path, "t")
    known = AccessTokens([file, kept])
    for _ in range(2):
        path.write_text("# none\n")
        with pytest.raises(InvalidRequest, match="it has no token"):
            known.read_again(file)
        assert known.tenant("Bearer a-token-of-some-length") == "a"
        path.write_text("a-token-of-some-length")
        known.read_again(file)
    path.write_text("# none\n")
    with pytest.raises(InvalidRequest):
        known.read_again(file)
    known.read_again(file)
    with pytest.raises(Unauthenticated):
        known.tenant("Bearer a-token-of-some-length")
    assert known.tenant("Bearer a-token-of-another-tenant") == "b"
    with pytest.raises(InvalidRequest, match="it has no token"):
        AccessTokens([kept, file])


def test_tenants_may_swap_their_tokens(tmp_path: Path) -> None:
    """Their files change one after the other, and each is read by itself: what all of them have in the end counts."""
    texts = {who: f"the-token-of-tenant-{who}" for who in "abcd"}
    files = {who: TokenFile(who, Path(write_private(tmp_path / who, text)), "t") for who, text in texts.items()}
    known = AccessTokens(list(files.values()))

    def owners() -> str:
        return "".join(known.tenant(f"Bearer {text}") for text in texts.values())

    files["a"].path.write_text(texts["b"])
    with pytest.raises(InvalidRequest, match="one of its tokens is tenant b's"):
        known.read_again(files["a"])
    assert owners() == "abcd", "two cannot have it"
    files["b"].path.write_text(texts["a"])
    files["c"].path.write_text(texts["d"])
    for who in "bacd":
        with suppress(InvalidRequest):
            known.read_again(files[who])
    assert owners() == "bacd", "c asks for what d keeps, and that holds up nobody else"
    files["a"].path.write_text(texts["c"])
    files["c"].path.write_text(texts["b"])
    for who in "ac":
        known.read_again(files[who])
    assert owners() == "bcad"


@pytest.mark.parametrize("given", ["the-first-of-the-tokens", "the-last-of-the-tokens", "none-of-them-all"])
def test_every_token_is_compared_in_constant_time_whatever_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """``==`` would tell by its time how many bytes were right."""
    texts = {"a": "the-first-of-the-tokens", "b": "the-last-of-the-tokens"}
    known = AccessTokens(
        [TokenFile(who, Path(write_private(tmp_path / who, text)), "t") for who, text in texts.items()]
    )
    compared: list[Any] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(one)
        return hmac.compare_digest(one, other)

    monkeypatch.setattr(tokens, "hmac", type("counted", (), {"compare_digest": staticmethod(compare)}))
    if given.startswith("none"):
        with pytest.raises(Unauthenticated):
            known.tenant(f"Bearer {given}")
    else:
        assert known.tenant(f"Bearer {given}") == ("a" if "first" in given else "b")
    assert len(compared) == 2


@needs_openssl
def test_handshakes_that_fail_leave_the_log_as_it_is(tmp_path: Path) -> None:
    """Anybody who reaches the port can fail as often as he likes."""
    make_certificates(tmp_path)
    with tls_sidecar(tmp_path, mutual=True) as sidecar:
        for _ in range(3):
            with socket.create_connection(split_address(sidecar.address, ""), 10.0) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                with suppress(ConnectionResetError):
                    stranger.recv(1)
            with pytest.raises(Unavailable):
                connect(sidecar.address, token=TOKEN, tls=shown(tmp_path, "stranger"), timeout_s=5.0)
        with connect(sidecar.address, token=TOKEN, tls=shown(tmp_path, "client")) as client:
            client.stats()
        log = (sidecar.directory / "log").read_text()
    assert "session opened" in log
    assert all(line.startswith("{") for line in log.splitlines()), log
