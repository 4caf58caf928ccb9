"""What one tenant may take of what all share: connections, sessions, staging, calls. The others have theirs left."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from kvstore_ops.sidecar import Sidecar

from kvstore.server.outbox import IN_FLIGHT_SHARE
from kvstore.v1 import remote_pb2 as rpb
from kvstore.wire import METADATA_TOKEN
from tests.security.tenancy import client_of, secret_of, tenants_sidecar, token_of, write_private
from tests.server.confined import confined
from tests.server.raw import Handoff, Raw, eventually

FILES = 512


@pytest.fixture(scope="module")
def shared() -> Iterator[Sidecar]:
    """Few descriptors for three tenants, and as few for each."""
    small = {
        "SESSION_COUNT_MAX": "6", "CONNECTION_COUNT_MAX": "10", "CONNECTION_IDLE_S_MAX": "1s",
        "STAGING_COUNT_MAX": "8", "STAGING_COUNT_TOTAL_MAX": "12",
    }  # fmt: skip
    settings = {f"KVSTORE__LIMITS__{name}": value for name, value in small.items()}
    side = tenants_sidecar("--capacity", "8 MiB", KVSTORE__REMOTE__CALL_COUNT_MAX="4", **settings)
    with side:
        resource.prlimit(side.pid, resource.RLIMIT_NOFILE, (FILES, FILES))
        yield side


def b_is_served(shared: Sidecar) -> bool:
    with client_of(shared, "b", timeout_s=5) as client:
        return client.stats().tenant == "b"


def files_of(shared: Sidecar) -> int:
    return len(os.listdir(f"/proc/{shared.pid}/fd"))


@pytest.mark.parametrize("name", ["kvstore.sock", "data.sock"])
def test_idle_connections_of_one_tenant_lock_nobody_out(shared: Sidecar, name: str) -> None:
    """More of them than the process may have files; and those that say nothing are let go."""
    before = files_of(shared)
    held = []
    for _ in range(FILES + 100):
        each = socket.socket(socket.AF_UNIX)
        if name == "data.sock":
            each.close()
            each = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        each.settimeout(0.5)
        with suppress(OSError):
            each.connect(str(shared.directory / "run" / "a" / name))
        held.append(each)
        if name == "data.sock" and len(held) > 100:
            break
    assert b_is_served(shared)
    assert files_of(shared) < before + 60
    eventually(lambda: files_of(shared) < before + 8, 30.0)
    assert b_is_served(shared)
    for each in held:
        each.close()
    eventually(lambda: a_is_served(shared), 20.0)


def a_is_served(shared: Sidecar) -> bool:
    try:
        with client_of(shared, "a", timeout_s=5) as client:
            return bool(client.stats().tenant == "a")
    except Exception:
        return False


def test_a_connection_that_nobody_uses_is_let_go_and_its_client_comes_back(shared: Sidecar) -> None:
    with client_of(shared, "a") as client:
        client.stats()
        during = files_of(shared)
        eventually(lambda: files_of(shared) < during, 20.0)
        assert client.stats().sessions.session_count == 1


def descriptors_ahead(peer: Handoff) -> int:
    """How many wait to be read."""
    found = 0
    peer.socket.setblocking(False)
    with suppress(OSError):
        while True:
            data, descriptors, _, _ = socket.recv_fds(peer.socket, 65536, 253)
            for each in descriptors:
                os.close(each)
            found += len(descriptors)
            if not data:
                return found
    return found


def test_answers_that_one_tenant_does_not_read_leave_the_others_theirs(tmp_path: Path) -> None:
    """Of what the kernel lets travel to a user's processes each tenant has its part."""
    few = {"SESSION_COUNT_MAX": "20", "CONNECTION_COUNT_MAX": "16", "STAGING_COUNT_TOTAL_MAX": "16"}
    settings = {f"KVSTORE__LIMITS__{name}": value for name, value in few.items()}
    settings |= {
        "KVSTORE__TENANTS__A__SECRET_FILE": write_private(tmp_path / "a", secret_of("a")),
        "KVSTORE__TENANTS__B__SECRET_FILE": write_private(tmp_path / "b", secret_of("b")),
        "KVSTORE__TENANTS__A__CAPACITY_BYTES": "20 MiB", "KVSTORE__TENANTS__B__CAPACITY_BYTES": "8 MiB",
        "KVSTORE__ARENA__REGION_BYTES": "1 MiB",
    }  # fmt: skip
    with confined(768, 768, "--capacity", "8 MiB", **settings) as (own, line):
        assert "ready" in line
        with Raw(own, "a") as witness:
            eventually(lambda: witness.stats().arena.region_count == 20, 60.0)
        peers = [Handoff(own.directory, "a") for _ in range(8)]
        for each in peers:
            each.send(b'{"op": "hello", "version": 1}')
            for _ in range(6):
                with suppress(OSError):
                    each.send(b'{"op": "regions", "have": 0}')
        with Raw(own, "b") as other:
            other.staging(4096)
        most = int(768 * IN_FLIGHT_SHARE) // 3
        assert most / 2 < sum(map(descriptors_ahead, peers)) <= most + len(peers)
        for each in peers:
            each.close()


def test_many_small_pieces_of_staging_are_counted(shared: Sidecar) -> None:
    """Each is an open file, however small."""
    with Raw(shared, "a") as one, Raw(shared, "a") as two:
        pieces = [one.staging(4096)[0] for _ in range(8)]
        reply, _ = one.exchange(op="staging", bytes=4096)
        assert (reply["status"], "limits.staging_count_max" in reply["message"]) == ("RESOURCE_EXHAUSTED", True)
        for _ in range(4):
            two.staging(4096)
        reply, _ = two.exchange(op="staging", bytes=4096)
        assert "limits.staging_count_total_max" in reply["message"]
        with Raw(shared, "b") as other:
            other.staging(4096)
        assert one.exchange(op="staging_close", staging_id=pieces[0])[0] == {"op": "ok"}
        two.staging(4096)


def test_sessions_of_one_tenant_leave_the_others_theirs(shared: Sidecar) -> None:
    held = [Raw(shared, "a") for _ in range(6)]
    with Handoff(shared.directory, "a") as refused:
        assert refused.exchange(op="hello", version=1)[0]["status"] == "RESOURCE_EXHAUSTED"
    assert b_is_served(shared)
    for each in held:
        each.close()


def test_calls_of_one_tenant_over_tcp_leave_the_others_theirs(shared: Sidecar) -> None:
    token = (METADATA_TOKEN, f"Bearer {token_of('a')}")
    path = "/kvstore.v1.RemoteService/Connect"
    with client_of(shared, "a", "remote") as own, grpc.insecure_channel(shared.tcp_address) as channel:
        request = rpb.ConnectRequest(version=1).SerializeToString()
        open_ = [channel.unary_stream(path)(request, timeout=60, metadata=(token,)) for _ in range(3)]
        for stream in open_:
            next(stream)
        with pytest.raises(grpc.RpcError) as caught:
            next(channel.unary_stream(path)(request, timeout=20, metadata=(token,)))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "remote.call_count_max" in caught.value.details()
        assert own.stats().tenant == "a", "sessions last, and take no places from its other calls"
        with client_of(shared, "b", "remote") as client:
            assert client.stats().tenant == "b"
        for stream in open_:
            stream.cancel()
        time.sleep(0.1)
        eventually(lambda: bool(next(channel.unary_stream(path)(request, timeout=20, metadata=(token,)))), 10.0)
