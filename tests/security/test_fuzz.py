"""Bytes nobody meant, at both doors. Whatever comes: a status that says it was the caller's fault, and the service
goes on with its accounts in order."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvstore_ops.sidecar import Sidecar

from kvstore.v1 import cache_pb2 as pb
from kvstore.wire import METADATA_SESSION, spec_to_message
from tests.server.raw import Handoff, Raw, eventually
from tests.specs import odd_spec, small_spec, tokens_of

SPEC = small_spec(model_id="fuzz")
METHODS = {
    "RegisterModel": pb.RegisterModelRequest, "Lookup": pb.LookupRequest, "Store": pb.StoreRequest,
    "Fetch": pb.FetchRequest, "Release": pb.ReleaseRequest,
}  # fmt: skip
CALLERS_FAULT = {"OK", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}
U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
SMALL = st.integers(0, 5)


@pytest.fixture(scope="module")
def server() -> Iterator[Sidecar]:
    with Sidecar("--capacity", "16 MiB") as own:
        yield own
        assert "Traceback" not in (own.directory / "log").read_text()


@pytest.fixture
def raw(server: Sidecar) -> Iterator[Raw]:
    """A session per test. What it left behind is gone when the next one looks, and the server is the same."""
    with Raw(server) as session:
        yield session
    with Raw(server) as witness:
        eventually(lambda: witness.stats().sessions.session_count == 1)
        stats = witness.stats()
        assert (stats.sessions.reservation_count, stats.sessions.lease_count, stats.arena.reserved_bytes) == (0, 0, 0)
        assert stats.server_pid == server.pid


@pytest.fixture
def name(raw: Raw) -> bytes:
    """A registered model's fingerprint, with three chunks stored."""
    return raw.query(SPEC, raw.store(SPEC, 3)).fingerprint


def status_of_bytes(raw: Raw, method: str, data: bytes) -> str:
    call = raw.channel.unary_unary(f"/kvstore.v1.CacheService/{method}")
    try:
        call(data, timeout=5, metadata=((METADATA_SESSION, raw.secret),))
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


@given(method=st.sampled_from(sorted(METHODS)), data=st.binary(max_size=600))
@settings(max_examples=150)
def test_garbage(raw: Raw, method: str, data: bytes) -> None:
    assert status_of_bytes(raw, method, data) in CALLERS_FAULT


def examples(raw: Raw, name: bytes) -> dict[str, Any]:
    """One good message of each kind."""
    query = raw.query(SPEC, tokens_of(64))
    odd = odd_spec("float16", 2, 8, 16, 16)
    reserve = pb.Reserve(query=query, token_digests=bytes(128), tail_token_count=3, first_position=9)
    return {
        "RegisterModel": pb.RegisterModelRequest(spec=spec_to_message(odd)),
        "Lookup": pb.LookupRequest(query=query),
        "Fetch": pb.FetchRequest(query=query),
        "Store": pb.StoreRequest(reserve=reserve),
        "Release": pb.ReleaseRequest(lease_ids=[1, 2**63]),
    }


@given(st.data())
@settings(max_examples=200)
def test_good_messages_cut_short_or_damaged(raw: Raw, name: bytes, data: st.DataObject) -> None:
    method = data.draw(st.sampled_from(sorted(METHODS)))
    message = bytearray(examples(raw, name)[method].SerializeToString())
    for place in data.draw(st.lists(st.integers(0, len(message) - 1), max_size=3)):
        message[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(message)))
    assert status_of_bytes(raw, method, bytes(message[:cut])) in CALLERS_FAULT


def test_a_message_past_the_limit(raw: Raw) -> None:
    huge = pb.LookupRequest(query=pb.ChainQuery(digests=bytes(17 << 20))).SerializeToString()
    assert status_of_bytes(raw, "Lookup", huge) == "RESOURCE_EXHAUSTED"


def test_a_chain_past_the_limit_names_the_setting(raw: Raw, name: bytes) -> None:
    query = pb.ChainQuery(fingerprint=name, digests=bytes(32 * 70_000))
    with pytest.raises(grpc.RpcError) as caught:
        raw.call("Lookup", pb.LookupRequest(query=query))
    assert "limits.token_count_max" in caught.value.details()


