"""The remote plane's own: who is let in, what bad peers get, and that nothing of theirs stays."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from kvstore_client import TLS, connect
from kvstore_ops.sidecar import TOKEN, Sidecar

from kvstore.errors import InvalidRequest, Unauthenticated, Unavailable
from kvstore.keys import chain_digests, fingerprint
from kvstore.remote.inbox import SESSION_MESSAGES
from kvstore.spec import Durability, MissReason
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1 import remote_pb2 as rpb
from kvstore.v1alpha import admin_pb2
from kvstore.wire import spec_to_message
from kvstore.wire.data import data_message, split_message
from kvstore.wire.limits import RUNS_MAX
from tests.conftest import CLIENTS
from tests.e2e.test_failures import CHUNKS, large_cache, large_spec, until
from tests.security.tenancy import write_private
from tests.specs import bits, random_cache, small_spec, tokens_of

SPEC = small_spec()
SERVICE = "/kvstore.v1.RemoteService/"
METHODS = [
    *(f"/kvstore.v1.CacheService/{name}" for name in ("RegisterModel", "Lookup", "Store", "Release")),
    *(
        f"/kvstore.v1alpha.AdminService/{name}"
        for name in ("Stats", "Tiers", "ShowChunk", "Hottest", "ListChunks", "Change")
    ),
    SERVICE + "Connect", SERVICE + "FetchBytes", SERVICE + "StoreBytes",
]  # fmt: skip


@pytest.fixture(scope="module")
def remote() -> Iterator[Sidecar]:
    with Sidecar("--capacity", "64 MiB", plane="remote") as running:
        yield running


def left(sidecar: Sidecar) -> tuple[int, ...]:
    """What a session may leave behind: sessions beside our own, leases, reservations, staging, leased bytes."""
    with connect(sidecar.socket_address) as client:
        stats = client.stats()
        held = stats.sessions
        return (
            held.session_count - 1, held.lease_count, held.reservation_count, held.staging_bytes, held.stream_count,
            stats.arena.leased_bytes, stats.arena.reserved_bytes,
        )  # fmt: skip


def plane_process(sidecar: Sidecar) -> psutil.Process:
    """The remote plane's process."""
    movers = sidecar.mover_pids()
    (child,) = (each for each in psutil.Process(sidecar.pid).children() if each.pid not in movers)
    return child


class Peer:
    """A remote client made of a channel, that does what no proper client would."""

    def __init__(self, sidecar: Sidecar, token: str = TOKEN) -> None:
        options = (
            ("grpc.max_receive_message_length", 64 << 20), ("grpc.use_local_subchannel_pool", 1),
            ("grpc.http2.bdp_probe", 0),  # else a slow machine's client reads whole streams ahead
        )  # fmt: skip
        self.channel = grpc.insecure_channel(sidecar.tcp_address, options)
        self.bearer = (("authorization", f"Bearer {token}"),)
        self.stream = self.call("unary_stream", "Connect", rpb.ConnectRequest(version=1).SerializeToString())
        self.secret = rpb.ConnectResponse.FromString(next(self.stream)).secret
        self.metadata = (*self.bearer, ("kvstore-session-bin", self.secret))

    def call(self, kind: str, name: str, request: Any, **options: Any) -> Any:
        path = name if name.startswith("/") else SERVICE + name
        metadata = getattr(self, "metadata", self.bearer)
        return getattr(self.channel, kind)(path)(request, metadata=options.pop("metadata", metadata), **options)

    def register(self, spec: Any) -> bytes:
        request = pb.RegisterModelRequest(spec=spec_to_message(spec)).SerializeToString()
        self.call("unary_unary", METHODS[0], request, timeout=10)
        return fingerprint(spec, spec.kind)

    def fetch(self, spec: Any, tokens: Any, **fields: Any) -> Any:
        query = pb.ChainQuery(
            fingerprint=self.register(spec), digests=b"".join(chain_digests(tokens, spec.chunk_tokens))
        )
        request = rpb.FetchBytesRequest(fetch=pb.FetchRequest(query=query), **fields)
        return self.call("unary_stream", "FetchBytes", request.SerializeToString())

    def reserve(self, spec: Any, chunks: int, seed: int) -> int:
        tokens = tokens_of(chunks * spec.chunk_tokens, seed)
        query = pb.ChainQuery(
            fingerprint=self.register(spec), digests=b"".join(chain_digests(tokens, spec.chunk_tokens))
        )
        step = pb.StoreRequest(reserve=pb.Reserve(query=query, token_digests=bytes(32 * chunks)))
        reply = self.call("unary_unary", "/kvstore.v1.CacheService/Store", step.SerializeToString(), timeout=10)
        return int(pb.StoreResponse.FromString(reply).reservation_id)

    def close(self) -> None:
        self.channel.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def status(call: Any) -> str:
    """How a call ends."""
    try:
        list(call() if callable(call) and not hasattr(call, "cancel") else call)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


