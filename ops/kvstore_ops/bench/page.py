"""page: the delay of requests by readers of the page. Lookups and fetches by calls run one after another, in turns
without readers and with four readers, who each ask for the page's facts and for /metrics every second."""

from __future__ import annotations

import json
import statistics
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvstore_client import ModelSpec, connect

from kvstore.keys import chain_digests, fingerprint
from kvstore.v1 import cache_pb2 as pb
from kvstore_ops.bench import copying as shared
from kvstore_ops.bench.result import Goal, Result, judged_by, quartiles, show
from kvstore_ops.sidecar import Sidecar

KEYS = 128
READERS, EVERY_S = 4, 1.0
MODELS = {"full": 20, "quick": 20, "tiny": 2}
"""Number of models on the page."""
TURN_S = {"full": 10.0, "quick": 3.0, "tiny": 0.2}
PAIRS = {"full": 10, "quick": 5, "tiny": 1}
P50_TARGET, P99_TARGET = 1.05, 1.25
TIMEOUT_S = 10.0


def page_address(sidecar: Sidecar) -> str:
    """Return the address of the sidecar's page, from its log."""
    until = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until:
        for line in (sidecar.directory / "log").read_text().splitlines():
            if '"message": "ready"' in line:
                return str(json.loads(line)["metrics"]).removesuffix("/metrics")
        time.sleep(0.05)
    raise TimeoutError("the sidecar does not say where its page is")


@contextmanager
def read_by(count: int, address: str) -> Iterator[list[int]]:
    """Have ``count`` readers read the page during the block. Yields the bytes that each has read, counted meanwhile."""
    ended, sizes = threading.Event(), [0] * count

    def read(number: int) -> None:
        ended.wait(number * EVERY_S / count)
        while not ended.is_set():
            for path in ("/page.json", "/metrics"):
                with urllib.request.urlopen(address + path, timeout=TIMEOUT_S) as reply:  # noqa: S310 - our own page
                    sizes[number] += len(reply.read())
            ended.wait(EVERY_S)

    threads = [threading.Thread(target=read, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield sizes
    finally:
        ended.set()
        for thread in threads:
            thread.join(TIMEOUT_S)


def turn(seconds: float, calls: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Make the calls one after another for ``seconds``, and return the seconds of each, by name."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for name, call in calls.items():
            took[name].append(shared.timed(call))
    return took


def calls_of(session: Any, query: pb.ChainQuery) -> dict[str, Callable[[], object]]:
    """Return a lookup and a fetch of a chain, each as a call to the sidecar."""
    lookup, fetch = pb.LookupRequest(query=query), pb.FetchRequest(query=query)

    def fetched() -> None:
        (found,) = session.cache.Fetch(fetch, timeout=TIMEOUT_S, metadata=session.metadata)
        session.call(session.cache.Release, pb.ReleaseRequest(lease_ids=[found.lease_id]), TIMEOUT_S)

    return {"lookup": lambda: session.call(session.cache.Lookup, lookup, TIMEOUT_S), "fetch": fetched}


def run(scale: str) -> Result:
    """Measure p50 and p99 of lookups and of fetches, with readers over without; ``met`` needs all four."""
    specs = [spec_of(number) for number in range(MODELS[scale])]
    spec, tokens = specs[0], shared.random_tokens(KEYS, 3)
    query = pb.ChainQuery(fingerprint=fingerprint(spec, spec.kind), digests=b"".join(chain_digests(tokens, 1)))
    ratios: dict[tuple[str, str], list[float]] = {}
    alone: dict[str, list[float]] = {}
    read_bytes = 0
    with Sidecar("--capacity", "64 MiB", "--metrics-port", "0") as sidecar:
        sidecar.wait_prefaulted()
        address = page_address(sidecar)
        with connect(sidecar.address, timeout_s=60.0) as client:
            import numpy as np

            plane = np.zeros((1, KEYS, 8), np.uint16)
            for each in specs:
                client.store(each, tokens, [(plane, plane)]).wait()
            session = client.connect_now()
            calls = calls_of(session, query)
            turn(TURN_S["tiny"], calls)
            for _ in range(PAIRS[scale]):
                without = turn(TURN_S[scale], calls)
                with read_by(READERS, address) as sizes:
                    beside = turn(TURN_S[scale], calls)
                read_bytes += sum(sizes)
                for name in calls:
                    alone.setdefault(name, []).extend(without[name])
                    for what, of in (("p50", statistics.median), ("p99", p99)):
                        ratios.setdefault((name, what), []).append(of(beside[name]) / of(without[name]))
    assert read_bytes
    middle = {key: statistics.median(values) for key, values in ratios.items()}
    show(
        f"{READERS} readers of the page, each every {EVERY_S:.0f} s: with them over without",
        [
            (f"{name} by a call, {what}", f"{middle[name, what]:.3f} of {_us(alone[name], what)}")
            for name, what in ratios
        ],
    )
    worst = max(middle["lookup", "p50"], middle["fetch", "p50"])
    tail = max(middle["lookup", "p99"], middle["fetch", "p99"])
    conditions: dict[str, Any] = {f"{name}_{what}_ratio": value for (name, what), value in middle.items()}
    return Result(
        name="page", value=statistics.median(alone["lookup"]) * worst * 1e6, unit="us",
        limit=statistics.median(alone["lookup"]) * 1e6, ratio=worst,
        **judged_by(
            Goal("p50", worst, P50_TARGET, is_upper=True), Goal("p99", tail, P99_TARGET, is_upper=True)
        ), runs=PAIRS[scale],
        spread=quartiles(ratios["lookup", "p50"]), conditions={"scale": scale, "readers": READERS, **conditions},
    )  # fmt: skip


def spec_of(number: int) -> ModelSpec:
    """Return the spec of one of the models."""
    return ModelSpec.dense(
        f"bench-page-{number}", "unverified:bench", layer_count=1, kv_heads=1, head_dim=8, hidden_size=8,
        chunk_tokens=1, vocab_size=shared.VOCABULARY,
    )  # fmt: skip


def p99(values: list[float]) -> float:
    """Return the 99th percentile."""
    return sorted(values)[int(0.99 * (len(values) - 1))]


def _us(values: list[float], what: str) -> str:
    return f"{(statistics.median(values) if what == 'p50' else p99(values)) * 1e6:.0f} us"
