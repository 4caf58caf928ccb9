"""peers: chunks to and from one Redis by LMCache and by kvstore, in turns, the same bytes.

LMCache has an environment of its own (2 GB) at KVSTORE_BENCH_LMCACHE; pip makes it here when it is missing. LMCache's
side is the native client of its Redis adapter, from memory to memory. Our side is a sidecar, from the arena and back
into it, with every strip checked. Both reach one server by TCP on loopback.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import redis

from kvstore.errors import Unavailable
from kvstore.tiers.redis.embedded import dying_with_us, server_binary
from kvstore_ops.bench import lmcache_peer
from kvstore_ops.bench.redis import CHUNKS, CONTEXTS, RUNS, Rig, Seconds, rig
from kvstore_ops.bench.result import Result, note, quartiles, show

ENVIRONMENT = "KVSTORE_BENCH_LMCACHE"
PACKAGES = ("torch==2.13.0", "lmcache==0.5.6")
SERVER_BYTES = 8 << 30
START_S_MAX = 10.0


def environment() -> Path:
    """Return the Python of LMCache's environment. Raises Unavailable when the variable is not set."""
    place = os.environ.get(ENVIRONMENT)
    if not place:
        raise Unavailable(f"{ENVIRONMENT} is not set: name a directory with LMCache's environment, or where to make it")
    python = Path(place) / "bin" / "python"
    if not python.exists():
        note(f"making {place}: {' '.join(PACKAGES)}")
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    return python


@contextmanager
def server() -> Iterator[tuple[int, str]]:
    """Run a private Redis, and yield its port on loopback and its socket's path."""
    with tempfile.TemporaryDirectory(prefix="kvstore-redis-") as directory:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port: int = free.getsockname()[1]
        path = f"{directory}/redis.sock"
        command = [
            *dying_with_us(), str(server_binary()), "--port", str(port), "--bind", "127.0.0.1", "--unixsocket", path,
            "--save", "", "--appendonly", "no", "--maxmemory", str(SERVER_BYTES), "--dir", directory,
        ]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                _wait(port)
                yield port, path
            finally:
                process.kill()


def _wait(port: int) -> None:
    until_s = time.monotonic() + START_S_MAX
    while True:
        try:
            redis.Redis(host="127.0.0.1", port=port).ping()
            return
        except redis.ConnectionError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.01)


class Peer:
    """LMCache's program, which gets its commands line by line."""

    def __init__(self, python: Path, port: int, path: Path, count: int) -> None:
        command = [*dying_with_us(), str(python), "-P", str(lmcache_peer.__file__), str(port), str(path), str(count)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._said() == "ready"

    def _said(self) -> str:
        assert self.process.stdout is not None
        while (line := self.process.stdout.readline()) and not (line[:1].isdigit() or line == "ready\n"):
            continue  # skip its log
        if not line:
            raise Unavailable(f"LMCache's program ended with status {self.process.wait()}: see what it said above")
        return line.strip()

    def do(self, what: str, name: str) -> float:
        """Do a "store" or "fetch" of all chunks under a name, and return its seconds."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what} {name}\n")
        self.process.stdin.flush()
        return float(self._said())

    def close(self) -> None:
        """Kill the program. Idempotent."""
        self.process.kill()
        self.process.wait()


def turn(ours: Rig, peer: Peer, number: int, ours_s: Seconds, peer_s: Seconds) -> None:
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

    python = environment()
    with server() as (port, path), rig(scale, "none", f"redis://127.0.0.1:{port}", path) as ours:
        with tempfile.NamedTemporaryFile() as file:
            planes = [plane.view(torch.uint8).numpy().ravel() for pair in ours.source for plane in pair]
            np.concatenate(planes).tofile(file.name)
            peer = Peer(python, port, Path(file.name), CHUNKS[scale])
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
        f"peers: {byte_count >> 20} MiB, {len(ratios)} rounds, one Redis",
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
        name="peers", value=rate(ours.fetch), unit="B/s", limit=rate(peer.fetch), ratio=ratio, target="none",
        met=True, runs=len(ratios), spread=quartiles(ratios),
        conditions={
            "scale": scale, "bytes": byte_count, "line": "TCP, loopback", "peer": PACKAGES[-1],
            "processors": os.cpu_count(), "store_bytes_per_s": rate(ours.store),
            "peer_store_bytes_per_s": rate(peer.store), "store_ratio": statistics.median(store_ratios),
            "store_spread": quartiles(store_ratios),
        },
    )  # fmt: skip
