"""fetch-small: 1, 4 and 10 chunks of 256 tokens of a small model, warm, over the bare copies; then clients together.

It shows the costs of a fetch beside its bytes: 256 tokens of 30 layers with 3 kv heads of 64 are 60 planes of 98 KB.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from kvstore_client import Client, ModelSpec
from kvstore_client.copying import COPY_THREADS, Copier, on_callers_thread
from kvstore_copies import is_compiled

from kvstore.seams.fence import fence
from kvstore_ops.bench import copying as shared
from kvstore_ops.bench.fetch import NOT_COMPILED, limit_pairs
from kvstore_ops.bench.result import Goal, Result, judged_by, quartiles, show

TARGETS = {1: 0.6, 4: 0.75, 10: 0.85}
"""Number of chunks -> the share of the copy limit that a fetch of them must reach."""
TOGETHER_TARGET, TAIL_TARGET = 0.8, 2.0
RUNS = {"full": 300, "quick": 100, "tiny": 3}
CLIENTS = {"full": (1, 2, 4, 8), "quick": (1, 8), "tiny": (1,)}
LOOP_S = {"full": 3.0, "quick": 1.5, "tiny": 0.2}
MANY = 10
TOLD = ("ratio", "p50_s", "p95_s", "pass_ratio", "limit_s", "compiled_s")  # the last where code is compiled
LOOP = """
import sys, time
from kvstore_client import connect
from kvstore_ops.bench import copying as shared
from kvstore_ops.bench.fetch_small import geometry
count, seconds = int(sys.argv[2]), float(sys.argv[3])
spec, tokens = geometry(sys.argv[4]), shared.random_tokens(count, count)
with connect(sys.argv[1], timeout_s=60.0) as client:
    into = shared.tensors(spec, count)
    client.fetch(spec, tokens, into=into)
    print("ready", flush=True)
    sys.stdin.readline()
    until, done = time.perf_counter() + seconds, 0
    while time.perf_counter() < until:
        assert client.fetch(spec, tokens, into=into).token_count == count
        done += 1
