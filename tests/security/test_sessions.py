"""Who may act as whom: forged and stolen secrets, other sessions' ids, other users."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from kvstore_ops.sidecar import Sidecar

from kvstore.v1 import cache_pb2 as pb
from kvstore.v1alpha import admin_pb2
from kvstore.v1alpha.admin_pb2 import StatsRequest
from tests.descriptors import open_files
from tests.server.raw import Raw, eventually
from tests.specs import small_spec, tokens_of

CALLS = [
    ("RegisterModel", pb.RegisterModelRequest()), ("Lookup", pb.LookupRequest()), ("Store", pb.StoreRequest()),
    ("Fetch", pb.FetchRequest()), ("Release", pb.ReleaseRequest()), ("Stats", StatsRequest()),
    ("Tiers", admin_pb2.TiersRequest()), ("ListChunks", admin_pb2.ListChunksRequest()),
    ("ShowChunk", admin_pb2.ShowChunkRequest(digest="00000000")),
]  # fmt: skip


@pytest.fixture
def owner(sidecar: Sidecar) -> Iterator[Raw]:
    with Raw(sidecar) as session:
        yield session


@pytest.fixture
def thief(sidecar: Sidecar) -> Iterator[Raw]:
    with Raw(sidecar) as session:
        yield session


@pytest.mark.parametrize(("method", "request_"), CALLS)
def test_every_call_needs_a_live_secret(owner: Raw, method: str, request_: Any) -> None:
    changed = bytes([owner.secret[0] ^ 1]) + owner.secret[1:]
    for forged in (changed, owner.secret[:-1], owner.secret + b"\0", b"", b"\0" * 32, os.urandom(32)):
        assert owner.status(method, request_, secret=forged) == "UNAUTHENTICATED"


@pytest.mark.parametrize(("method", "request_"), CALLS)
def test_no_call_goes_without_a_session(owner: Raw, method: str, request_: Any) -> None:
    service = "v1alpha.AdminService" if hasattr(owner.admin, method) else "v1.CacheService"
    call = owner.channel.unary_unary(f"/kvstore.{service}/{method}")
    with pytest.raises(grpc.RpcError) as caught:
        call(request_.SerializeToString(), timeout=10)
    assert caught.value.code().name == "UNAUTHENTICATED"


def test_a_secret_stolen_from_a_session_that_ended_is_worthless(sidecar: Sidecar, owner: Raw) -> None:
    victim = Raw(sidecar)
    stolen = victim.secret
    victim.close()
    eventually(lambda: owner.stats().sessions.session_count == 1)
    for method, request in CALLS:
        assert owner.status(method, request, secret=stolen) == "UNAUTHENTICATED"


def test_a_secret_of_a_killed_server_is_worthless_to_the_next(own_sidecar: Sidecar) -> None:
    with Raw(own_sidecar) as before:
        own_sidecar.stop(kill=True)
        own_sidecar.start()
        with Raw(own_sidecar) as after:
            assert before.secret != after.secret
            assert after.status("Stats", StatsRequest(), secret=before.secret) == "UNAUTHENTICATED"


def test_another_sessions_lease_cannot_be_released(owner: Raw, thief: Raw) -> None:
    spec = small_spec(model_id="lease")
    tokens = owner.store(spec, 2)
    (fetched,) = owner.call("Fetch", pb.FetchRequest(query=owner.query(spec, tokens)))
    ids = list(range(fetched.lease_id + 2))
    thief.call("Release", pb.ReleaseRequest(lease_ids=ids))
    assert owner.stats().sessions.lease_count == 1
    owner.call("Release", pb.ReleaseRequest(lease_ids=ids))
    assert owner.stats().sessions.lease_count == 0


def test_another_sessions_reservation_takes_nothing_from_a_thief(owner: Raw, thief: Raw) -> None:
    spec = small_spec(model_id="reservation")
    reservation = owner.reserve(spec, tokens_of(16)).reservation_id
    fills, _ = thief.staged(spec, 1)
    steps = [
        pb.StoreRequest(fill=pb.FillStrips(reservation_id=reservation, fills=fills)),
        pb.StoreRequest(commit=pb.Commit(reservation_id=reservation, fills=fills)),
    ]
    assert [thief.status("Store", step) for step in steps] == ["INVALID_ARGUMENT"] * 2
    thief.call("Store", pb.StoreRequest(abort=pb.Abort(reservation_id=reservation)))
    fills, _ = owner.staged(spec, 1)
    commit = pb.Commit(reservation_id=reservation, fills=fills)
    assert owner.call("Store", pb.StoreRequest(commit=commit)).committed_count == 1


def test_another_sessions_staging_is_out_of_reach(owner: Raw, thief: Raw) -> None:
    spec = small_spec(model_id="staging")
    fills, _ = owner.staged(spec, 1)
    reservation = thief.reserve(spec, tokens_of(16)).reservation_id
    commit = pb.Commit(reservation_id=reservation, fills=fills)
    assert thief.status("Store", pb.StoreRequest(commit=commit)) == "INVALID_ARGUMENT"
    thief.exchange(op="staging_close", staging_id=fills[0].staging_id)
    reservation = owner.reserve(spec, tokens_of(16, 1)).reservation_id
    commit = pb.Commit(reservation_id=reservation, fills=fills)
    assert owner.call("Store", pb.StoreRequest(commit=commit)).committed_count == 1


OTHER_USER = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
try:
    s.connect(sys.argv[1])
except PermissionError:
    print("denied"); sys.exit()
try:
    s.send(b'{"op": "hello", "version": 1}')
except BrokenPipeError:
    pass
data, ancillary, _, _ = s.recvmsg(65536, socket.CMSG_SPACE(400))
print(data.decode(), len(ancillary))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_is_denied_even_where_the_directory_lets_it_through(own_sidecar: Sidecar) -> None:
    path = own_sidecar.directory / "run" / "data.sock"

    def as_other() -> str:
        command = [sys.executable, "-c", OTHER_USER, str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30, cwd="/").stdout.strip()

    assert as_other() == "denied"
    own_sidecar.directory.chmod(0o711)
    path.parent.chmod(0o711)
    path.chmod(0o666)
    reply, descriptors = as_other().rsplit(" ", 1)
    assert json.loads(reply)["status"] == "PERMISSION_DENIED"
    assert descriptors == "0"


def test_the_gate_is_the_unix_socket_only(own_sidecar: Sidecar) -> None:
    """gRPC is not offered over TCP: what listens there is the metrics page alone, on loopback."""
    inodes = {name[8:-1] for name in open_files(own_sidecar.pid) if name.startswith("socket:[")}
    listening = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{own_sidecar.pid}/net/{table}") as lines:
            for fields in (line.split() for line in list(lines)[1:]):
                if fields[3] == "0A" and fields[9] in inodes:
                    listening.append(fields[1].split(":")[0])
    assert listening == [socket.inet_aton("127.0.0.1")[::-1].hex().upper()]