# ------------------------------------------------------------ who is let in


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


# ------------------------------------------------------------ TLS

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA, a server's and a client's certificate of it, and a stranger's."""
    place = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=place, check=True, capture_output=True, timeout=60)

    for name in ("ca", "stranger"):
        openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1",
                "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem")  # fmt: skip
    (place / "extensions").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    for name in ("server", "client"):
        openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}",
                "-keyout", f"{name}.key", "-out", f"{name}.csr")  # fmt: skip
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                "-days", "1", "-extfile", "extensions", "-out", f"{name}.pem")  # fmt: skip
    return place


def tls_sidecar(place: Path, *, mutual: bool) -> Sidecar:
    own = {"CERTIFICATE_FILE": str(place / "server.pem"), "KEY_FILE": str(place / "server.key")}
    if mutual:
        own["CLIENT_CA_FILE"] = str(place / "ca.pem")
    settings = {f"KVSTORE__REMOTE__{name}": value for name, value in own.items()}
    return Sidecar("--capacity", "16 MiB", environment={**os.environ, **settings}, plane="remote")


@needs_openssl
def test_tls(certificates: Path) -> None:
    tokens, kv = tokens_of(40), random_cache(SPEC, 40)
    with tls_sidecar(certificates, mutual=False) as sidecar:
        with connect(sidecar.address, tls=TLS(ca_file=certificates / "ca.pem")) as client:
            assert client.store(SPEC, tokens, kv).wait(10.0) is Durability.MEMORY
            fetched = client.fetch(SPEC, tokens)
            assert fetched.token_count == 40
            assert (bits(fetched[0][0]) == kv[0][0]).all()
        with pytest.raises(Unavailable, match="tls="):
            connect(sidecar.address, timeout_s=5.0)  # in the open, to a port that speaks TLS
        with pytest.raises(Unavailable, match="tls="):
            connect(sidecar.address, tls=TLS(ca_file=certificates / "stranger.pem"), timeout_s=5.0)
        with pytest.raises(Unavailable, match="tls="):
            connect(sidecar.address, tls=TLS(ca_file=certificates / "ca.pem", server_name="other"), timeout_s=5.0)
        with pytest.raises(Unauthenticated, match="token"):
            connect(sidecar.address, token="another-token-than-ours", tls=TLS(ca_file=certificates / "ca.pem"))
        until(lambda: left(sidecar) == (0,) * 7)


@needs_openssl
def test_mutual_tls(certificates: Path) -> None:
    def named(name: str) -> TLS:
        own = {"certificate_file": certificates / f"{name}.pem", "key_file": certificates / f"{name}.key"}
        return TLS(ca_file=certificates / "ca.pem", **own)

    with tls_sidecar(certificates, mutual=True) as sidecar:
        with connect(sidecar.address, tls=named("client")) as client:
            assert client.stats().sessions.session_count == 1
        for tls in (TLS(ca_file=certificates / "ca.pem"), named("stranger")):
            with pytest.raises(Unavailable, match="tls="):
                connect(sidecar.address, tls=tls, timeout_s=5.0)
        with pytest.raises(InvalidRequest, match="certificate_file"):
            connect(sidecar.address, tls=TLS(key_file=certificates / "client.key"))


def test_tls_to_a_port_without(remote: Sidecar) -> None:
    with pytest.raises(Unavailable, match="tls="):
        connect(remote.address, tls=True, timeout_s=5.0)


# ------------------------------------------------------------ bad peers


