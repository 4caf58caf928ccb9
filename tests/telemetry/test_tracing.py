"""Spans of requests, as a receiver of OTLP gets them from a real sidecar; and what calls carry of a trace."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from kvstore_client import connect, connect_async, traced
from kvstore_client.tracing import trace_headers, within_trace
from kvstore_ops.operators.calls import Operator
from kvstore_ops.sidecar import TOKEN, Sidecar

from kvstore.config import TracingSettings
from kvstore.errors import InvalidRequest
from kvstore.spec import Tier
from kvstore.telemetry import NO_TRACING
from tests.conftest import ROOT
from tests.server.raw import eventually
from tests.specs import random_cache, small_spec, tokens_of

SPEC = small_spec(model_id="secret-model")
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, NOT_SAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
WHY = "OpenTelemetry is not installed: pip install 'kvstore[tracing]'"


class Receiver:
    """A server of OTLP that keeps what comes."""

    def __init__(self) -> None:
        service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason=WHY)
        doors = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc", reason=WHY)
        self._response = service.ExportTraceServiceResponse
        self.resources: list[Any] = []
        self.server = grpc.server(ThreadPoolExecutor(2))
        doors.add_TraceServiceServicer_to_server(self, self.server)
        self.address = f"http://127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def Export(self, request: Any, context: object) -> Any:
        self.resources += request.resource_spans
        return self._response()

    @property
    def spans(self) -> list[Any]:
        return [span for each in self.resources for scope in each.scope_spans for span in scope.spans]

    def take(self) -> list[Any]:
        found = self.spans
        self.resources = []
        return found


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    found = Receiver()
    yield found
    found.server.stop(None)


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def test_a_request_is_traced_through_controller_and_tier_as_part_of_its_engines_trace(receiver: Receiver) -> None:
    environment = {**os.environ, "KVSTORE__TRACING__ENDPOINT": receiver.address}
    with Sidecar("--capacity", "32 MiB", nvme="64 MiB", environment=environment) as sidecar:
        with connect(sidecar.address) as client, traced(SAMPLED, "vendor=1"):
            client.store(SPEC, tokens_of(64), random_cache(SPEC, 64)).wait(10)
        sidecar.stop()
        stored = receiver.take()
        sidecar.start()
        with connect(sidecar.address) as client:
            client.lookup(SPEC, tokens_of(64))  # no trace asks for this
            with traced(SAMPLED):
                assert client.fetch(SPEC, tokens_of(64)).tier is Tier.NVME
            with traced(NOT_SAMPLED):
                client.lookup(SPEC, tokens_of(64))
        sidecar.stop()
    names = {span.name for span in stored}
    assert {"kvstore.v1.CacheService/Store", "kvstore.reserve", "kvstore.commit"} <= names
    assert {span.trace_state for span in stored} == {"vendor=1"}
    found = {span.name: span for span in receiver.spans}
    assert {span.trace_id.hex() for span in (*stored, *receiver.spans)} == {TRACE}
    call, fetch, load = (found[name] for name in ("kvstore.v1.CacheService/Fetch", "kvstore.fetch", "kvstore.load"))
    assert call.parent_span_id.hex() == PARENT
    assert fetch.parent_span_id == call.span_id
    assert load.parent_span_id == fetch.span_id
    assert call.start_time_unix_nano <= fetch.start_time_unix_nano <= load.start_time_unix_nano
    assert load.end_time_unix_nano <= call.end_time_unix_nano + 10**9
    assert attributes(fetch) == {
        "kvstore.asked_chunks": 4, "kvstore.hit_chunks": 4, "kvstore.cold_chunks": 4, "kvstore.tier": "NVME",
        "kvstore.reason": "NONE",
    }  # fmt: skip
    told = attributes(load)
    assert told.pop("kvstore.bytes") > 0
    assert told == {"kvstore.tier": "nvme", "kvstore.chunks": 4, "kvstore.lost_chunks": 0}
    (resource,) = {each.resource.SerializeToString() for each in receiver.resources}
    assert b"service.name" in resource
    sent = b"".join(each.SerializeToString() for each in receiver.take())
    assert b"secret-model" not in sent


def test_a_receiver_that_does_not_answer_costs_requests_nothing_and_a_stop_little() -> None:
    pytest.importorskip("opentelemetry.sdk", reason=WHY)
    silent = grpc.server(ThreadPoolExecutor(1))  # listens, and has no such service
    address = f"http://127.0.0.1:{silent.add_insecure_port('127.0.0.1:0')}"
    environment = {**os.environ, "KVSTORE__TRACING__ENDPOINT": address, "KVSTORE__TRACING__SAMPLE_ONE_IN": "1"}
    with Sidecar("--capacity", "16 MiB", environment=environment) as sidecar:
        with connect(sidecar.address) as client:
            client.store(SPEC, tokens_of(16), random_cache(SPEC, 16)).wait(10)
            assert client.fetch(SPEC, tokens_of(16)).token_count == 16
        sidecar.stop()
    silent.stop(None)


def test_without_opentelemetry_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvstore.telemetry.spans import open_spans

    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(InvalidRequest, match=re.escape("pip install 'kvstore[tracing]'")):
        open_spans(TracingSettings(endpoint="http://127.0.0.1:4317"), "node")


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4317", "http://", "http://user@host:1", "grpc://x:1", "http://x:1/v1"])
def test_an_endpoint_that_is_none_stops_the_start(endpoint: str) -> None:
    with pytest.raises(InvalidRequest, match=r"tracing.endpoint"):
        TracingSettings(endpoint=endpoint)


def test_nobody_is_told_of_anything_unless_asked() -> None:
    with NO_TRACING.call("x", ()) as call, NO_TRACING.span("y", chunks=1) as span:
        call.note(chunks=1)
        span.note(chunks=1)
    assert not NO_TRACING.is_on


# ---------------------------------------------------------------- what calls carry


@pytest.mark.parametrize(
    "parent",
    ["", "x", SAMPLED[:-1], SAMPLED + "-00", SAMPLED.upper(), "ff" + SAMPLED[2:], SAMPLED.replace(TRACE, "0" * 32),
     SAMPLED.replace(PARENT, "0" * 16), SAMPLED + "\n"],
)  # fmt: skip
def test_what_is_no_trace_context_is_refused(parent: str) -> None:
    with pytest.raises(InvalidRequest, match="traceparent"), traced(parent):
        raise AssertionError("it was taken")


@pytest.mark.parametrize("state", ["a" * 513, "a=\n", "a=é"])
def test_what_is_no_trace_state_is_refused(state: str) -> None:
    with pytest.raises(InvalidRequest, match="tracestate"), traced(SAMPLED, state):
        raise AssertionError("it was taken")


def test_a_trace_is_its_threads_and_that_of_what_it_begins() -> None:
    seen: list[object] = []
    with traced(SAMPLED):
        assert trace_headers() == (("traceparent", SAMPLED),)
        inside, beside = within_trace(trace_headers), trace_headers
        with traced(NOT_SAMPLED, "a=1"):
            assert trace_headers() == (("traceparent", NOT_SAMPLED), ("tracestate", "a=1"))
    for function in (inside, beside):
        thread = threading.Thread(target=lambda each=function: seen.append(each()))
        thread.start()
        thread.join()
    assert seen == [(("traceparent", SAMPLED),), ()]
    assert trace_headers() == ()


def test_an_engines_current_span_is_passed_on_without_a_word() -> None:
    trace = pytest.importorskip("opentelemetry.trace", reason=WHY)
    context = trace.SpanContext(int(TRACE, 16), int(PARENT, 16), is_remote=False, trace_flags=trace.TraceFlags(1))
    with trace.use_span(trace.NonRecordingSpan(context)):
        assert trace_headers() == (("traceparent", SAMPLED),)
        with traced(NOT_SAMPLED):
            assert trace_headers() == (("traceparent", NOT_SAMPLED),)
    assert trace_headers() == ()


# ---------------------------------------------------------------- doors


@pytest.fixture(scope="module")
def door(receiver: Receiver) -> Iterator[Sidecar]:
    """One that sends its spans soon, and traces what no trace asks for."""
    environment = {
        **os.environ, "KVSTORE__TRACING__ENDPOINT": receiver.address, "KVSTORE__TRACING__SAMPLE_ONE_IN": "1",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }  # fmt: skip
    with Sidecar("--capacity", "16 MiB", plane="remote", environment=environment) as sidecar:
        yield sidecar


def named(receiver: Receiver, traces: Iterable[str] = (), *, but: Iterable[str] = ()) -> dict[str, Any]:
    """Spans of these traces, or of all but some, by their names."""
    return {
        span.name: span
        for span in receiver.spans
        if span.trace_id.hex() not in but and (not traces or span.trace_id.hex() in traces)
    }


def test_a_failed_call_says_what_failed(receiver: Receiver, door: Sidecar) -> None:
    with connect(door.socket_address) as client, pytest.raises(InvalidRequest):
        Operator(client).show("no digits")
    name = "kvstore.v1alpha.AdminService/ShowChunk"
    eventually(lambda: name in named(receiver, but=[TRACE]))
    failed = named(receiver, but=[TRACE])[name]
    assert (failed.status.code, failed.status.message, failed.parent_span_id) == (2, "INVALID_ARGUMENT", b"")


def test_the_asyncio_client_passes_it_on(receiver: Receiver, door: Sidecar) -> None:
    other = "1" * 32

    async def ask() -> None:
        async with await connect_async(door.socket_address) as client:
            with traced(SAMPLED.replace(TRACE, other)):
                receipt = await client.store(SPEC, tokens_of(16), random_cache(SPEC, 16))
            await client.call(receipt.wait, 10)

    asyncio.run(ask())
    eventually(lambda: {"kvstore.reserve", "kvstore.commit"} <= named(receiver, [other]).keys())


def test_a_client_on_another_host_is_part_of_its_trace(receiver: Receiver, door: Sidecar) -> None:
    other = "2" * 32
    with connect(door.address, token=TOKEN) as client, traced(SAMPLED.replace(TRACE, other)):
        client.store(SPEC, tokens_of(32, 5), random_cache(SPEC, 32)).wait(10)
        assert client.fetch(SPEC, tokens_of(32, 5)).token_count == 32
    wanted = {"kvstore.reserve", "kvstore.commit", "kvstore.fetch"}
    eventually(lambda: wanted <= named(receiver, [other]).keys())


BEFORE = """
from kvstore_client import connect
from tests.telemetry.test_tracing import SPEC
from tests.specs import random_cache, tokens_of

client, spec, tokens = connect(), SPEC, tokens_of(16, 7)
client.store(spec, tokens, random_cache(spec, 16)).wait(10)
headers = {{"traceparent": {parent!r}}}
"""


def test_the_pages_example_runs_as_written(receiver: Receiver, door: Sidecar) -> None:
    other = "3" * 32
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "operations.md").read_text(), re.DOTALL)
    program = BEFORE.format(parent=SAMPLED.replace(TRACE, other)) + example + "print(kv.token_count)"
    environment = {**os.environ, "KVSTORE_SOCKET": door.socket_address.removeprefix("unix://")}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment, cwd=ROOT,
        check=False,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("16\n", 0), done.stderr
    eventually(lambda: "kvstore.fetch" in named(receiver, [other]))
