"""A real server process, at its doors: what it refuses, what it survives, how it starts and ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from kvstore_client import connect
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import Exhausted, InvalidRequest, Unavailable
from kvstore.handoff.messages import PROTOCOL_VERSION, Hello, StagingAnswer, StagingQuestion, Welcome
from kvstore.spec import ChunkState, Durability, MissReason, StoreState, Tier
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1 import cache_pb2_grpc
from kvstore.wire import METADATA_SESSION
from tests.conftest import WARM
from tests.specs import random_cache, small_spec, tokens_of


@pytest.fixture(scope="module")
def channel(sidecar: Sidecar) -> Iterator[Any]:
    with grpc.insecure_channel(sidecar.address.replace("unix://", "unix:")) as opened:
        yield opened


def still_serves(sidecar: Sidecar) -> None:
    spec, tokens = small_spec(model_id="alive"), tokens_of(20)
    with connect(sidecar.address) as client:
        assert client.store(spec, tokens, random_cache(spec, 20)).wait(10.0) is Durability.MEMORY
        assert client.fetch(spec, tokens).token_count == 20


def test_health_and_reflection_need_no_session(channel: Any) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", "kvstore.v1.CacheService"):
        reply = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    reply = next(iter(stub.ServerReflectionInfo(iter([request]), timeout=5)))
    assert "kvstore.v1.CacheService" in {each.name for each in reply.list_services_response.service}


@pytest.mark.parametrize("secret", [None, b"", b"x" * 32, bytes(range(32))], ids=["none", "empty", "text", "bytes"])
def test_a_forged_session_is_refused(channel: Any, secret: bytes | None) -> None:
    stub = cache_pb2_grpc.CacheServiceStub(channel)
    metadata = [] if secret is None else [(METADATA_SESSION, secret)]
    with pytest.raises(grpc.RpcError) as caught:
        stub.Lookup(pb.LookupRequest(), timeout=5, metadata=metadata)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_secret_dies_with_its_session(sidecar: Sidecar, channel: Any) -> None:
    client = connect(sidecar.address)
    metadata = client.connect_now().metadata
    stub = cache_pb2_grpc.CacheServiceStub(channel)
    stub.Release(pb.ReleaseRequest(), timeout=5, metadata=metadata)
    client.close()

    def refused() -> bool:
        try:
            stub.Release(pb.ReleaseRequest(), timeout=5, metadata=metadata)
        except grpc.RpcError as error:
            return bool(error.code() is grpc.StatusCode.UNAUTHENTICATED)
        return False

    assert any(refused() for _ in range(200))


def test_garbage_on_the_wire_is_the_callers_fault(sidecar: Sidecar, channel: Any) -> None:
    random = np.random.default_rng(1)
    with connect(sidecar.address) as client:
        metadata = client.connect_now().metadata
        whole = pb.StoreRequest(reserve=pb.Reserve(query=pb.ChainQuery(digests=b"d" * 64))).SerializeToString()
        codes = set()
        for name in ("Lookup", "Store", "Release", "RegisterModel"):
            call = channel.unary_unary(f"/kvstore.v1.CacheService/{name}")
            payloads = [random.bytes(int(size)) for size in random.integers(1, 300, 30)]
            payloads += [whole[:cut] for cut in range(0, len(whole), 7)]
            for payload in payloads:
                try:
                    call(payload, timeout=5, metadata=metadata)
                except grpc.RpcError as error:
                    codes.add(error.code())
        assert codes == {grpc.StatusCode.INVALID_ARGUMENT}
        oversized = channel.unary_unary("/kvstore.v1.CacheService/Lookup")
        with pytest.raises(grpc.RpcError) as caught:
            oversized(bytes(17 << 20), timeout=10, metadata=metadata)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    still_serves(sidecar)


def handoff(sidecar: Sidecar) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(5.0)
    connection.connect(str(sidecar.directory / "run" / "data.sock"))
    return connection


@pytest.mark.parametrize(
    "packet",
    [b"x", b"[]", b"{}", b'{"op":"hello","version":2}', b'{"op":"staging","bytes":4096}', b"\xff" * 100, b"[" * 5000],
)
def test_a_stranger_at_the_handoff_is_sent_away(sidecar: Sidecar, packet: bytes) -> None:
    with handoff(sidecar) as connection:
        connection.send(packet)
        answer = json.loads(connection.recv(4096))
        assert (answer["op"], answer["status"]) == ("error", "INVALID_ARGUMENT")
        assert connection.recv(4096) == b""
    still_serves(sidecar)


def test_wrong_requests_at_the_handoff_are_answered(sidecar: Sidecar) -> None:
    with connect(sidecar.address) as client:
        session = client.connect_now()
        for size in (0, 5):
            with pytest.raises(InvalidRequest):
                session._exchange(StagingQuestion(size), StagingAnswer)
        with pytest.raises(Exhausted, match="staging_bytes_max"):
            session._exchange(StagingQuestion(1 << 40), StagingAnswer)
        with pytest.raises(InvalidRequest, match="no question of an open session"):
            session._exchange(Hello(PROTOCOL_VERSION), Welcome)
        assert client.lookup(small_spec(), tokens_of(20)) is not None


def test_sockets_and_directories_are_ours_alone(sidecar: Sidecar) -> None:
    run = sidecar.directory / "run"
    assert run.stat().st_mode & 0o777 == 0o700
    for name in ("kvstore.sock", "data.sock"):
        assert (run / name).stat().st_mode & 0o777 == 0o600


def serve(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvstore_ops.cli", "serve", *arguments]
    return WARM.run(command, timeout=30, env={**os.environ, **environment})


def test_a_second_server_on_the_same_state_is_refused(sidecar: Sidecar) -> None:
    done = serve("--state-directory", str(sidecar.directory))
    assert done.returncode == 1
    assert done.stderr.startswith("kvstore: another kvstore server uses")
    assert "server.state_directory" in done.stderr
    still_serves(sidecar)


def test_another_servers_sockets_are_not_taken(sidecar: Sidecar, tmp_path: Path) -> None:
    done = serve("--state-directory", str(tmp_path), "--socket-directory", str(sidecar.directory / "run"))
    assert done.returncode == 1
    assert "server.socket_directory" in done.stderr
    still_serves(sidecar)


def test_a_dead_servers_sockets_are_replaced(own_sidecar: Sidecar) -> None:
    own_sidecar.stop(kill=True)
    assert (own_sidecar.directory / "run" / "kvstore.sock").exists()
    own_sidecar.start()
    still_serves(own_sidecar)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_it_ends_with_open_sessions_and_cleans_up(own_sidecar: Sidecar, number: int) -> None:
    client = connect(own_sidecar.address)
    process = own_sidecar.process
    assert process is not None
    process.send_signal(number)
    assert process.wait(10.0) == 0
    assert not (own_sidecar.directory / "run" / "kvstore.sock").exists()
    assert "exception" not in (own_sidecar.directory / "log").read_text()
    client.close()


@pytest.mark.parametrize(
    ("variable", "value", "word"),
    [
        ("KVSTORE__ARENA__CAPCITY_BYTES", "1 GiB", "capacity_bytes"),
        ("KVSTORE__ARENA__CAPACITY_BYTES", "lots", "64 GiB"),
        ("KVSTORE__SERVER__METRICS_PORT", "70000", "server.metrics_port"),
    ],
)
def test_a_wrong_setting_stops_the_start(tmp_path: Path, variable: str, value: str, word: str) -> None:
    done = serve("--state-directory", str(tmp_path), **{variable: value})
    assert done.returncode == 1
    assert variable in done.stderr
    assert word in done.stderr
    assert "Traceback" not in done.stderr


def test_the_metrics_page_and_its_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=r"server\.metrics_port"):
            Sidecar("--capacity", "16 MiB", "--metrics-port", str(port)).start()
    with Sidecar("--capacity", "16 MiB", "--metrics-port", str(port)) as sidecar:
        still_serves(sidecar)
        page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
        assert "kvstore_store_committed_chunks_total 2.0" in page
        assert f"kvstore_arena_capacity_bytes {float(16 << 20):.9}".split()[0] in page


def test_a_port_for_other_hosts_that_is_taken_stops_the_start_and_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "tokens").touch(0o600)
    (tmp_path / "tokens").write_text("0123456789abcdef" * 4)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        asked = {"KVSTORE__REMOTE__ADDRESS": address, "KVSTORE__REMOTE__TOKEN_FILE": str(tmp_path / "tokens")}
        done = serve("--state-directory", str(tmp_path / "state"), "--capacity", "16 MiB", "--nvme", "0", **asked)
    assert done.returncode == 1
    assert f"remote.address = {address}: cannot listen there: use an address of this host" in done.stderr
    assert "GRPC_VERBOSITY" not in done.stderr


def test_logs_are_json_lines(own_sidecar: Sidecar) -> None:
    still_serves(own_sidecar)
    lines = [json.loads(line) for line in (own_sidecar.directory / "log").read_text().splitlines()]
    said = {line["message"] for line in lines}
    assert "ready" in said
    assert "session opened" not in said, "a command a minute would fill the log"


def test_names_on_the_wire_are_the_services_own() -> None:
    for own, theirs, prefix in (
        (ChunkState, pb.ChunkState, "CHUNK_STATE_"),
        (MissReason, pb.MissReason, "MISS_REASON_"),
        (Tier, pb.Tier, "TIER_"),
        (StoreState, pb.StoreState, "STORE_STATE_"),
        (Durability, pb.Durability, "DURABILITY_"),
    ):
        wire = {name.removeprefix(prefix): number for name, number in theirs.items() if number}
        assert wire == {each.name: each.value for each in own if each.value}