LAYERS = st.builds(
    pb.LayerSpec, kind=st.integers(0, 7), kv_heads=SMALL | U32, k_dim=SMALL | U32, v_dim=SMALL | U32,
    window=SMALL | U32, group=SMALL | U32,
)  # fmt: skip
ANY_FLOAT = st.floats(allow_nan=True, allow_infinity=True)
SPECS = st.builds(
    pb.ModelSpec,
    model_id=st.text(max_size=20),
    weights_digest=st.sampled_from(["ab" * 32, "unverified:x", "", "AB" * 32, "ab" * 400]),
    adapter_id=st.text(max_size=5),
    layers=st.lists(LAYERS, max_size=4),
    hidden_size=SMALL | U32,
    vocab_size=SMALL | U64,
    cache_dtype=st.sampled_from(["bfloat16", "float8_e4m3fn", "float32", "int1", ""]),
    hidden_dtype=st.sampled_from(["bfloat16", "float32", "x"]),
    rope=st.builds(
        pb.RopeSpec, theta=ANY_FLOAT, kind=st.text(max_size=5), rotary_dim=U32,
        factors=st.lists(st.builds(pb.RopeFactor, name=st.text(max_size=4), value=ANY_FLOAT), max_size=2),
        mrope=st.lists(U32, max_size=3),
    ),
    chunk_tokens=st.sampled_from([0, 1, 16, 65536, 65537, 2**32 - 1]),
    mla=st.booleans(),
    keeps_e=st.booleans(),
    tokenizer_digest=st.sampled_from(["", "ab" * 32, "unverified:x", "AB" * 32]),
    scales=st.lists(st.builds(pb.LayerScales, k=ANY_FLOAT, v=ANY_FLOAT), max_size=4),
)  # fmt: skip


@given(SPECS)
@settings(max_examples=150)
def test_any_spec(raw: Raw, spec: pb.ModelSpec) -> None:
    assert raw.status("RegisterModel", pb.RegisterModelRequest(spec=spec)) in CALLERS_FAULT


def queries(name: bytes) -> st.SearchStrategy[pb.ChainQuery]:
    digest = st.sampled_from([bytes(32), b"a" * 32, b"b" * 32, b"short"])
    return st.builds(
        pb.ChainQuery,
        fingerprint=st.sampled_from([name, name, name, b"", b"x" * 32]),
        digests=st.lists(digest, max_size=6).map(b"".join),
        hidden_layers=st.lists(SMALL | U32, max_size=3),
        exactness=st.integers(0, 3),
        provenance=st.integers(0, 3),
        hidden_only=st.booleans(),
    )


def chains(name: bytes) -> st.SearchStrategy[pb.ChainQuery]:
    """Well-formed ones."""
    digest = st.sampled_from([bytes([number]) * 32 for number in range(1, 9)])
    return st.builds(
        pb.ChainQuery,
        fingerprint=st.just(name),
        digests=st.lists(digest, min_size=1, max_size=6, unique=True).map(b"".join),
        hidden_layers=st.lists(st.integers(0, 1), max_size=2, unique=True),
    )


@given(st.data())
@settings(max_examples=150)
def test_any_query(raw: Raw, name: bytes, data: st.DataObject) -> None:
    query = data.draw(queries(name))
    assert raw.status("Lookup", pb.LookupRequest(query=query)) in CALLERS_FAULT
    segments = data.draw(st.lists(queries(name), max_size=3))
    assert raw.status("Lookup", pb.LookupRequest(query=query, segments=segments)) in CALLERS_FAULT
    assert raw.status("Fetch", pb.FetchRequest(query=query)) in CALLERS_FAULT


def reserved(raw: Raw, reserve: pb.Reserve) -> int:
    """The reservation's id, or 0 when the call was refused for the caller's fault."""
    try:
        return int(raw.call("Store", pb.StoreRequest(reserve=reserve)).reservation_id)
    except grpc.RpcError as error:
        if error.code().name not in CALLERS_FAULT:
            raise
        return 0


@given(st.data())
@settings(max_examples=150)
def test_any_store_step_ends_and_leaves_no_room_behind(raw: Raw, name: bytes, data: st.DataObject) -> None:
    """Reserve, fill and commit of anything. What was reserved is given back at the latest by the abort."""
    query = data.draw(queries(name) | chains(name))
    fitting = len(query.digests)
    reserve = pb.Reserve(
        query=query,
        token_digests=bytes(data.draw(st.sampled_from([fitting, fitting, fitting, fitting + 32, 31]))),
        tail_token_count=data.draw(SMALL | U32),
        first_position=data.draw(SMALL | U64),
    )
    fills = data.draw(
        st.lists(
            st.builds(
                pb.Fill, chunk=SMALL | U32, strip_first=SMALL | U32, strip_count=SMALL | U32,
                staging_id=SMALL | U32, staging_offset=SMALL | U64,
            ),
            max_size=3,
        )
    )  # fmt: skip
    is_committed_first = data.draw(st.booleans())  # all is drawn before anything is done
    reservation = reserved(raw, reserve)
    if not reservation:
        return
    steps = [
        pb.StoreRequest(fill=pb.FillStrips(reservation_id=reservation, fills=fills)),
        pb.StoreRequest(commit=pb.Commit(reservation_id=reservation, fills=fills)),
    ]
    for step in reversed(steps) if is_committed_first else steps:
        assert raw.status("Store", step) in CALLERS_FAULT
    assert raw.status("Store", pb.StoreRequest(abort=pb.Abort(reservation_id=reservation))) == "OK"
    stats = raw.stats()
    assert (stats.arena.reserved_bytes, stats.sessions.reservation_count) == (0, 0)