def test_a_slow_reader_loses_its_lease_and_holds_nobody_up() -> None:
    settings = {"KVSTORE__REMOTE__STALL_S": "3", "KVSTORE__LIMITS__LEASED_BYTES_MAX": "1 GiB"}
    environment = {**os.environ, **settings}
    with Sidecar("--capacity", "64 MiB", environment=environment, plane="remote") as sidecar:
        tokens, kv = large_cache(1, 24)
        with connect(sidecar.address) as client:
            assert client.store(large_spec(), tokens, kv).wait(20.0) is Durability.MEMORY
            before = plane_process(sidecar).memory_info().rss
            with Peer(sidecar) as slow:
                streams = [slow.fetch(large_spec(), tokens) for _ in range(4)]
                for stream in streams:
                    next(stream)
                assert left(sidecar)[1] > 0
                for _ in range(3):
                    assert client.fetch(large_spec(), tokens[:512]).token_count == 512
                until(lambda: left(sidecar)[1] == 0)
                grown = plane_process(sidecar).memory_info().rss - before
                assert grown < 24 * (2 << 20) + (64 << 20), "more than a few messages of each stream are held"
                for stream in streams:
                    assert status(lambda stream=stream: list(stream)) in ("DEADLINE_EXCEEDED", "CANCELLED")
            assert client.fetch(large_spec(), tokens).token_count == tokens.size
        until(lambda: left(sidecar) == (0,) * 7)


def test_a_revoked_lease_ends_the_stream_with_stale() -> None:
    """A reader that pauses; the lease is revoked for its age, the extents are refilled: what comes is right or lost."""
    environment = {**os.environ, "KVSTORE__LIMITS__LEASE_AGE_S_MAX": "0"}
    with Sidecar("--capacity", "64 MiB", environment=environment, plane="remote") as sidecar:
        tokens, kv = large_cache(1, 30)
        with connect(sidecar.address) as client, Peer(sidecar) as slow:
            client.store(large_spec(), tokens, kv).wait(20.0)
            stream = slow.fetch(large_spec(), tokens)
            next(stream)
            refill, cache = large_cache(2, 28)
            assert client.store(large_spec(), refill, cache).wait(20.0) is Durability.MEMORY
            assert client.stats().counters["leases_revoked"] >= 1
            lost = [news for message in stream for news in split_message(rpb.FetchBytesResponse, message)[0].lost]
            assert {news.lost for news in lost} == {int(MissReason.STALE)}


CLIENT = """
import os, sys, threading
from kvstore_client import connect
from tests.e2e.test_failures import large_cache, large_spec
client = connect(sys.argv[1])
tokens, kv = large_cache(8)
point = sys.argv[2]
if point == "store.stream":
    import kvstore_client.planes.stream.store as storing
    build, count = storing.StreamUpload._build, []
    def dying(self, pieces):
        count.append(1)
        if len(count) == 4:
            os._exit(9)
        return build(self, pieces)
    storing.StreamUpload._build = dying
client.faults.arm(point, lambda: os._exit(9))
client.store(large_spec(), tokens, kv).wait()
client.fetch(large_spec(), tokens)
"""


@pytest.mark.parametrize("point", ["store.stream", "store.staged", "fetch.copy.middle"])
def test_a_client_killed_in_a_stream_leaves_nothing(own_remote: Sidecar, point: str) -> None:
    with connect(own_remote.address) as client:
        client.stats()
    until(lambda: left(own_remote) == (0,) * 7)
    process = plane_process(own_remote)
    before = process.num_fds()
    for _ in range(3):
        command = [sys.executable, "-c", CLIENT, own_remote.address, point]
        done = CLIENTS.run(command, timeout=60)
        assert done.returncode == 9, done.stderr
    until(lambda: left(own_remote) == (0,) * 7)
    until(lambda: process.num_fds() <= before)
    with connect(own_remote.address) as client:
        tokens, kv = large_cache(8)
        assert client.store(large_spec(), tokens, kv).wait(10.0) is Durability.MEMORY
        assert client.fetch(large_spec(), tokens).token_count == CHUNKS * 512


def test_the_remote_planes_process_dies_and_comes_back() -> None:
    with Sidecar("--capacity", "32 MiB", plane="remote") as sidecar:
        tokens, kv = tokens_of(40), random_cache(SPEC, 40)
        with connect(sidecar.address) as client, connect(sidecar.socket_address) as local:
            client.store(SPEC, tokens, kv).wait(10.0)
            plane_process(sidecar).kill()
            assert local.fetch(SPEC, tokens).token_count == 40
            until(lambda: client.fetch(SPEC, tokens).token_count == 40, 30.0)
            assert local.stats().sessions.session_count == 2


