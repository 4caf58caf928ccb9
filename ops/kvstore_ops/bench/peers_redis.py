"""peers-redis: chunks to and from one Redis by LMCache and by kvstore, in turns, the same bytes.

LMCache has an environment of its own (2 GB) at KVSTORE_BENCH_LMCACHE; pip makes it here when it is missing. LMCache's
side is the native client of its Redis adapter, from memory to memory. Our side is a sidecar, from the arena and back
into it, with every strip checked. Both reach one server by TCP on loopback.
"""

from __future__ import annotations

import os
import statistics
import tempfile

import numpy as np

from kvstore_ops.bench import lmcache_redis_peer
from kvstore_ops.bench.peer import LMCACHE, LMCACHE_PACKAGES, Program, environment, free_port
from kvstore_ops.bench.redis import CHUNKS, CONTEXTS, RUNS, Rig, Seconds, rig
from kvstore_ops.bench.result import Result, quartiles, show
from kvstore_ops.redis_server import redis_server

SERVER_BYTES = 8 << 30


def turn(ours: Rig, peer: Program, number: int, ours_s: Seconds, peer_s: Seconds) -> None:
    """Let each side fetch a stored context and store one more; the first side alternates."""

    def mine() -> None:
        ours.fetch(number % CONTEXTS, ours_s)
        _, stored = ours.store(ours_s)
        ours.bare.drop(list(dict.fromkeys(key for key, _, _ in stored)))

    def theirs() -> None:
        peer_s.fetch.append(peer.do("fetch", str(number % CONTEXTS)))
        peer_s.store.append(peer.do("store", "again"))
        ours.bare.drop(ours.bare.client.keys("peer@again@*"))

    for each in (mine, theirs) if number % 2 else (theirs, mine):
        each()


def measured(scale: str, round_count: int) -> tuple[Seconds, Seconds, int]:
    """Return our seconds and LMCache's, after a warm-up, and the bytes that a round moves each way."""
    import torch

    python = environment(LMCACHE, LMCACHE_PACKAGES)
    port = str(free_port())
    with (
        redis_server(SERVER_BYTES, "--port", port, "--bind", "127.0.0.1") as path,
        rig(scale, "none", f"redis://127.0.0.1:{port}", path) as ours,
    ):
        with tempfile.NamedTemporaryFile() as file:
            planes = [plane.view(torch.uint8).numpy().ravel() for pair in ours.source for plane in pair]
            np.concatenate(planes).tofile(file.name)
            program = str(lmcache_redis_peer.__file__)
            peer = Program([str(python), "-P", program, port, file.name, str(CHUNKS[scale])])
            try:
                for number in range(CONTEXTS):
                    peer.do("store", str(number))
                    turn(ours, peer, number, Seconds(), Seconds())
                ours_s, peer_s = Seconds(), Seconds()
                for number in range(round_count):
                    turn(ours, peer, number, ours_s, peer_s)
            finally:
                peer.close()
        return ours_s, peer_s, ours.byte_count


def run(scale: str) -> Result:
    """Measure both sides. ``ratio``: LMCache's time of a fetch over ours, round by round."""
    ours, peer, byte_count = measured(scale, RUNS[scale])
    ratios = [theirs / mine for theirs, mine in zip(peer.fetch, ours.fetch, strict=True)]
    store_ratios = [theirs / mine for theirs, mine in zip(peer.store, ours.store, strict=True)]

    def rate(seconds: list[float]) -> float:
        return float(byte_count / statistics.median(seconds))

    show(
        f"peers-redis: {byte_count >> 20} MiB, {len(ratios)} rounds, one Redis",
        [
            ("fetch, kvstore: into the arena, checked", f"{rate(ours.fetch) / 1e9:.2f} GB/s"),
            (
                "  LMCache: into memory",
                f"{rate(peer.fetch) / 1e9:.2f} GB/s, ours {statistics.median(ratios):.2f} of it",
            ),
            ("store, kvstore: until all of it can be read", f"{rate(ours.store) / 1e9:.2f} GB/s"),
            ("  LMCache", f"{rate(peer.store) / 1e9:.2f} GB/s, ours {statistics.median(store_ratios):.2f} of it"),
        ],
    )
    ratio = statistics.median(ratios)
    return Result(
        name="peers-redis", value=rate(ours.fetch), unit="B/s", limit=rate(peer.fetch), ratio=ratio, target="none",
        met=True, runs=len(ratios), spread=quartiles(ratios),
        conditions={
            "scale": scale, "bytes": byte_count, "line": "TCP, loopback", "peer": LMCACHE_PACKAGES[0],
            "processors": os.cpu_count(), "store_bytes_per_s": rate(ours.store),
            "peer_store_bytes_per_s": rate(peer.store), "store_ratio": statistics.median(store_ratios),
            "store_spread": quartiles(store_ratios),
        },
    )  # fmt: skip
