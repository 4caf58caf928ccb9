"""Start, stop, and who else is there."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import grpc
import pytest
from kvstore_ops.sidecar import Sidecar

from kvstore.v1 import cache_pb2 as pb
from kvstore.v1alpha.admin_pb2 import StatsRequest
from tests.server.raw import Raw, eventually
from tests.specs import small_spec, tokens_of


def refused(directory: Path, *arguments: str, sockets: str = "run") -> str:
    """The words of a server that must not start."""
    command = [sys.executable, "-m", "kvstore_ops.cli", "serve", "--state-directory", str(directory)]
    command += ["--socket-directory", str(directory / sockets), "--capacity", "16 MiB", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert "ready" not in ended.stdout
    return ended.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(own_sidecar: Sidecar, number: signal.Signals) -> None:
    with Raw(own_sidecar) as raw:
        raw.store(small_spec(), 2)
        assert own_sidecar.process is not None
        own_sidecar.process.send_signal(number)
        assert own_sidecar.process.wait(15) == 0
    assert not list((own_sidecar.directory / "run").iterdir())
    assert "Traceback" not in (own_sidecar.directory / "log").read_text()


def test_stopping_finishes_what_was_reserved_and_admits_nothing_new(own_sidecar: Sidecar) -> None:
    spec = small_spec()
    with Raw(own_sidecar) as raw:
        fills, _ = raw.staged(spec, 1)
        reservation = raw.reserve(spec, tokens_of(16)).reservation_id
        assert own_sidecar.process is not None
        own_sidecar.process.terminate()
        eventually(lambda: "stopping" in (own_sidecar.directory / "log").read_text())
        with pytest.raises(grpc.RpcError) as caught:
            raw.reserve(spec, tokens_of(16, 1))
        assert caught.value.code().name == "UNAVAILABLE"
        commit = pb.Commit(reservation_id=reservation, fills=fills)
        assert raw.call("Store", pb.StoreRequest(commit=commit)).committed_count == 1
        assert own_sidecar.process.wait(15) == 0


def test_an_idle_reservation_holds_the_stop_no_longer_than_the_grace() -> None:
    environment = {**os.environ, "KVSTORE__SERVER__SHUTDOWN_GRACE_S": "0.5"}
    with Sidecar("--capacity", "16 MiB", environment=environment) as own, Raw(own) as raw:
        raw.reserve(small_spec(), tokens_of(16))
        assert own.process is not None
        own.process.terminate()
        assert own.process.wait(8) == 0


def test_a_second_server_on_the_same_state_is_refused(own_sidecar: Sidecar) -> None:
    words = refused(own_sidecar.directory, sockets="other")
    assert f"another kvstore server uses {own_sidecar.directory}" in words
    assert "server.state_directory" in words
    with Raw(own_sidecar) as raw:
        assert raw.stats().server_pid == own_sidecar.pid


def test_a_file_that_is_no_socket_is_not_removed(tmp_path: Path) -> None:
    sockets = tmp_path / "run"
    sockets.mkdir(mode=0o700)
    (sockets / "data.sock").write_text("precious")
    assert "is not a socket" in refused(tmp_path)
    assert (sockets / "data.sock").read_text() == "precious"


def test_a_directory_open_to_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o755)
    words = refused(tmp_path)
    assert "0700" in words
    assert "chmod" in words


@pytest.mark.parametrize("setting", ["state_directory", "socket_directory"])
def test_a_directory_that_cannot_be_made_is_named_with_its_setting(setting: str, tmp_path: Path) -> None:
    state, sockets = tmp_path, "run"
    (tmp_path / "file").write_text("precious")
    if setting == "state_directory":
        state = tmp_path / "file"
        sockets = "../run"
    else:
        sockets = "file"
    assert f"set server.{setting} to" in refused(state, sockets=sockets)


def test_a_state_directory_that_cannot_be_written_is_named_with_its_setting(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    words = refused(tmp_path)
    assert "lock cannot be written" in words
    assert "server.state_directory" in words


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    os.chown(tmp_path / "run", 65534, 65534)
    assert "run belongs to user 65534" in refused(tmp_path)


def test_more_memory_than_there_is_is_refused(tmp_path: Path) -> None:
    words = refused(tmp_path, "--capacity", "8 TiB", "--nvme", "0")
    assert "arena.capacity_bytes = 8.0 TiB" in words or "arena.capacity_bytes = 8 TiB" in words
    assert "or less" in words


def test_a_configured_metrics_port_that_is_taken_stops_the_start(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        words = refused(tmp_path, "--metrics-port", str(port))
    assert str(port) in words
    assert "server.metrics_port" in words


def test_a_default_metrics_port_that_is_taken_is_replaced_and_said_so() -> None:
    """One of the two has it, or a server of somebody else's."""
    with Sidecar("--capacity", "16 MiB") as first, Sidecar("--capacity", "16 MiB") as second:
        assert "using another" in "".join((each.directory / "log").read_text() for each in (first, second))


def test_two_servers_beside_each_other_serve_their_own() -> None:
    servers = Sidecar("--capacity", "16 MiB"), Sidecar("--capacity", "16 MiB")
    with servers[0] as one, servers[1] as two, Raw(one) as first, Raw(two) as second:
        assert (first.stats().server_pid, second.stats().server_pid) == (one.pid, two.pid)
        assert second.status("Stats", StatsRequest(), secret=first.secret) == "UNAUTHENTICATED"


def test_calls_go_on_while_a_stop_waits(own_sidecar: Sidecar) -> None:
    """Many stores at once while the signal comes: each ends, one way or the other, and so does the server."""
    spec = small_spec()
    outcomes: list[str] = []

    def storing(seed: int) -> None:
        try:
            with Raw(own_sidecar) as raw:
                while True:
                    raw.store(spec, 1, seed=seed)
                    outcomes.append("stored")
                    seed += 100
        except (grpc.RpcError, OSError, AssertionError) as error:
            outcomes.append(type(error).__name__)

    threads = [threading.Thread(target=storing, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    eventually(lambda: outcomes.count("stored") > 8)
    assert own_sidecar.process is not None
    own_sidecar.process.terminate()
    assert own_sidecar.process.wait(15) == 0
    for thread in threads:
        thread.join(15)
        assert not thread.is_alive()
    assert "Traceback" not in (own_sidecar.directory / "log").read_text()


def test_a_killed_server_leaves_no_byte_mover_behind(own_sidecar: Sidecar) -> None:
    movers = own_sidecar.mover_pids()
    assert len(movers) == 2
    own_sidecar.stop(kill=True)
    for pid in movers:
        eventually(lambda pid=pid: not Path(f"/proc/{pid}").exists())  # type: ignore[misc]