def test_the_remote_planes_process_ends_with_the_sidecar(own_remote: Sidecar) -> None:
    process = plane_process(own_remote)
    own_remote.stop(kill=True)
    process.wait(10.0)


@pytest.fixture
def own_remote() -> Iterator[Sidecar]:
    with Sidecar("--capacity", "32 MiB", plane="remote") as running:
        yield running


def store_message(reservation: int, data: bytes, **changes: Any) -> bytes:
    import xxhash

    fields: dict[str, Any] = {
        "reservation_id": reservation, "checksum": xxhash.xxh3_128_digest(data),
        "runs": [rpb.StripRun(chunk=0, strip_first=0, strip_count=4, byte_count=len(data))], **changes,
    }  # fmt: skip
    return data_message(rpb.StoreBytesRequest(**fields), [np.frombuffer(data, np.uint8)])


def test_bad_store_streams_are_refused(remote: Sidecar) -> None:
    data = os.urandom(8192)
    with Peer(remote) as peer:
        reservation = peer.reserve(SPEC, 1, 77)
        good = store_message(reservation, data)
        flipped = bytearray(good)
        flipped[-5] ^= 1
        run = rpb.StripRun(chunk=0, strip_first=0, strip_count=4, byte_count=9000)
        cases = [
            (bytes(flipped), "DATA_LOSS"),
            (good[:-1], "INVALID_ARGUMENT"),
            (good + b"x", "INVALID_ARGUMENT"),
            (b"", "INVALID_ARGUMENT"),
            (os.urandom(100), "INVALID_ARGUMENT"),
            (b"\xff" * 100, "INVALID_ARGUMENT"),
            (store_message(reservation, data, runs=[run]), "INVALID_ARGUMENT"),
            (store_message(reservation, data, runs=[]), "INVALID_ARGUMENT"),
            (store_message(reservation + 999, data), "INVALID_ARGUMENT"),
            (
                store_message(reservation, data[:64], runs=[rpb.StripRun(strip_count=99, byte_count=64)]),
                "INVALID_ARGUMENT",
            ),
        ]
        for message, expected in cases:
            call = lambda message=message: [peer.call("stream_unary", "StoreBytes", iter([message]), timeout=10)]  # noqa: E731
            assert status(call) == expected
        assert rpb.StoreBytesResponse.FromString(
            peer.call("stream_unary", "StoreBytes", iter([good]), timeout=10)
        ).byte_count == len(data)
        assert status(lambda: [peer.call("stream_unary", "StoreBytes", iter([good]), timeout=10)]) == "INVALID_ARGUMENT"
    until(lambda: left(remote) == (0,) * 7)


@pytest.mark.parametrize("empty_count", [1, RUNS_MAX - 1])
def test_runs_without_the_bytes_of_their_strips_are_refused_by_name(remote: Sidecar, empty_count: int) -> None:
    """However many a message may have: what they name would be filled from other strips' bytes."""
    data = os.urandom(8192)
    whole = rpb.StripRun(chunk=0, strip_count=4, byte_count=len(data))
    with Peer(remote) as peer:
        reservation = peer.reserve(SPEC, 1, 78)
        for strip_count, byte_count in ((1, 0), (0, 0), (0, 64), (2, 64), (1, 63)):
            lacking = rpb.StripRun(chunk=0, strip_count=strip_count, byte_count=byte_count)
            rest = rpb.StripRun(chunk=0, strip_count=4, byte_count=len(data) - byte_count)
            runs = [rest, lacking] if byte_count else [whole, *[lacking] * empty_count]
            message = store_message(reservation, data, runs=runs)
            with pytest.raises(grpc.RpcError, match=r"runs\[1\] has") as refused:
                peer.call("stream_unary", "StoreBytes", iter([message]), timeout=20)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        good = store_message(reservation, data)
        peer.call("stream_unary", "StoreBytes", iter([good]), timeout=10)
    until(lambda: left(remote) == (0,) * 7)


