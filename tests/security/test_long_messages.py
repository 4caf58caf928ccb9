"""One message of one tenant, as long as it can be: it costs its sender an answer, and nobody else their time."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvstore_client.opaque.value import Key, namespace_spec
from kvstore_ops.bench.lookup import cpu_seconds
from kvstore_ops.sidecar import TOKEN, Sidecar

from kvstore.chunk import layout_of
from kvstore.keys import chain_digests
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1 import remote_pb2 as rpb
from kvstore.wire import METADATA_SESSION, METADATA_TOKEN, spec_to_message
from tests.security.tenancy import client_of, tenants_sidecar
from tests.server.raw import Raw
from tests.specs import small_spec, tokens_of

STALL_S_MAX = 2.0
SPEC = small_spec()
CALLS_AT_ONCE = 8


@pytest.fixture(scope="module")
def shared() -> Iterator[Sidecar]:
    with tenants_sidecar("--capacity", "8 MiB", KVSTORE__CONTROLLER__DEADLINE_S="500ms") as running:
        yield running


@contextmanager
def watched(sidecar: Sidecar) -> Iterator[list[float]]:
    """The server's processor seconds during each call of tenant b meanwhile: other processes may slow the clock's."""
    took: list[float] = []
    ended = threading.Event()

    def call(client: Any) -> None:
        while not ended.is_set():
            before_s = cpu_seconds(sidecar.pid)
            client.stats()
            took.append(cpu_seconds(sidecar.pid) - before_s)

    with client_of(sidecar, "b") as client:
        caller = threading.Thread(target=call, args=(client,))
        caller.start()
        try:
            yield took
        finally:
            ended.set()
            caller.join()
    assert took, "tenant b was never answered"


def statuses(raw: Raw, method: str, request: Any, count: int = 1) -> set[str]:
    """How so many calls at once end."""
    stub, metadata = getattr(raw.cache, method), ((METADATA_SESSION, raw.secret),)
    if method == "Fetch":
        calls = [stub(request, timeout=60, metadata=metadata) for _ in range(count)]
    else:
        calls = [stub.future(request, timeout=60, metadata=metadata) for _ in range(count)]
    ends = set()
    for call in calls:
        try:
            list(call) if method == "Fetch" else call.result()
            ends.add("OK")
        except grpc.RpcError as error:
            ends.add(error.code().name)
    return ends


def with_layers(query: pb.ChainQuery, count: int) -> pb.FetchRequest:
    """Written by hand: a list of millions takes Python seconds."""
    layers = rpb.StoreBytesRequest(checksum=b"\x01" * count).SerializeToString()
    return pb.FetchRequest.FromString(pb.FetchRequest(query=query).SerializeToString() + b"\x12" + layers[1:])


def registered(raw: Raw, spec: Any) -> bytes:
    name: bytes = raw.call("RegisterModel", pb.RegisterModelRequest(spec=spec_to_message(spec))).fingerprint
    return name


def test_long_lists_of_one_tenant_stall_nobody(shared: Sidecar) -> None:
    with Raw(shared, "a") as a:
        query = a.query(SPEC, a.store(SPEC, 2))
        segment = pb.ChainQuery(fingerprint=query.fingerprint, digests=bytes(32))
        for method, request in (
            ("Lookup", pb.LookupRequest(query=query, segments=[segment] * 200_000)),
            ("Fetch", with_layers(query, 15_000_000)),
        ):
            with watched(shared) as took:
                assert statuses(a, method, request, CALLS_AT_ONCE) == {"INVALID_ARGUMENT"}
            assert max(took) < STALL_S_MAX, method


def test_names_to_replace_are_few_and_waiting_for_one_costs_nothing(shared: Sidecar) -> None:
    """A value that is being read cannot be replaced; whoever waits for it names half a million others."""
    name, key = b"", Key.of("k").whole
    with Raw(shared, "a") as a, client_of(shared, "a") as client:
        name = registered(a, namespace_spec("values"))
        client.put_bytes("values", "k", b"v").wait(10)
        query = pb.ChainQuery(fingerprint=name, digests=key, exactness=pb.EXACTNESS_EXACT)
        a.call("Fetch", pb.FetchRequest(query=query))
        for count in (500_000, 1000):
            reserve = pb.Reserve(
                query=query, token_digests=key, tail_token_count=1, replaces=key + os.urandom(32 * count)
            )
            with watched(shared) as took:
                ends = statuses(a, "Store", pb.StoreRequest(reserve=reserve), CALLS_AT_ONCE)
            assert ends == ({"INVALID_ARGUMENT"} if count > 1000 else {"UNAVAILABLE"})
            assert max(took) < STALL_S_MAX, count


def test_a_long_chain_within_the_limits_is_answered_in_steps(shared: Sidecar) -> None:
    """A million tokens in chunks of 8, in eight calls at once; of them 3 chunks are stored."""
    spec = small_spec(model_id="long", chunk_tokens=8)
    with Raw(shared, "a") as a:
        tokens = a.store(spec, 3)
        there = a.query(spec, tokens).digests
        long = pb.ChainQuery(fingerprint=a.query(spec, tokens).fingerprint, digests=there + os.urandom(32 * 131_000))
        with watched(shared) as took:
            assert statuses(a, "Lookup", pb.LookupRequest(query=long), CALLS_AT_ONCE) == {"OK"}
        assert max(took) < STALL_S_MAX
        found = a.call("Lookup", pb.LookupRequest(query=long))
        assert (found.hit_count, [run.count for run in found.runs]) == (3, [3, 131_000])
        assert [run.state for run in found.runs] == [pb.CHUNK_STATE_HIT, pb.CHUNK_STATE_MISS]
        one = a.call("Lookup", pb.LookupRequest(query=pb.ChainQuery(fingerprint=long.fingerprint, digests=there)))
        assert one.runs[0] == found.runs[0]


def test_a_long_chain_that_finds_no_room_is_refused_in_steps(shared: Sidecar) -> None:
    spec = small_spec(model_id="wide", chunk_tokens=8)
    count = 131_000
    with Raw(shared, "a") as a:
        digests = os.urandom(32 * count)
        query = pb.ChainQuery(fingerprint=registered(a, spec), digests=digests)
        reserve = pb.Reserve(query=query, token_digests=digests)
        with watched(shared) as took:
            assert statuses(a, "Store", pb.StoreRequest(reserve=reserve)) == {"OK"}
        assert max(took) < STALL_S_MAX


def test_many_fills_begin_in_steps_and_all_of_them_count(shared: Sidecar) -> None:
    """A fill per strip: more than are begun at once."""
    spec = small_spec(model_id="strips")
    layout = layout_of(spec, spec.kind, spec.chunk_tokens)
    tokens = tokens_of(spec.chunk_tokens * 40)
    with Raw(shared, "a") as a:
        whole, memory = a.staged(spec, 40)
        fills = [
            pb.Fill(
                chunk=each.chunk, strip_first=strip, strip_count=1, staging_id=each.staging_id,
                staging_offset=each.staging_offset + int(layout.strip_offsets[strip]),
            )
            for each in whole for strip in range(layout.strip_count)
        ]  # fmt: skip
        assert len(fills) > 128
        reserved = a.reserve(spec, tokens)
        commit = pb.Commit(reservation_id=reserved.reservation_id, fills=fills)
        assert a.call("Store", pb.StoreRequest(commit=commit)).committed_count == 40
        memory.close()
    with client_of(shared, "a") as client:
        assert client.fetch(spec, tokens, verify=True).token_count == len(tokens)


# ---------------------------------------------------------------- the remote plane's process


def remote_pid(server: int) -> int:
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    return next(int(each) for each in children if Path(f"/proc/{each}/comm").read_text() != "kvstore-mover\n")


def peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def test_a_long_list_costs_the_remote_plane_no_more_than_its_message() -> None:
    """10 MB of layers, each of which would be a step of the fetch."""
    with Sidecar("--capacity", "8 MiB", plane="remote") as own, grpc.insecure_channel(own.tcp_address) as channel:
        token = (METADATA_TOKEN, f"Bearer {TOKEN}")
        stub = channel.unary_stream("/kvstore.v1.RemoteService/Connect")
        stream = stub(rpb.ConnectRequest(version=1).SerializeToString(), timeout=60, metadata=(token,))
        metadata = (token, (METADATA_SESSION, rpb.ConnectResponse.FromString(next(stream)).secret))
        register = channel.unary_unary("/kvstore.v1.CacheService/RegisterModel")
        spec = pb.RegisterModelRequest(spec=spec_to_message(SPEC)).SerializeToString()
        name = pb.RegisterModelResponse.FromString(register(spec, timeout=20, metadata=metadata)).fingerprint
        pid = remote_pid(own.pid)
        before = peak_bytes(pid)
        query = pb.ChainQuery(fingerprint=name, digests=b"".join(chain_digests(tokens_of(32), 16)))
        for count in (1_000_000, 10_000_000):
            request = rpb.FetchBytesRequest(fetch=with_layers(query, count))
            with pytest.raises(grpc.RpcError) as caught:
                call = channel.unary_stream("/kvstore.v1.RemoteService/FetchBytes")
                next(call(request.SerializeToString(), timeout=60, metadata=metadata))
            assert caught.value.code().name == "INVALID_ARGUMENT"
        assert peak_bytes(pid) - before < 100 << 20
        stream.cancel()