print(done, flush=True)
"""


def geometry(scale: str) -> ModelSpec:
    """Return a spec of 30 layers, 3 kv heads, head dim 64, bf16: 256 tokens are 5.9 MB."""
    return ModelSpec.dense(
        "bench-small", "unverified:bench", layer_count=2 if scale == "tiny" else 30, kv_heads=3, head_dim=64,
        hidden_size=576, vocab_size=shared.VOCABULARY,
    )  # fmt: skip


def run(scale: str) -> Result:
    """Measure pairs of a fetch and the same copies without a service, in random order: torch's threads wait for work in
    a loop, and take a processor from what comes next. The limit is the fastest of three ways of torch: one thread
    copies all, two threads copy a half each, and two threads split each copy. Beside it stand one pass over the copies
    on the calling thread, with a fence as a fetch needs it before it reads generations; and the same copies in compiled
    code."""
    spec, copier = geometry(scale), Copier()
    sizes: dict[int, dict[str, Any]] = {}
    with shared.ready(scale) as (sidecar, client):
        for chunks in TARGETS:
            sizes[chunks] = _measured(client, copier, spec, chunks * shared.CHUNK_TOKENS, RUNS[scale])
        together = {
            clients: _together(sidecar.address, clients, spec, LOOP_S[scale], scale) for clients in CLIENTS[scale]
        }
    copier.close()
    most = max(together)
    bare = sizes[MANY]["bytes"] / sizes[MANY]["limit_s"]
    rows = [
        (
            f"{chunks} chunks, {each['bytes'] / 1e6:.1f} MB",
            f"p50 {each['p50_s'] * 1e3:.2f} ms, p95 {each['p95_s'] * 1e3:.2f}, {each['ratio']:.3f} of the copy limit "
            f"of {each['limit_s'] * 1e3:.2f} ms (target {TARGETS[chunks]}); one pass and a fence: "
            f"{each['pass_ratio']:.3f}; bare compiled copies: {_told(each)}",
        )
        for chunks, each in sizes.items()
    ]
    rows += [
        (
            f"{clients} clients, {MANY} chunks each",
            f"{rate / 1e9:.2f} GB/s together, {rate / bare:.3f} of the copy limit",
        )
        for clients, rate in together.items()
    ]
    show(f"fetch-small: {RUNS[scale]} pairs", rows)
    one = sizes[1]
    goals = [Goal(f"{chunks} chunks", each["ratio"], TARGETS[chunks]) for chunks, each in sizes.items()]
    goals.append(Goal("p95 over p50 of 1 chunk", one["p95_s"] / one["p50_s"], TAIL_TARGET, is_upper=True))
    goals.append(Goal(f"{most} clients", together[most] / bare, TOGETHER_TARGET))
    return Result(
        name="fetch-small", value=one["p50_s"], unit="s", limit=one["limit_s"], ratio=one["ratio"],
        **judged_by(*goals), runs=RUNS[scale], spread=one["spread"],
        conditions={
            "scale": scale, "warm": True, "bytes": one["bytes"],
            **{f"{name}_{chunks}": each[name] for chunks, each in sizes.items() for name in TOLD if name in each},
            **{f"clients_{clients}_bytes_per_s": rate for clients, rate in together.items()},
        },
    )  # fmt: skip


def _told(size: dict[str, Any]) -> str:
    return f"{size['compiled_s'] * 1e3:.2f} ms" if is_compiled() else NOT_COMPILED


def _measured(client: Client, copier: Copier, spec: ModelSpec, count: int, runs: int) -> dict[str, Any]:
    import torch

    torch.set_num_threads(min(COPY_THREADS, torch.get_num_threads()))
    tokens, into = shared.random_tokens(count, count), shared.tensors(spec, count)
    client.store(spec, tokens, into).wait()
    pairs = limit_pairs(client, spec, tokens, into)

    def fetch() -> None:
        assert client.fetch(spec, tokens, into=into).token_count == count

    bare = partial(shared.copy_all, pairs)

    def one_pass() -> None:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
        fence()

    ways: dict[str, Callable[[], float]] = {
        "fetch": partial(shared.timed, fetch),
        "one": lambda: shared.timed(lambda: on_callers_thread(bare)),
        "two": lambda: shared.copy_seconds(copier, pairs),
        "split": partial(shared.timed, bare),
        "pass": lambda: shared.timed(lambda: on_callers_thread(one_pass)),
    }
    if is_compiled():
        ways["compiled"] = partial(shared.compiled_seconds, copier, pairs)
    times: dict[str, list[float]] = {name: [] for name in ways}
    names, chance = list(ways), np.random.default_rng(1)
    for _ in range(runs + 5):
        for number in chance.permutation(len(names)):
            times[names[number]].append(ways[names[number]]())
    times = {name: each[5:] for name, each in times.items()}  # without the first times: they fill caches
    limits = min(times["one"], times["two"], times["split"], key=statistics.median)
    ratios = [limit / mine for limit, mine in zip(limits, times["fetch"], strict=True)]
    return {
        "bytes": sum(k.nbytes + v.nbytes for k, v in into),
        "p50_s": statistics.median(times["fetch"]),
        "p95_s": float(np.quantile(times["fetch"], 0.95)),
        "limit_s": statistics.median(limits),
        "ratio": statistics.median(ratios),
        "pass_ratio": statistics.median(a / b for a, b in zip(limits, times["pass"], strict=True)),
        **({"compiled_s": statistics.median(times["compiled"])} if is_compiled() else {}),
        "spread": quartiles(ratios),
    }


def _together(address: str, clients: int, spec: ModelSpec, seconds: float, scale: str) -> float:
    """Return the bytes per second that ``clients`` processes fetch together."""
    count = MANY * shared.CHUNK_TOKENS
    command = [sys.executable, "-c", LOOP, address, str(count), str(seconds), scale]
    running = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(clients)
    ]
    fetched = 0
    for each in running:
        assert each.stdout is not None
        assert each.stdout.readline() == "ready\n"
    for each in running:
        assert each.stdin is not None
        each.stdin.write("go\n")
        each.stdin.flush()
    for each in running:
        said, _ = each.communicate(timeout=60.0 + seconds)
        fetched += int(said.split()[-1])
    return fetched * spec.layer_count * 2 * 3 * 64 * 2 * count / seconds
