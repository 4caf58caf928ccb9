"""The gRPC door: health, reflection, statuses with their fields, and a page for Prometheus."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from kvstore_ops.sidecar import Sidecar

from kvstore.server.rpc import _streaming
from kvstore.spec import ChunkState, Durability, Encoding, EventKind, MissReason, StoreState, Tier
from kvstore.telemetry import Counters
from kvstore.v1 import cache_pb2 as pb
from kvstore.wire import METADATA_ERROR, spec_from_message, spec_to_message
from tests.server.raw import Raw, eventually
from tests.specs import odd_spec, small_spec, tokens_of

SERVICES = ("kvstore.v1.CacheService", "kvstore.v1alpha.AdminService")


@pytest.fixture
def raw(sidecar: Sidecar) -> Iterator[Raw]:
    with Raw(sidecar) as session:
        yield session


@pytest.mark.parametrize("service", ["", *SERVICES])
def test_health_needs_no_session(raw: Raw, service: str) -> None:
    stub = health_pb2_grpc.HealthStub(raw.channel)
    assert stub.Check(health_pb2.HealthCheckRequest(service=service)).status == health_pb2.HealthCheckResponse.SERVING


def test_reflection_names_the_services(raw: Raw) -> None:
    names = set(ProtoReflectionDescriptorDatabase(raw.channel).get_services())
    assert set(SERVICES) | {"grpc.health.v1.Health"} <= names


@pytest.mark.parametrize(
    ("ours", "theirs", "prefix"),
    [
        (ChunkState, pb.ChunkState, "CHUNK_STATE_"), (MissReason, pb.MissReason, "MISS_REASON_"),
        (Tier, pb.Tier, "TIER_"), (Encoding, pb.Encoding, "ENCODING_"), (StoreState, pb.StoreState, "STORE_STATE_"),
        (Durability, pb.Durability, "DURABILITY_"), (EventKind, pb.EventKind, "EVENT_KIND_"),
    ],
)  # fmt: skip
def test_the_numbers_are_the_contracts(ours: Any, theirs: Any, prefix: str) -> None:
    named = {name.removeprefix(prefix): value for name, value in theirs.items() if value}
    assert {each.name: each.value for each in ours if each.value} == named


@pytest.mark.parametrize(
    "spec", [small_spec(), odd_spec("float8_e4m3fn", 3, 8, 4, 7), odd_spec("float16", 1, 16, 8, 64, mla=True)]
)
def test_a_spec_survives_the_wire(spec: Any) -> None:
    assert spec_from_message(pb.ModelSpec.FromString(spec_to_message(spec).SerializeToString())) == spec


def test_lookup_and_fetch_tell_the_prefix_and_why_it_ends(raw: Raw) -> None:
    spec = small_spec(model_id="prefix")
    raw.store(spec, 3, seed=1)
    tokens = tokens_of(5 * spec.chunk_tokens, 1)
    answer = raw.call("Lookup", pb.LookupRequest(query=raw.query(spec, tokens)))
    assert answer.hit_count == 3
    assert [(run.count, run.state) for run in answer.runs] == [(3, pb.CHUNK_STATE_HIT), (2, pb.CHUNK_STATE_MISS)]
    (fetched,) = raw.call("Fetch", pb.FetchRequest(query=raw.query(spec, tokens)))
    assert (fetched.hit_count, fetched.tier, fetched.reason) == (3, pb.TIER_DRAM, pb.MISS_REASON_COLD)
    assert [chunk.index for chunk in fetched.chunks] == [0, 1, 2]
    raw.call("Release", pb.ReleaseRequest(lease_ids=[fetched.lease_id]))
    assert raw.stats().sessions.lease_count == 0


def bad_spec(**changes: Any) -> pb.RegisterModelRequest:
    message = spec_to_message(small_spec())
    for name, value in changes.items():
        setattr(message, name, value)
    return pb.RegisterModelRequest(spec=message)


@pytest.mark.parametrize(
    ("method", "request_", "status"),
    [
        ("RegisterModel", pb.RegisterModelRequest(), "INVALID_ARGUMENT"),
        ("RegisterModel", bad_spec(cache_dtype="int3"), "INVALID_ARGUMENT"),
        ("RegisterModel", bad_spec(chunk_tokens=0), "INVALID_ARGUMENT"),
        ("RegisterModel", bad_spec(weights_digest="nonsense"), "INVALID_ARGUMENT"),
        ("Lookup", pb.LookupRequest(), "INVALID_ARGUMENT"),
        ("Lookup", pb.LookupRequest(query=pb.ChainQuery(fingerprint=b"x" * 32)), "INVALID_ARGUMENT"),
        ("Lookup", pb.LookupRequest(query=pb.ChainQuery(digests=b"short")), "INVALID_ARGUMENT"),
        ("Lookup", pb.LookupRequest(query=pb.ChainQuery(exactness=9)), "INVALID_ARGUMENT"),  # type: ignore[arg-type]
        ("Lookup", pb.LookupRequest(query=pb.ChainQuery(provenance=9)), "INVALID_ARGUMENT"),  # type: ignore[arg-type]
        ("Fetch", pb.FetchRequest(), "INVALID_ARGUMENT"),
        ("Store", pb.StoreRequest(), "INVALID_ARGUMENT"),
        ("Store", pb.StoreRequest(fill=pb.FillStrips(reservation_id=77)), "INVALID_ARGUMENT"),
        ("Store", pb.StoreRequest(commit=pb.Commit(reservation_id=77)), "INVALID_ARGUMENT"),
        ("Store", pb.StoreRequest(abort=pb.Abort(reservation_id=77)), "OK"),
        ("Release", pb.ReleaseRequest(lease_ids=[1, 2, 3]), "OK"),
    ],
)  # fmt: skip
def test_a_bad_call_gets_its_status(raw: Raw, method: str, request_: Any, status: str) -> None:
    assert raw.status(method, request_) == status


def test_a_conflicting_spec_is_refused_by_name(raw: Raw) -> None:
    raw.query(small_spec(model_id="one"), tokens_of(16))
    with pytest.raises(grpc.RpcError) as caught:
        raw.query(small_spec(model_id="one", hidden_size=64), tokens_of(16))
    assert caught.value.code().name == "INVALID_ARGUMENT"
    assert "hidden_size" in caught.value.details()


def test_an_error_carries_its_fields(raw: Raw) -> None:
    spec = small_spec(model_id="fields")
    reservation = raw.reserve(spec, tokens_of(16)).reservation_id
    (fill,), _ = raw.staged(spec, 1)
    fill.staging_offset = 1 << 40
    with pytest.raises(grpc.RpcError) as caught:
        raw.call("Store", pb.StoreRequest(fill=pb.FillStrips(reservation_id=reservation, fills=[fill])))
    fields = json.loads(dict(caught.value.trailing_metadata())[METADATA_ERROR])
    assert fields == {"staging_id": fill.staging_id}


@pytest.mark.parametrize(
    "change",
    [
        {"chunk": 5}, {"strip_first": 9999}, {"strip_count": 0}, {"strip_count": 4_000_000_000},
        {"staging_id": 1 << 31}, {"staging_offset": (1 << 64) - 1},
    ],
)  # fmt: skip
def test_a_fill_out_of_bounds_is_refused_and_a_right_one_still_works(raw: Raw, change: dict[str, int]) -> None:
    spec, tokens = small_spec(model_id=f"fill {change}"), tokens_of(16)
    reservation = raw.reserve(spec, tokens).reservation_id
    (fill,), _ = raw.staged(spec, 1)
    wrong = pb.Fill()
    wrong.CopyFrom(fill)
    for name, value in change.items():
        setattr(wrong, name, value)
    both = pb.FillStrips(reservation_id=reservation, fills=[fill, wrong])
    assert raw.status("Store", pb.StoreRequest(fill=both)) == "INVALID_ARGUMENT"
    commit = pb.Commit(reservation_id=reservation, fills=[fill])
    assert raw.call("Store", pb.StoreRequest(commit=commit)).committed_count == 1


@pytest.mark.parametrize(
    "change",
    [
        {"query_digests": b"a" * 64}, {"query_digests": bytes(32) + b"b" * 32}, {"first_position": 1 << 63},
        {"first_position": (1 << 64) - 1}, {"tail_token_count": 16}, {"token_digests": b""},
    ],
)  # fmt: skip
def test_a_chain_that_no_tokens_have_reserves_nothing(raw: Raw, change: dict[str, Any]) -> None:
    query = raw.query(small_spec(model_id="chain"), tokens_of(32))
    query.digests = change.get("query_digests", query.digests)
    fields = {name: value for name, value in change.items() if name != "query_digests"}
    reserve = pb.Reserve(**{"query": query, "token_digests": bytes(64), **fields})
    assert raw.status("Store", pb.StoreRequest(reserve=reserve)) == "INVALID_ARGUMENT"
    assert raw.stats().sessions.reservation_count == 0


def test_an_unfilled_chunk_is_never_visible(raw: Raw) -> None:
    spec, tokens = small_spec(model_id="unfilled"), tokens_of(32)
    reservation = raw.reserve(spec, tokens).reservation_id
    fills, _ = raw.staged(spec, 2)
    answer = raw.call("Store", pb.StoreRequest(commit=pb.Commit(reservation_id=reservation, fills=fills[1:])))
    assert answer.committed_count == 0
    assert raw.call("Lookup", pb.LookupRequest(query=raw.query(spec, tokens))).hit_count == 0
    assert raw.stats().arena.reserved_bytes == 0


@pytest.mark.parametrize("end", ["close", "garbage"])
def test_the_end_of_a_session_frees_all_of_it(raw: Raw, sidecar: Sidecar, end: str) -> None:
    spec = small_spec(model_id=f"end {end}")
    before = raw.stats()
    dying = Raw(sidecar)
    kept = dying.store(spec, 1)
    dying.call("Fetch", pb.FetchRequest(query=dying.query(spec, kept)))
    dying.reserve(spec, tokens_of(64, 9))
    dying.staging(1 << 20)
    during = raw.stats()
    assert during.sessions.lease_count == during.sessions.reservation_count == 1
    assert during.sessions.staging_bytes >= 1 << 20
    assert during.arena.reserved_bytes
    if end == "garbage":
        dying.send(b"\xff\x00")
    else:
        dying.close()
    eventually(lambda: raw.stats().sessions == before.sessions)
    after = raw.stats().arena
    assert (after.reserved_bytes, after.leased_bytes) == (0, 0)
    assert after.used_bytes == during.arena.used_bytes - during.arena.reserved_bytes
    assert raw.call("Lookup", pb.LookupRequest(query=raw.query(spec, kept))).hit_count == 1
    dying.close()


def test_the_metrics_page_agrees_with_stats(sidecar: Sidecar, raw: Raw) -> None:
    spec = small_spec(model_id="metrics")
    raw.store(spec, 2)
    url = json.loads(next(line for line in sidecar_log(sidecar) if '"ready"' in line))["metrics"]
    with urllib.request.urlopen(url, timeout=10) as page:
        text = page.read().decode()
    values = dict(re.findall(r"^(kvstore_\w+) ([\d.e+]+)$", text, re.MULTILINE))
    stats = raw.stats()
    assert float(values["kvstore_arena_used_bytes"]) == stats.arena.used_bytes
    assert float(values["kvstore_arena_capacity_bytes"]) == stats.arena.capacity_bytes
    assert float(values["kvstore_store_committed_chunks_total"]) == stats.counters["store_committed_chunks"]
    assert float(values["kvstore_sessions"]) == 1


def sidecar_log(sidecar: Sidecar) -> list[str]:
    return (sidecar.directory / "log").read_text().splitlines()


def test_every_log_line_is_json_and_none_holds_a_secret(sidecar: Sidecar, raw: Raw) -> None:
    lines = sidecar_log(sidecar)
    assert all({"time", "level", "message"} <= json.loads(line).keys() for line in lines)
    assert raw.secret.hex() not in "\n".join(lines)


async def test_a_stream_that_is_given_up_gives_back_what_it_holds_at_once() -> None:
    held: list[str] = []

    async def inner(*_: Any) -> AsyncGenerator[int]:
        held.append("a lease")
        try:
            yield 1
            yield 2
        finally:
            held.clear()

    handler = _streaming(inner, "Change", Counters())(object(), None)
    assert await anext(handler) == 1
    assert held
    await handler.aclose()
    assert not held
