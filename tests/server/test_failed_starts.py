"""A start that fails, or is interrupted: it says why, leaves nothing behind, and costs the next start nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import Unavailable
from kvstore.seams import SystemDisk
from kvstore.server.state import GRPC_SOCKET, PASSABLE, PRIVATE, close_again, prepare
from tests.security.tenancy import secret_of, tenants_sidecar, write_private

INTERRUPTED = """
import os, signal
import kvstore.server.app as app
from kvstore_ops.entry import enter

def interrupted(*args, made=app.Tenant):
    os.kill(os.getpid(), signal.SIGINT)
    return made(*args)

app.Tenant = interrupted
enter()
"""


@pytest.fixture
def taken() -> Iterator[str]:
    """An address that somebody else listens on."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield f"127.0.0.1:{holder.getsockname()[1]}"


def refused(sidecar: Sidecar) -> str:
    """The words of a sidecar that must not start."""
    with pytest.raises(Unavailable) as caught:
        sidecar.start()
    assert caught.value.fields["status"] == 1
    assert "Traceback" not in caught.value.message
    return caught.value.message


def test_what_fails_after_the_sockets_were_claimed_leaves_none_of_their_directories(taken: str) -> None:
    sidecar = tenants_sidecar("--capacity", "16 MiB")
    sidecar.plane = "local"
    sidecar.environment = {**(sidecar.environment or {}), "KVSTORE__EVENTS__ENDPOINT": f"tcp://{taken}"}
    assert f"events.endpoint = tcp://{taken}" in refused(sidecar)
    assert not list((sidecar.directory / "run").iterdir())


def test_a_directory_that_was_opened_to_other_users_is_closed_again(tmp_path: Path) -> None:
    sidecar = Sidecar("--capacity", "16 MiB")
    secret = write_private(tmp_path / "secret", secret_of("a"))
    other = {"KVSTORE__TENANTS__A__SECRET_FILE": secret, "KVSTORE__TENANTS__A__UID": str(os.geteuid() + 1)}
    sidecar.environment = {**os.environ, **other}
    assert "tenants.a.uid" in refused(sidecar)  # its directory's own directory is private
    sidecar.environment = None
    with sidecar:
        pass


def test_a_directory_where_another_server_serves_stays_open_to_other_users(tmp_path: Path) -> None:
    """A start with another state directory and the same sockets' directory fails, and closed the first one's tenants
    to their users."""
    settings: Any = SimpleNamespace(
        server=SimpleNamespace(state_directory=tmp_path / "state", socket_directory=tmp_path / "run"),
        tenants={"a": SimpleNamespace(uid=os.geteuid() + 1)},
    )
    disk = SystemDisk()
    lock = prepare(settings, disk)
    with socket.socket(socket.AF_UNIX) as served:
        served.bind(str(tmp_path / "run" / GRPC_SOCKET))
        close_again(settings)
        assert (tmp_path / "run").stat().st_mode & 0o777 == PASSABLE
    (tmp_path / "run" / GRPC_SOCKET).unlink()
    close_again(settings)
    assert (tmp_path / "run").stat().st_mode & 0o777 == PRIVATE
    disk.close(lock)


def test_a_start_that_fails_gives_the_device_its_snapshot_back(taken: str) -> None:
    with Sidecar("--capacity", "16 MiB", nvme="64 MiB") as sidecar:
        sidecar.stop()
        snapshot = sidecar.directory / "nvme" / "index"
        assert snapshot.exists()
        tokens = write_private(sidecar.directory / "tokens", "0123456789abcdef" * 4)
        other = {"KVSTORE__REMOTE__ADDRESS": taken, "KVSTORE__REMOTE__TOKEN_FILE": tokens}
        sidecar.environment = {**os.environ, **other}
        assert f"remote.address = {taken}" in refused(sidecar)
        assert snapshot.exists(), "the next start reads every header"
        assert not list((sidecar.directory / "run").iterdir())


def test_an_interrupt_while_tenants_are_made_ends_the_start_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTED, "serve", "--capacity", "16 MiB", "--nvme", "0"]
    command += ["--state-directory", str(tmp_path), "--socket-directory", str(tmp_path / "run")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 0
    assert "Traceback" not in ended.stderr
    assert not list((tmp_path / "run").iterdir())


def test_the_processes_that_a_terminal_interrupts_are_the_sidecar_and_movers_which_ignore_it() -> None:
    """Ctrl-C interrupts all processes of the group: one that ended by itself would be missing while the sidecar still
    finishes what clients have begun, and says so with a traceback."""
    environment = {**os.environ, "KVSTORE__TIERS__REDIS__EMBEDDED": "true"}
    with Sidecar("--capacity", "16 MiB", plane="remote", environment=environment) as sidecar:
        children = Path(f"/proc/{sidecar.pid}/task/{sidecar.pid}/children").read_text().split()
        movers = [str(each) for each in sidecar.mover_pids()]
        assert len(children) == len(movers) + 2
        interrupted = [each for each in children if os.getpgid(int(each)) == os.getpgid(sidecar.pid)]
        assert interrupted == movers
