"""store: the time for which storing 256 MiB blocks the engine, over the copy limit."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import xxhash
from kvstore_client.client import Client
from kvstore_client.copying import Copier, raw

from kvstore.chunk import layout_of, slab_parts
from kvstore_ops.bench import copying as shared
from kvstore_ops.bench.result import Result, quartiles, show

TARGET = 1.15


def limit_pairs(
    client: Client, spec: Any, source: list[tuple[Any, Any]], count: int
) -> tuple[list[tuple[Any, Any]], list[Any]]:
    """Return the copies that a store makes, as (target, source), into real staging, and the staging runs in use."""
    pool = client.connect_now().staging
    layout = layout_of(spec, spec.kind, spec.chunk_tokens)
    pairs, runs = [], []
    for start in range(0, count, spec.chunk_tokens):
        run = pool.take(layout.body_bytes, layout.body_bytes * count // spec.chunk_tokens)
        assert run is not None
        runs.append(run)
        for index, slab in enumerate(layout.slabs):
            planes = [raw(plane) for plane in source[index]]
            for part in slab_parts(layout, index, run.memory[run.offset + slab.offset :]):
                tokens = slice(start + part.token_start, start + part.token_stop)
                pairs.append((raw(part.array[0]), planes[part.which][:, tokens]))
    return pairs, runs


def checked_seconds(copier: Copier, runs: list[Any], memory: Any, strip_bytes: int) -> float:
    """Copy staging once more, hash each strip, and return the seconds that this takes on the copier's threads: what no
    service can leave out whose client may write to staging at any time."""
    each = len(memory) // len(runs)
    pieces = [
        (memory[number * each + start :][:strip_bytes], run.memory[run.offset + start :][:strip_bytes])
        for number, run in enumerate(runs)
        for start in range(0, each, strip_bytes)
    ]

    def take(some: Any) -> None:
        for target, source in some:
            np.copyto(target, source)
            xxhash.xxh3_128_digest(target.data)

    return shared.timed(lambda: copier.split(take, pieces, 60.0))


def measure(scale: str) -> dict[str, Any]:
    """Return the blocked, visible, limit and checked seconds of interleaved runs; ``checked``: of bare threads that
    copy what the limit's threads copied once more, and hash it. The benchmarks store and visible read the same
    measurement."""
    spec = shared.geometry(scale)
    count = shared.CHUNKS[scale] * shared.CHUNK_TOKENS
    source = shared.tensors(spec, count)
    byte_count = sum(k.nbytes + v.nbytes for k, v in source)
    copier, memory = Copier(), np.ones(byte_count, np.uint8)
    strip_bytes = int(layout_of(spec, spec.kind, spec.chunk_tokens).strip_lengths[0])
    blocked, visible, limits, checked = [], [], [], []
    with shared.ready(scale) as (sidecar, client):
        from kvstore_client import connect

        with connect(sidecar.address) as other:
            for number in range(shared.RUNS[scale] + 2):
                tokens = shared.random_tokens(count, 100 + number)
                client.connect_now()
                pairs, runs = limit_pairs(client, spec, source, count)
                limit = shared.copy_seconds(copier, pairs)
                again = checked_seconds(copier, runs, memory, strip_bytes)
                del pairs
                for each in runs:
                    client.connect_now().staging.give_back(each)
                receipts: list[Any] = []

                def store(tokens: Any = tokens, receipts: list[Any] = receipts) -> None:
                    receipts.append(client.store(spec, tokens, source))

                def see(tokens: Any = tokens, receipts: list[Any] = receipts) -> None:
                    receipts[0].wait()
                    assert other.lookup(spec, tokens).prefix_token_count == count

                stored = shared.timed(store)
                seen = stored + shared.timed(see)
                if number >= 2:  # the first rounds fault in the pages of staging
                    blocked.append(stored)
                    visible.append(seen)
                    limits.append(limit)
                    checked.append(limit + again)
    copier.close()
    return {"bytes": byte_count, "blocked": blocked, "visible": visible, "limits": limits, "checked": checked}


def run(scale: str) -> Result:
    """Measure a store and the copy limit, interleaved, after staging was touched once."""
    figures = measure(scale)
    byte_count, blocked, limits = figures["bytes"], figures["blocked"], figures["limits"]
    ratios = [mine / limit for mine, limit in zip(blocked, limits, strict=True)]
    ratio, seconds = statistics.median(ratios), statistics.median(blocked)
    show(
        f"store: {byte_count >> 20} MiB, {len(blocked)} pairs",
        [
            ("engine blocked", f"{seconds * 1e3:.1f} ms, {ratio:.3f} of the copy"),
            ("copy into staging, 2 threads", f"{statistics.median(limits) * 1e3:.1f} ms"),
        ],
    )
    return Result(
        name="store", value=seconds, unit="s", limit=statistics.median(limits), ratio=ratio, target=f"<= {TARGET}",
        met=ratio <= TARGET, runs=len(blocked), spread=quartiles(ratios),
        conditions={"scale": scale, "bytes": byte_count, "warm": True, "copy_threads": 2},
    )  # fmt: skip
