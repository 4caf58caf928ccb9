"""lookup: a chain of 128 keys. Measured are the handler on serialised bytes, keys per second of server CPU, and the
round trip over an empty call's. Beside them stands the lookup of a client on the host: in shared memory, without a
call."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

from kvstore_client import ModelSpec

from kvstore.keys import chain_digests, fingerprint
from kvstore.v1 import cache_pb2 as pb
from kvstore_ops.bench import copying as shared
from kvstore_ops.bench.result import Goal, Result, judged_by, quartiles, show

KEYS = 128
CALLS = {"full": 6000, "quick": 2000, "tiny": 60}
IN_FLIGHT = 32
BATCHES = 2
"""Number of turns, each of lookups and then of empty calls."""
HANDLER_TARGET_US, KEYS_TARGET, ROUND_TRIP_TARGET = 100.0, 400_000, 1.3


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process, of all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


def handler_seconds(request: bytes, spec: ModelSpec, digests: list[bytes], calls: int) -> float:
    """Return the median seconds to parse, answer and serialise, in this process, with a catalog that has the chain."""
    from kvstore.controller import ChainQuery, Controller
    from kvstore.keys import ROOT_DIGEST
    from kvstore.server.render import parse_query, render_lookup
    from kvstore.spec import Exactness

    controller: Controller = _controller()
    model = controller.parts.catalog.register(spec)
    namespace = model.namespace(None, Exactness.EXACT)
    parent = ROOT_DIGEST
    for digest in digests:
        row = controller.parts.catalog.row_of(namespace, digest, parent, spec.chunk_tokens)
        controller.parts.movement.memory.put(row, row)
        controller.parts.catalog.publish(row)
        parent = digest
    assert controller.lookups.lookup(ChainQuery(model.fingerprint, digests)).hit_count == KEYS
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        query = parse_query(pb.LookupRequest.FromString(request).query)
        render_lookup(controller.lookups.lookup(query)).SerializeToString()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _controller() -> Any:
    from kvstore.arena import Arena
    from kvstore.config import load
    from kvstore.controller import Controller, Parts
    from kvstore.policy import LeastRecentlyUsed
    from kvstore.seams import FaultPoints, SystemClock, SystemMemory, SystemRandom, TenantKeys, WorkerThreads
    from kvstore.telemetry import Counters

    memory, faults = SystemMemory(), FaultPoints()
    parts = Parts(
        arena=Arena(memory, faults, capacity_bytes=1 << 20, region_bytes=1 << 20), policy=LeastRecentlyUsed,
        limits=load().settings.limits, clock=SystemClock(), random=SystemRandom(), memory=memory,
        workers=WorkerThreads(1, "kvstore-bench"), keys=TenantKeys(), faults=faults, counters=Counters(),
    )  # fmt: skip
    return Controller(parts)


def run(scale: str) -> Result:
    """Measure all three figures; ``met`` needs all three."""
    spec = ModelSpec.dense(
        "bench-lookup", "unverified:bench", layer_count=1, kv_heads=1, head_dim=8, hidden_size=8, chunk_tokens=1,
        vocab_size=shared.VOCABULARY,
    )  # fmt: skip
    tokens = shared.random_tokens(KEYS, 3)
    digests = chain_digests(tokens, 1)
    query = pb.ChainQuery(fingerprint=fingerprint(spec, spec.kind), digests=b"".join(digests))
    request = pb.LookupRequest(query=query)
    calls = CALLS[scale]
    rounds = calls // BATCHES // IN_FLIGHT or 1
    handler = handler_seconds(request.SerializeToString(), spec, digests, calls)
    with shared.ready("tiny") as (sidecar, client):
        import numpy as np

        plane = np.zeros((1, KEYS, 8), np.uint16)
        client.store(spec, tokens, [(plane, plane)]).wait()
        assert client.lookup(spec, tokens).prefix_token_count == KEYS
        session = client.connect_now()
        empty = pb.ReleaseRequest()
        ratios, ours, nothing = [], [], []
        for _ in range(calls // 4):
            nothing.append(shared.timed(lambda: session.call(session.cache.Release, empty, 10.0)))
            ours.append(shared.timed(lambda: session.call(session.cache.Lookup, request, 10.0)))
        ratios = [mine / none for mine, none in zip(ours, nothing, strict=True)]
        round_trip = statistics.median(ours) / statistics.median(nothing)
        without = statistics.median(shared.timed(lambda: client.lookup(spec, tokens)) for _ in range(calls // 4))
        hashing = statistics.median(shared.timed(lambda: chain_digests(tokens, 1)) for _ in range(calls // 4))
        spent = {"lookups": 0.0, "empty calls": 0.0}
        for _ in range(BATCHES):  # in turns, so that a slow phase of the machine slows both
            for what, call, message in (
                ("lookups", session.cache.Lookup, request), ("empty calls", session.cache.Release, empty),
            ):  # fmt: skip
                before = cpu_seconds(sidecar.pid)
                for _ in range(rounds):
                    replies = _pipelined(call, message, session.metadata)
                    assert what != "lookups" or all(each.hit_count == KEYS for each in replies)
                spent[what] += cpu_seconds(sidecar.pid) - before
    keys = BATCHES * rounds * IN_FLIGHT * KEYS
    rate, bound = (keys / max(each, 0.01) for each in spent.values())
    show(
        f"lookup: chains of {KEYS} keys",
        [
            ("handler on serialised bytes", f"{handler * 1e6:.1f} us (target {HANDLER_TARGET_US:.0f})"),
            ("pipelined, per second of server CPU", f"{rate:,.0f} keys (target {KEYS_TARGET:,})"),
            ("the same, were a lookup an empty call", f"{bound:,.0f} keys: what gRPC leaves"),
            ("round trip p50", f"{statistics.median(ours) * 1e6:.0f} us, {round_trip:.2f} of an empty call"),
            ("client.lookup, no call, p50", f"{without * 1e6:.0f} us, of which hashing {hashing * 1e6:.0f}"),
        ],
    )
    return Result(
        name="lookup", value=rate, unit="keys/s of server CPU", limit=statistics.median(nothing), ratio=round_trip,
        **_judged(handler, rate, round_trip), runs=calls,
        spread=quartiles(ratios), conditions={
            "scale": scale, "handler_us": handler * 1e6, "in_flight": IN_FLIGHT, "empty_calls_as_keys_per_s": bound,
            "without_call_us": without * 1e6, "hashing_us": hashing * 1e6,
        },
    )  # fmt: skip


def _judged(handler_s: float, keys_per_s: float, round_trip: float) -> dict[str, Any]:
    return judged_by(
        Goal("handler us", handler_s * 1e6, HANDLER_TARGET_US, is_upper=True),
        Goal("thousand keys/s", keys_per_s / 1e3, KEYS_TARGET / 1e3),
        Goal("p50 of an empty call's", round_trip, ROUND_TRIP_TARGET, is_upper=True),
    )


def _pipelined(call: Any, message: Any, metadata: Any) -> list[Any]:
    """Send IN_FLIGHT calls together, and return their answers."""
    futures = [call.future(message, timeout=10.0, metadata=metadata) for _ in range(IN_FLIGHT)]
    return [future.result() for future in futures]