@given(st.data())
@settings(max_examples=60)
def test_a_filled_store_with_odd_numbers_commits_or_is_refused(raw: Raw, name: bytes, data: st.DataObject) -> None:
    """The whole way to a packed header, with positions and tails at the edges of their types."""
    tokens = tokens_of(32, data.draw(st.integers(100, 2**31)))
    position = data.draw(st.sampled_from([0, 2**31, 2**63 - 8, 2**63, 2**64 - 17, 2**64 - 1]))
    reserve = pb.Reserve(query=raw.query(SPEC, tokens), token_digests=bytes(64), first_position=position)
    reservation = reserved(raw, reserve)
    if not reservation:
        return
    fills, memory = raw.staged(SPEC, 2)
    commit = pb.Commit(reservation_id=reservation, fills=fills)
    assert raw.status("Store", pb.StoreRequest(commit=commit)) in CALLERS_FAULT
    assert raw.status("Store", pb.StoreRequest(abort=pb.Abort(reservation_id=reservation))) == "OK"
    memory.close()
    raw.exchange(op="staging_close", staging_id=fills[0].staging_id)
    stats = raw.stats()
    assert (stats.arena.reserved_bytes, stats.sessions.reservation_count) == (0, 0)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
OPERATIONS = st.sampled_from(["hello", "regions", "staging", "staging_close", "x", ""])
REQUESTS = st.fixed_dictionaries(
    {"op": OPERATIONS | JSON}, optional={"version": JSON, "have": JSON, "bytes": JSON, "staging_id": JSON}
)


PACKETS = st.binary(min_size=1, max_size=300) | REQUESTS.map(lambda request: json.dumps(request).encode())


@given(PACKETS)
@settings(max_examples=150)
def test_any_first_packet_at_the_hand_off(sidecar: Sidecar, packet: bytes) -> None:
    with Handoff(sidecar.directory) as door:
        door.send(packet)
        reply, _ = door.receive()
        assert (reply["op"], reply["status"]) == ("error", "INVALID_ARGUMENT")


@given(
    st.lists(
        REQUESTS.map(lambda request: json.dumps(request).encode()) | st.binary(min_size=1, max_size=99), max_size=6
    )
)
@settings(max_examples=80)
def test_any_conversation_at_the_hand_off(sidecar: Sidecar, packets: list[bytes]) -> None:
    with Raw(sidecar) as talker, contextlib.suppress(ConnectionError):
        for packet in packets:
            talker.send(packet)
            reply, descriptors = talker.receive()
            talker.descriptors += descriptors
            assert reply["op"] in {"regions", "staging", "ok"} or reply["status"] in CALLERS_FAULT


def test_a_packet_larger_than_the_door(sidecar: Sidecar) -> None:
    with Handoff(sidecar.directory) as door:
        door.send(json.dumps({"op": "hello", "version": 1, "padding": "x" * 150_000}).encode())
        assert door.receive()[0]["status"] == "INVALID_ARGUMENT"


HURTFUL = (b"[" * 60_000, b'{"a":' * 10_000, b"9" * 60_000, b'{"op": "hello", "version": ' + b"9" * 6000 + b"}")


@pytest.mark.parametrize("packet", HURTFUL, ids=["lists", "objects", "digits", "version"])
def test_json_that_hurts_parsers(sidecar: Sidecar, packet: bytes) -> None:
    with Handoff(sidecar.directory) as door:
        door.send(packet)
        assert door.receive()[0]["status"] == "INVALID_ARGUMENT"


@given(junk=st.binary(min_size=1, max_size=400))
@settings(max_examples=30)
def test_bytes_that_are_no_http2_at_the_grpc_socket(sidecar: Sidecar, junk: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as plain:
        plain.connect(str(sidecar.directory / "run" / "kvstore.sock"))
        plain.sendall(junk)
    with Raw(sidecar) as after:
        assert after.stats().server_pid == sidecar.pid