def test_more_streams_than_messages_have_room_store_all_that_they_bring(remote: Sidecar) -> None:
    """They take turns."""
    prompts = [(tokens_of(40, 900 + number), random_cache(SPEC, 40, number)) for number in range(SESSION_MESSAGES * 3)]
    with connect(remote.address) as client, ThreadPoolExecutor(len(prompts)) as threads:
        receipts = list(threads.map(lambda each: client.store(SPEC, *each), prompts))
        assert [receipt.wait(30.0) for receipt in receipts] == [Durability.MEMORY] * len(prompts)
        for tokens, kv in prompts:
            fetched = client.fetch(SPEC, tokens)
            assert fetched.token_count == 40
            assert all((bits(k) == ours[0]).all() for (k, _), ours in zip(fetched, kv, strict=True))


@pytest.mark.parametrize(
    "fields", [{"head_first": 1, "head_count": 2}, {"head_count": 3}, {"head_first": 1 << 31, "head_count": 1 << 31}]
)
def test_heads_that_are_not_there_are_refused(remote: Sidecar, fields: dict[str, int]) -> None:
    with Peer(remote) as peer:
        assert status(peer.fetch(SPEC, tokens_of(16), **fields)) == "INVALID_ARGUMENT"


def test_garbage_and_unknown_calls_are_refused(remote: Sidecar) -> None:
    with Peer(remote) as peer:
        assert status(peer.call("unary_stream", "FetchBytes", b"\xff" * 50, timeout=10)) == "INVALID_ARGUMENT"
        query = rpb.FetchBytesRequest(fetch=pb.FetchRequest(query=pb.ChainQuery(fingerprint=b"x" * 32)))
        call = peer.call("unary_stream", "FetchBytes", query.SerializeToString(), timeout=10)
        assert status(call) == "INVALID_ARGUMENT"
        version = peer.call("unary_stream", "Connect", rpb.ConnectRequest(version=9).SerializeToString(), timeout=10)
        assert status(version) == "INVALID_ARGUMENT"
        for method in ("/kvstore.v1.CacheService/Fetch", "/grpc.health.v1.Health/Check", "/x/y"):
            assert status(peer.call("unary_stream", method, b"", timeout=10)) == "UNIMPLEMENTED"


@pytest.mark.parametrize("what", ["flip", "swap", "twice", "drop", "early", "header", "behind"])
def test_a_confused_server_is_a_miss(own_remote: Sidecar, what: str) -> None:
    """Bytes that changed on the way, strips left out or sent twice: never wrong bytes."""
    spec, count = large_spec(), 4 * 512
    tokens, kv = large_cache(3, 4)
    with connect(own_remote.address) as client:
        client.store(spec, tokens, kv).wait(10.0)
        session = client.connect_now()
        honest = session.fetch_bytes

        def confused(*arguments: Any, **options: Any) -> Any:
            class Stream:
                def __init__(self) -> None:
                    self.inner = honest(*arguments, **options)
                    self.messages = self.changed()

                def changed(self) -> Iterator[bytes]:
                    for number, message in enumerate(self.inner):
                        if number != 2:
                            yield message
                            continue
                        fields, data = split_message(rpb.FetchBytesResponse, message)
                        fields.ClearField("padding")
                        data = data.copy()
                        if what == "flip":
                            data[-1000] ^= 4
                        elif what == "swap":
                            fields.runs[0].strip_first, fields.runs[0].strip_count = 4, 1
                        elif what == "header":
                            fields.runs[0].strip_count = 0
                        elif what == "behind":  # the first heads of a slab are left out
                            run = fields.runs[0]
                            half, heads = run.byte_count // 2, run.strip_count // 2
                            data = data[half:]
                            run.strip_first, run.strip_count, run.byte_count = run.strip_first + heads, heads, half
                        if what == "early":
                            return
                        for _ in range({"drop": 0, "twice": 2}.get(what, 1)):
                            yield data_message(fields, [data])

                def __iter__(self) -> Any:
                    return self

                def __next__(self) -> bytes:
                    return next(self.messages)

                def cancel(self) -> None:
                    self.inner.cancel()

            return Stream()

        session.fetch_bytes = confused
        fetched = client.fetch(spec, tokens)
        for layer, (k, v) in enumerate(fetched):
            assert (bits(k) == kv[layer][0][:, : fetched.token_count]).all()
            assert (bits(v) == kv[layer][1][:, : fetched.token_count]).all()
        if what == "twice":
            assert fetched.token_count == count
        else:
            assert fetched.token_count < count
            assert fetched.reason in (MissReason.CORRUPT, MissReason.UNAVAILABLE)
        session.fetch_bytes = honest
        assert client.fetch(spec, tokens).token_count == count
