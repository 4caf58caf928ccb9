"""What bad peers of the remote plane get, and that nothing of theirs stays."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from kvstore_client import connect
from kvstore_ops.sidecar import Sidecar

from kvstore.remote.inbox import SESSION_MESSAGES
from kvstore.spec import Durability, MissReason
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1 import remote_pb2 as rpb
from kvstore.v1alpha import prefill_pb2
from kvstore.wire.data import data_message, split_message
from kvstore.wire.limits import RUNS_MAX
from tests.conftest import CLIENTS
from tests.e2e.remote.peers import SPEC, Peer, left, plane_process, status, store_message
from tests.e2e.test_failures import CHUNKS, large_cache, large_spec, until
from tests.specs import bits, random_cache, tokens_of

PREFILL = "/kvstore.v1alpha.PrefillService/PartialPrefill"


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


def test_who_talks_on_is_told_why_he_was_refused(remote: Sidecar) -> None:
    """The sidecar's own words, and not gRPC's of a message that met them on its way there."""
    early = prefill_pb2.PartialPrefillRequest(end=prefill_pb2.EndPrefill()).SerializeToString()
    with Peer(remote) as peer:
        calls = [peer.call("stream_stream", PREFILL, iter([early] * 6), timeout=10) for _ in range(30)]
        assert {status(call) for call in calls} == {"INVALID_ARGUMENT"}
        assert {call.details() for call in calls} == {"a partial prefill begins with its begin step"}


def test_who_is_refused_for_his_session_is_told_why_although_he_talks() -> None:
    """As above; this refusal needs no message."""
    early = prefill_pb2.PartialPrefillRequest(end=prefill_pb2.EndPrefill()).SerializeToString()
    environment = {**os.environ, "KVSTORE__LIMITS__STREAM_COUNT_MAX": "1"}
    with Sidecar("--capacity", "16 MiB", plane="remote", environment=environment) as own, Peer(own) as peer:
        silence = threading.Event()
        silent = peer.call("stream_stream", PREFILL, iter(silence.wait, True), timeout=30)
        until(lambda: left(own)[4] == 1)
        calls = [peer.call("stream_stream", PREFILL, iter([early]), timeout=10) for _ in range(30)]
        assert {status(call) for call in calls} == {"RESOURCE_EXHAUSTED"}
        assert all("limits.stream_count_max" in call.details() for call in calls)
        silent.cancel()
        silence.set()


def test_a_compressed_message_is_refused(remote: Sidecar) -> None:
    """A few bytes would take as much memory as the largest message."""
    with Peer(remote) as peer:
        for kind, name in (("unary_unary", "/kvstore.v1.CacheService/Lookup"), ("unary_stream", "FetchBytes")):
            call = lambda kind=kind, name=name: peer.call(  # noqa: E731 - as above
                kind, name, bytes(1 << 20), compression=grpc.Compression.Gzip, timeout=10
            )
            assert status(call) == "UNIMPLEMENTED"


@pytest.mark.parametrize("what", ["flip", "swap", "twice", "drop", "early", "header", "behind", "gap"])
def test_a_confused_server_is_a_miss(own_remote: Sidecar, what: str) -> None:
    """Bytes that changed on the way, strips or chunks left out or sent twice: never wrong bytes."""
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
                        if number == 0 and what == "gap":
                            first = rpb.FetchBytesResponse.FromString(message)
                            del first.head.chunks[1]
                            yield first.SerializeToString()
                            continue
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
