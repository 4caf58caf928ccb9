"""A tenant whose secrets are another's, or readable, stops the start; one that has a user serves that user alone."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.errors import Unavailable
from tests.conftest import CLIENTS
from tests.security.tenancy import client_of, secret_of, tenants_sidecar, token_of


def same_token(place: Path) -> None:
    (place / "b.tokens").write_text(f"{token_of('b')}\n{token_of('a')}\n")


def same_secret(place: Path) -> None:
    (place / "b.secret").write_text(secret_of("a"))


def open_to_others(place: Path) -> None:
    (place / "a.secret").chmod(0o644)


def absent(place: Path) -> None:
    (place / "b.secret").unlink()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (same_token, r"tenants\.b\.token_file: one of its tokens is tenant a's"),
        (same_secret, r"tenants\.b\.secret_file = .*tenant a, too: give each tenant its own"),
        (open_to_others, r"tenants\.a\.secret_file = .*run chmod 600"),
        (absent, r"tenants\.b\.secret_file = .*cannot be read"),
    ],
)
def test_a_start_that_would_mix_tenants_is_refused(spoil: Callable[[Path], None], words: str) -> None:
    sidecar = tenants_sidecar("--capacity", "8 MiB")
    spoil(sidecar.directory)
    with pytest.raises(Unavailable, match=words):
        sidecar.start()
    sidecar.stop()
    run = sidecar.directory / "run"
    assert not run.exists() or not list(run.iterdir())
    assert "Traceback" not in (sidecar.directory / "log").read_text()


AS_OTHER = """
import os, sys
from pathlib import Path
from kvstore.errors import KVStoreError
from kvstore.seams import SystemDisk
from kvstore.server.state import SocketDirectory
from kvstore_client import connect
os.umask(0o077)
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(int(sys.argv[3]))
try:
    if sys.argv[1] == "connect":
        with connect(sys.argv[2]) as client:
            print(client.stats().tenant)
    else:
        SocketDirectory(Path(sys.argv[2]), SystemDisk(), tenant="a", uid=1, is_own=False).listen()
except KVStoreError as error:
    print(type(error).__name__, error.message)
"""


def as_other(what: str, where: str, uid: int = 65534) -> str:
    """What another user is told; without the right to be one, what this user is."""
    command = [sys.executable, "-c", AS_OTHER, what, where, str(uid)]
    done = CLIENTS.run(command, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_server_that_may_not_give_sockets_away_says_so() -> None:
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        words = as_other("listen", name)
    assert "Unavailable tenants.a.uid = 1" in words
    assert "leave tenants.a.uid out" in words


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give sockets to another user and act as one")
def test_a_tenant_with_a_user_is_served_to_that_user_alone() -> None:
    sidecar = tenants_sidecar("--capacity", "8 MiB", KVSTORE__TENANTS__A__UID="65534")
    run = sidecar.directory / "run"
    with pytest.raises(Unavailable, match=r"tenants\.a\.uid = 65534: .*keeps that user from"):
        sidecar.start()
    sidecar.stop()
    assert not list(run.iterdir())
    sidecar.directory.chmod(0o711)
    with sidecar:
        place = f"unix://{run}/{{}}/kvstore.sock"
        assert as_other("connect", place.format("a")) == "a"
        for closed in ("b", "."):
            assert "Permission denied" in as_other("connect", place.format(closed))
        assert "Permission denied" in as_other("connect", place.format("a"), 65533)
        (run / "a" / "data.sock").chmod(0o666)
        assert as_other("connect", place.format("a"), 65533).startswith("PermissionDenied")
        with client_of(sidecar, "a", "remote") as client:  # the remote plane is the server's own process
            assert client.stats().tenant == "a"
        sidecar.stop()
        assert (run.stat().st_mode & 0o777, list(run.iterdir())) == (0o700, [])
