"""Calls that last take no places from others: however many a tenant's clients hold, its other calls are served."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from kvstore_client import connect
from kvstore_ops.sidecar import Sidecar

from kvstore.v1 import cache_pb2 as pb
from kvstore.v1alpha import prefill_pb2_grpc
from kvstore.wire import METADATA_SESSION
from tests.server.raw import Raw, eventually
from tests.specs import small_spec, tokens_of

MOST = 20
OVER = threading.Event()
"""Set at the end: threads of gRPC wait for it that read what is sent."""
Held = Callable[[Raw], Any]


@pytest.fixture(scope="module")
def small() -> Iterator[Sidecar]:
    limits = {"CALL_COUNT_MAX": str(MOST), "WATCHER_COUNT_MAX": "1000", "STREAM_COUNT_MAX": "1000"}
    environment = {**os.environ, **{f"KVSTORE__LIMITS__{name}": value for name, value in limits.items()}}
    with Sidecar("--capacity", "8 MiB", environment=environment) as one:
        yield one
        OVER.set()


def watch(raw: Raw) -> Any:
    call = raw.cache.Watch(pb.WatchRequest(), timeout=60, metadata=((METADATA_SESSION, raw.secret),))
    next(call)
    return call


def health(raw: Raw) -> Any:
    stub = health_pb2_grpc.HealthStub(raw.channel)  # type: ignore[no-untyped-call]  # generated
    call = stub.Watch(health_pb2.HealthCheckRequest(), timeout=60)
    next(call)
    return call


def silent(*first: Any) -> Iterator[Any]:
    """Requests of a caller that sends these, and then nothing, and holds its stream."""
    yield from first
    OVER.wait()


def reflection(raw: Raw) -> Any:
    stub = reflection_pb2_grpc.ServerReflectionStub(raw.channel)  # type: ignore[no-untyped-call]  # generated
    call = stub.ServerReflectionInfo(silent(reflection_pb2.ServerReflectionRequest(list_services="")), timeout=60)
    assert next(call).list_services_response.service
    return call


@pytest.mark.parametrize("held", [watch, health, reflection])
def test_others_are_served_however_many_calls_last(small: Sidecar, held: Held) -> None:
    with Raw(small) as raw, connect(small.address) as client:
        calls = [held(raw) for _ in range(MOST)]
        for _ in range(MOST):
            with pytest.raises(grpc.RpcError) as caught:
                held(raw)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "raise limits.call_count_max" in caught.value.details()
        assert client.stats().sessions.session_count == 2
        for call in calls:
            call.cancel()
        eventually(lambda: is_taken(held, raw))


def is_taken(held: Held, raw: Raw) -> bool:
    """Return True when such a call is served again, which takes until the server has heard that others ended."""
    try:
        held(raw).cancel()
    except grpc.RpcError:
        return False
    return True


def test_prefills_that_wait_for_their_callers_are_counted(small: Sidecar) -> None:
    """Their first messages do not come."""
    with Raw(small) as raw, connect(small.address) as client:
        stub = prefill_pb2_grpc.PrefillServiceStub(raw.channel)  # type: ignore[no-untyped-call]  # generated
        metadata = ((METADATA_SESSION, raw.secret),)
        calls = [stub.PartialPrefill(silent(), timeout=60, metadata=metadata) for _ in range(MOST)]
        eventually(lambda: client.stats().sessions.stream_count == MOST)
        with pytest.raises(grpc.RpcError) as caught:
            watch(raw)
        assert "raise limits.call_count_max" in caught.value.details()
        for call in calls:
            call.cancel()
        eventually(lambda: client.stats().sessions.stream_count == 0)


def test_calls_that_wait_for_others_leave_places_to_those_that_last(small: Sidecar) -> None:
    """Commits of stores whose other shard does not come: what comes beyond them is told the limit, and watches are
    served."""
    spec = small_spec(model_id="waiting")
    with Raw(small) as raw:
        calls = []
        for number in range(MOST):
            reserved = raw.reserve(spec, tokens_of(spec.chunk_tokens, number), shards=2)
            commit = pb.StoreRequest(commit=pb.Commit(reservation_id=reserved.reservation_id))
            calls.append(raw.cache.Store.future(commit, timeout=60, metadata=((METADATA_SESSION, raw.secret),)))

        def refusal() -> str:
            try:
                raw.stats()
            except grpc.RpcError as error:
                return str(error.details())
            return ""

        eventually(lambda: "raise limits.call_count_max" in refusal())
        watch(raw).cancel()
        for call in calls:
            call.cancel()
        eventually(lambda: refusal() == "")
