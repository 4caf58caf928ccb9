"""lookup-loaded: the time of a lookup of 128 keys while other processes store and cold-fetch as fast as they can.

Two loaders run beside the client that looks up: one stores fresh contexts, two in flight at a time; the other fetches
contexts in turn, more than the arena has room for, so that each comes from the device. Lookups are due at a fixed pace.
Each is timed from its due time, even if the lookup before is late. A lookup waits for no other process, so most of
that time is the kernel's, which wakes the client's thread late. Beside it is the time from a lookup's actual begin.

Between lookups, at the same pace and by the same client, two calls are timed from their due times, in threads of their
own: a lookup that holds the chunks it finds, and an empty call to an idle gRPC server, which waits for the machine and
for no code of ours.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from kvstore_client import Client, Durability, ModelSpec, Receipt, Tier, connect

from kvstore.chunk import layout_of
from kvstore_ops.bench import copying as shared
from kvstore_ops.bench.nvme import require_room
from kvstore_ops.bench.result import Result, show
from kvstore_ops.sidecar import Sidecar

KEYS = 128
TARGET_S = 0.010
PACE_S = 0.010
IN_FLIGHT_MAX = 16
SECONDS = {"full": 60.0, "quick": 15.0, "tiny": 0.2}
CHUNKS = {"full": 4, "quick": 4, "tiny": 1}
COLD_CONTEXTS = 8
"""Number of contexts that are fetched in turn; beside those stored meanwhile, the arena has room for half of them."""
KEPT_CONTEXTS = 24
"""Number of stored contexts that the device has room for beside the cold ones."""


def asked() -> ModelSpec:
    """Return the spec of the chain that is looked up. Its chunks are small, so that the chain has 128 keys."""
    return ModelSpec.dense(
        "bench-lookup", "unverified:bench", layer_count=1, kv_heads=1, head_dim=8, hidden_size=8, chunk_tokens=1,
        vocab_size=shared.VOCABULARY,
    )  # fmt: skip


def context(scale: str) -> tuple[int, list[tuple[Any, Any]]]:
    """Return (number of tokens, K and V per layer) of the contexts that the loaders move."""
    count = CHUNKS[scale] * shared.CHUNK_TOKENS
    noise = np.random.default_rng(4).integers(0, 1 << 16, (8, count, 128), np.uint16)
    return count, [(noise.copy(), noise.copy()) for _ in range(shared.LAYERS[scale])]


# ---------------------------------------------------------------- the loaders' processes


def load_stores(client: Client, scale: str, ended: threading.Event) -> Iterator[int]:
    """Store fresh contexts, and yield the bytes of each that reached the device."""
    count, kv = context(scale)
    spec, running = shared.geometry(scale), deque[Receipt]()
    number = 0
    while not ended.is_set():
        running.append(client.store(spec, shared.random_tokens(count, 10_000 + number), kv))
        number += 1
        while len(running) > 1:
            level = running.popleft().wait()
            yield sum(k.nbytes + v.nbytes for k, v in kv) if level is Durability.LOCAL else 0


def load_fetches(client: Client, scale: str, ended: threading.Event) -> Iterator[int]:
    """Fetch the cold contexts in turn, and yield the bytes of each that came from the device."""
    count, into = context(scale)
    number = 0
    while not ended.is_set():
        tokens = shared.random_tokens(count, number % COLD_CONTEXTS)
        fetched = client.fetch(shared.geometry(scale), tokens, into=into)
        number += 1
        yield fetched.byte_count if fetched.tier is Tier.NVME else 0


LOADERS = {"stores": load_stores, "fetches": load_fetches}


def load(name: str, address: str, scale: str) -> None:
    """Run a loader: print a line once it moves bytes, work until the input ends, then print the rate."""
    ended = threading.Event()

    def until_told() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=until_told, daemon=True).start()
    with connect(address, timeout_s=60.0) as client:
        work = LOADERS[name](client, scale, ended)
        next(work, 0)
        print("loading", flush=True)
        started, moved, rounds = time.perf_counter(), 0, 0
        for byte_count in work:
            moved, rounds = moved + byte_count, rounds + 1
        seconds = time.perf_counter() - started
    print(json.dumps({"bytes_per_s": moved / seconds, "rounds": rounds}), flush=True)


@contextmanager
def loaders(address: str, scale: str) -> Iterator[dict[str, dict[str, float]]]:
    """Run both loaders during the block. Yields a dict that gets their rates when the block ends."""
    found: dict[str, dict[str, float]] = {}
    running: dict[str, subprocess.Popen[str]] = {}
    try:
        for name in LOADERS:
            command = [sys.executable, "-m", "kvstore_ops.bench.lookup_loaded", name, address, scale]
            running[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for process in running.values():
            assert process.stdout is not None
            assert process.stdout.readline() == "loading\n", "a loader failed"
        yield found
        for name, process in running.items():
            found[name] = json.loads(process.communicate(timeout=60.0)[0].splitlines()[-1])
    finally:
        for process in running.values():
            process.kill()
            process.communicate()


# ---------------------------------------------------------------- the client that looks up


@dataclass
class Asked:
    """Seconds of each lookup from its due time (``due``) and from its begin (``asked``); of each lookup that holds
    chunks (``held``), and of each empty call, from their due times. ``woken``: seconds by which a sleep before a lookup
    ended late: the delay that this machine causes to a process that only waits."""

    due: list[float] = field(default_factory=list)
    asked: list[float] = field(default_factory=list)
    held: list[float] = field(default_factory=list)
    empty: list[float] = field(default_factory=list)
    woken: list[float] = field(default_factory=list)


def ask(client: Client, tokens: Any, bare: Callable[..., bytes], seconds: float) -> Asked:
    """Look up every PACE_S. Half-way between two lookups do, in turns, a lookup that holds chunks and an empty call."""
    spec, times = asked(), Asked()

    def look_up(since: float) -> None:
        began = time.perf_counter()
        found = client.lookup(spec, tokens)
        done = time.perf_counter()
        times.due.append(done - since)
        times.asked.append(done - began)
        assert found.prefix_token_count == KEYS

    def hold(since: float) -> None:
        found = client.lookup(spec, tokens, hold=True)
        times.held.append(time.perf_counter() - since)
        assert found.prefix_token_count == KEYS
        client.release_ticket(found.ticket)

    def call(since: float) -> None:
        bare(b"", timeout=60.0)
        times.empty.append(time.perf_counter() - since)

    with ThreadPoolExecutor(IN_FLIGHT_MAX) as threads:
        for one in (look_up, hold, call):
            one(time.perf_counter())
        started = time.perf_counter()
        jobs = []
        for number in range(4 * int(seconds / PACE_S / 2) + 1):
            due = started + number * PACE_S / 2
            early = due - time.perf_counter()
            if early > 0:
                time.sleep(early)
            if number % 2:
                jobs.append(threads.submit(call if number % 4 == 1 else hold, due))
                continue
            if early > 0:
                times.woken.append(time.perf_counter() - due)
            look_up(due)
        for job in jobs:
            job.result()
    return times


def serve_nothing(socket: str) -> None:
    """Run a gRPC server like the sidecar's that only answers empty calls. It ends with its standard input."""

    async def answer(_request: bytes, _context: Any) -> bytes:
        return b""

    async def serve() -> None:
        server = grpc.aio.server()
        handler = grpc.unary_unary_rpc_method_handler(answer)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", {"Call": handler}),))
        server.add_insecure_port(f"unix:{socket}")
        await server.start()
        print("serving", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await server.stop(None)

    asyncio.run(serve())


@contextmanager
def nothing_served(socket: str) -> Iterator[Callable[..., bytes]]:
    """Yield the empty call to a server that is idle otherwise."""
    command = [sys.executable, "-m", "kvstore_ops.bench.lookup_loaded", "nothing", socket]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "serving\n", "the bare server failed"
            with grpc.insecure_channel(f"unix:{socket}") as channel:
                yield channel.unary_unary("/bare/Call")
        finally:
            process.communicate()


def percentiles(times: Sequence[float]) -> dict[str, float]:
    """Return p50, p99 and p99.9."""
    names = ("p50", "p99", "p99.9")
    return dict(zip(names, np.percentile(times, [50, 99, 99.9]).tolist(), strict=True))


def moved(client: Client) -> dict[str, int]:
    """Return the bytes that each tier has moved so far, as the sidecar counts them."""
    stats = client.stats()
    device = stats.tiers[0]
    return {
        "arena in, stored": stats.counters["store_committed_bytes"],
        "arena in, promoted": stats.counters["promoted_bytes"],
        "device written": device.written_bytes,
        "device read": device.read_bytes,
    }


def prepare(client: Client, scale: str) -> Any:
    """Store the chain that is looked up, and the cold contexts. Return the chain's tokens."""
    tokens, plane = shared.random_tokens(KEYS, 3), np.zeros((1, KEYS, 8), np.uint16)
    client.store(asked(), tokens, [(plane, plane)]).wait()
    count, kv = context(scale)
    for number in range(COLD_CONTEXTS):
        receipt = client.store(shared.geometry(scale), shared.random_tokens(count, number), kv)
        assert receipt.wait() is Durability.LOCAL, receipt.reason
    return tokens


def run(scale: str) -> Result:
    """Measure lookups on an idle machine, then under load."""
    spec = shared.geometry(scale)
    context_bytes = layout_of(spec, spec.kind, shared.CHUNK_TOKENS).total_bytes * CHUNKS[scale]
    device_bytes = context_bytes * (COLD_CONTEXTS + KEPT_CONTEXTS) + (64 << 20)
    require_room(device_bytes)
    arena = str(context_bytes * COLD_CONTEXTS)
    with Sidecar("--capacity", arena, nvme=str(device_bytes)) as sidecar:
        sidecar.wait_prefaulted()
        client = connect(sidecar.address, timeout_s=60.0)
        with client, nothing_served(str(sidecar.directory / "bare.sock")) as bare:
            tokens = prepare(client, scale)
            idle = ask(client, tokens, bare, SECONDS[scale] / 3)
            with loaders(sidecar.address, scale) as said:
                before, started = moved(client), time.perf_counter()
                loaded = ask(client, tokens, bare, SECONDS[scale])
                seconds, after = time.perf_counter() - started, moved(client)
    rates = {name: (after[name] - before[name]) / seconds for name in after}
    figures = {
        "loaded": percentiles(loaded.due), "loaded, once asked": percentiles(loaded.asked),
        "loaded, held, by a call": percentiles(loaded.held),
        "loaded, an empty call to an idle server": percentiles(loaded.empty),
        "loaded, a sleep ends late by": percentiles(loaded.woken),
        "idle": percentiles(idle.due), "idle, once asked": percentiles(idle.asked),
        "idle, held, by a call": percentiles(idle.held),
        "idle, an empty call": percentiles(idle.empty),
    }  # fmt: skip
    show(
        f"lookup-loaded: {KEYS} keys, {len(loaded.due)} lookups; p50, p99, p99.9",
        [
            *(
                (name, " / ".join(f"{each * 1e3:.2f}" for each in row.values()) + " ms")
                for name, row in figures.items()
            ),
            *((name, f"{rate / 1e9:.2f} GB/s") for name, rate in rates.items()),
            *((f"loader: {name}", f"{each['bytes_per_s'] / 1e9:.2f} GB/s") for name, each in said.items()),
        ],
    )
    middle, value, high = figures["loaded"].values()
    return Result(
        name="lookup-loaded", value=value, unit="s", limit=TARGET_S, ratio=value / TARGET_S, target="p99 <= 10 ms",
        met=value <= TARGET_S, runs=len(loaded.due), spread=(middle / TARGET_S, high / TARGET_S),
        conditions={
            "scale": scale, "pace_s": PACE_S, "timed_from": "when a lookup was due", "spread": "p50 and p99.9",
            "cpus": os.cpu_count(), "seconds": figures, "bytes_per_s": rates, "loaders": said,
        },
    )  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1] == "nothing":
        serve_nothing(sys.argv[2])
    else:
        load(sys.argv[1], sys.argv[2], sys.argv[3])
