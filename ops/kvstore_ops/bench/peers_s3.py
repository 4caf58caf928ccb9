"""peers-s3: chunks to and from one bucket by LMCache and by kvstore, in turns, the same bytes.

LMCache has an environment of its own (2 GB) at KVSTORE_BENCH_LMCACHE; pip makes it here when it is missing. LMCache's
side is its S3 adapter, from memory to memory. Our side is the S3 tier with the service's two byte movers, from the
arena and back into it, with every strip checked. The server is ``s3_responder``, as in the benchmark s3.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile

from kvstore.chunk import layout_of
from kvstore.config import S3Settings
from kvstore.seams import MoverProcesses, SystemMemory
from kvstore.spec import CacheKind
from kvstore_ops.bench import copying as shared
from kvstore_ops.bench import lmcache_s3_peer
from kvstore_ops.bench.peer import LMCACHE, LMCACHE_PACKAGES, Program, environment
from kvstore_ops.bench.result import Result, quartiles, show
from kvstore_ops.bench.s3 import RUNS, Times, bucket, chunks_in, fetch, movers_with_keys, store, tier_of, timed


async def _turns(
    settings: S3Settings, movers: MoverProcesses, command: list[str], scale: str, round_count: int
) -> tuple[Times, int]:
    """Let each side store and fetch the same bytes; the first side alternates. Return the times, LMCache's as those of
    the bare client, and a round's bytes."""
    layout = layout_of(shared.geometry(scale), CacheKind.KV, shared.CHUNK_TOKENS)
    count = shared.CHUNKS[scale]
    mapping = SystemMemory(movers).read_only_to_others("bench", layout.total_bytes * count)
    chunks, tier, times = chunks_in(mapping.bytes, layout, count), tier_of(settings, movers), Times()
    keys = [header.storage_key for header in chunks.headers]
    with tempfile.NamedTemporaryFile() as file:
        mapping.bytes.tofile(file.name)
        peer = Program([*command, file.name, str(count)])
        try:
            for number in range(round_count + 1):
                kept = times if number else Times()  # the first round warms both up
                for is_ours in (number % 2 == 0, number % 2 == 1):
                    if is_ours:
                        await tier.remove(keys)  # else the tier would adopt the objects of the last round
                        await timed(kept.store, lambda: store(tier, chunks))
                        await timed(kept.fetch, lambda: fetch(tier, chunks, settings.range_bytes))
                    else:
                        kept.bare_store.append(peer.do("store", "again"))
                        kept.bare_fetch.append(peer.do("fetch", "again"))
        finally:
            peer.close()
    await tier.close()
    mapping.close()
    return times, chunks.byte_count


def run(scale: str) -> Result:
    """Measure both sides. ``ratio``: LMCache's time of a fetch over ours, round by round."""
    python = environment(LMCACHE, LMCACHE_PACKAGES)
    with movers_with_keys() as movers, bucket() as settings:
        command = [str(python), "-P", str(lmcache_s3_peer.__file__), settings.endpoint_url.removeprefix("http://")]
        times, byte_count = asyncio.run(_turns(settings, movers, command, scale, RUNS[scale]))
    ratios = [theirs / mine for theirs, mine in zip(times.bare_fetch, times.fetch, strict=True)]
    store_ratios = [theirs / mine for theirs, mine in zip(times.bare_store, times.store, strict=True)]
    rates = {name: byte_count / statistics.median(seconds) for name, seconds in vars(times).items()}
    ratio, store_ratio = statistics.median(ratios), statistics.median(store_ratios)
    show(
        f"peers-s3: {byte_count >> 20} MiB, {len(ratios)} rounds, against a minimal responder on loopback",
        [
            ("fetch, kvstore: into the arena, checked", f"{rates['fetch'] / 1e9:.2f} GB/s"),
            ("  LMCache: into memory", f"{rates['bare_fetch'] / 1e9:.2f} GB/s, ours {ratio:.2f} of it"),
            ("store, kvstore: a look, then a PUT", f"{rates['store'] / 1e9:.2f} GB/s"),
            ("  LMCache", f"{rates['bare_store'] / 1e9:.2f} GB/s, ours {store_ratio:.2f} of it"),
        ],
    )
    return Result(
        name="peers-s3", value=rates["fetch"], unit="B/s", limit=rates["bare_fetch"], ratio=ratio, target="none",
        met=True, runs=len(ratios), spread=quartiles(ratios),
        conditions={
            "scale": scale, "bytes": byte_count, "line": "TCP, loopback", "peer": LMCACHE_PACKAGES[0],
            "processors": os.cpu_count(), "store_bytes_per_s": rates["store"],
            "peer_store_bytes_per_s": rates["bare_store"], "store_ratio": store_ratio,
            "store_spread": quartiles(store_ratios),
            "note": "the server is a minimal responder on loopback, no S3 server",
        },
    )  # fmt: skip
