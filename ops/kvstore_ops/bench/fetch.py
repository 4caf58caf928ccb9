"""fetch: 256 MiB from a warm arena into pre-faulted tensors, RPC included, over the copy limit."""

from __future__ import annotations

import statistics
from typing import Any

from kvstore_client.client import Client
from kvstore_client.copying import Copier, on_callers_thread, plane_run, raw
from kvstore_client.planes.shared_memory.chunk import runs_of
from kvstore_client.planes.shared_memory.prefix import MappedPrefix
from kvstore_copies import is_compiled

from kvstore.chunk import slab_parts
from kvstore_ops.bench import copying as shared
from kvstore_ops.bench.paged import ask, measure_pages
from kvstore_ops.bench.result import Goal, Result, judged_by, quartiles, show

NOT_COMPILED = "none: kvstore was installed without a C compiler, or KVSTORE_COPIES=plain"
TARGET = 0.95
VERIFY_TARGET = 0.65


def limit_pairs(client: Client, spec: Any, tokens: Any, into: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Return the copies that a fetch makes, as (target, source); the sources are the mapped memory itself."""
    prefix = ask(client, spec, tokens)
    pairs = []
    for layer in range(spec.layer_count):
        planes = [raw(plane) for plane in into[layer]]
        for run in runs_of(prefix.chunks):
            first, count = run.chunks[0], len(run.chunks)
            for part in slab_parts(first.layout, layer, run.memory(layer), count, run.stride):
                target = plane_run(planes[part.which], first.token_start, first.layout.token_count, count, part)
                pairs.append((target, raw(part.array)))
    prefix.close()
    return pairs


def measure(scale: str) -> dict[str, Any]:
    """Return the seconds of each turn: of a fetch, of the same copies by three ways, and of parts of a fetch."""
    spec = shared.geometry(scale)
    count = shared.CHUNKS[scale] * shared.CHUNK_TOKENS
    tokens = shared.random_tokens(count, 1)
    into = shared.tensors(spec, count)
    copier = Copier()
    with shared.ready(scale) as (sidecar, client):
        client.store(spec, tokens, into).wait()
        pairs = limit_pairs(client, spec, tokens, into)

        def fetch(verify: bool = False) -> None:
            assert client.fetch(spec, tokens, into=into, verify=verify).token_count == count

        first = first_fetch_seconds(sidecar.address, scale)
        fetch()
        shared.copy_seconds(copier, pairs)
        found: dict[str, list[float]] = {name: [] for name in ("ours", "one", "two", "compiled", "verified", "asked")}
        held: list[MappedPrefix] = []
        for _ in range(shared.RUNS[scale]):
            found["two"].append(shared.copy_seconds(copier, pairs))
            found["one"].append(shared.timed(lambda: on_callers_thread(shared.copy_all, pairs)))
            found["ours"].append(shared.timed(fetch))
            if is_compiled():
                found["compiled"].append(shared.compiled_seconds(copier, pairs))
            found["verified"].append(shared.timed(lambda: fetch(verify=True)))
            found["asked"].append(shared.timed(lambda: held.append(ask(client, spec, tokens))))
            held.pop().close()
        paged = measure_pages(client, spec, tokens, copier, shared.RUNS[scale])
    copier.close()
    return {**found, "first": first, "paged": paged, "byte_count": sum(k.nbytes + v.nbytes for k, v in into)}


def run(scale: str) -> Result:
    """Measure a fetch and the same copies in turns. The limit is the faster of one thread and two of torch's that copy
    them."""
    found = measure(scale)
    byte_count, ours, (paged_ratio, paged_rate) = found["byte_count"], found["ours"], found["paged"]
    limits = min(found["one"], found["two"], key=statistics.median)
    ratios = [limit / mine for limit, mine in zip(limits, ours, strict=True)]
    ratio = statistics.median(ratios)
    verify_ratio = statistics.median(limit / mine for limit, mine in zip(limits, found["verified"], strict=True))
    rates = {
        name: byte_count / statistics.median(each) for name, each in found.items() if isinstance(each, list) and each
    }
    compiled = f"{rates['compiled'] / 1e9:.2f} GB/s" if is_compiled() else NOT_COMPILED
    asked_s, copy_s = statistics.median(found["asked"]), statistics.median(limits)
    memcpy, first_rate = shared.one_call_copy_bytes_per_s(byte_count), byte_count / found["first"]
    show(
        f"fetch: {byte_count >> 20} MiB, {len(ours)} pairs",
        [
            ("fetch", f"{rates['ours'] / 1e9:.2f} GB/s, {ratio:.3f} of the copy limit"),
            ("fetch --verify", f"{rates['verified'] / 1e9:.2f} GB/s, {verify_ratio:.3f}"),
            ("into pages of 16, in random order", f"{paged_rate / 1e9:.2f} GB/s, {paged_ratio:.3f} of the bare copies"),
            ("fetch --first (fresh client process)", f"{first_rate / 1e9:.2f} GB/s"),
            ("asking, before the first copy", f"{asked_s * 1e3:.1f} ms: leaves {copy_s / (copy_s + asked_s):.3f}"),
            ("the same copies, 2 threads", f"{rates['two'] / 1e9:.2f} GB/s"),
            ("the same copies, 1 thread", f"{rates['one'] / 1e9:.2f} GB/s"),
            ("the same copies, compiled, 2 threads", compiled),
            ("one-call memcpy", f"{memcpy / 1e9:.2f} GB/s"),
        ],
    )
    return Result(
        name="fetch", value=rates["ours"], unit="B/s", limit=byte_count / copy_s, ratio=ratio, spread=quartiles(ratios),
        **judged_by(
            Goal("tensors", ratio, TARGET), Goal("pages", paged_ratio, TARGET),
            Goal("verify", verify_ratio, VERIFY_TARGET),
        ), runs=len(ours),
        conditions={
            "scale": scale, "bytes": byte_count, "warm": True, "copy_threads": 2, "verify_ratio": verify_ratio,
            "paged_ratio": paged_ratio, "asked_s": asked_s, "paged_bytes_per_s": paged_rate,
            "first_bytes_per_s": first_rate, "memcpy_bytes_per_s": memcpy,
            "one_thread_bytes_per_s": rates["one"], "is_compiled": is_compiled(),
            **({"compiled_bytes_per_s": rates["compiled"]} if is_compiled() else {}),
        },
    )  # fmt: skip


def first_fetch_seconds(address: str, scale: str) -> float:
    """Return the seconds of a fresh process's first fetch, without connecting; its page tables are still empty."""
    import subprocess
    import sys

    command = [sys.executable, "-m", "kvstore_ops.bench.fetch", address, scale]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def _first(address: str, scale: str) -> None:
    from kvstore_client import connect

    spec = shared.geometry(scale)
    count = shared.CHUNKS[scale] * shared.CHUNK_TOKENS
    tokens, into = shared.random_tokens(count, 1), shared.tensors(spec, count)
    with connect(address) as client:
        print(shared.timed(lambda: client.fetch(spec, tokens, into=into)))


if __name__ == "__main__":
    import sys

    _first(sys.argv[1], sys.argv[2])
