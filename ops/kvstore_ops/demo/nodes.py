"""Two nodes: a second sidecar acts as another node, which shares only a Redis server with the first."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvstore_client import connect
from rich.console import Console

from kvstore.errors import Unavailable
from kvstore.tiers.redis.embedded import server_binary
from kvstore.wire import spec_from_message
from kvstore_ops.locate import render
from kvstore_ops.sidecar import Sidecar

REDIS_BYTES = 256 << 20
START_S_MAX = 10.0
WAIT_S_MAX = 30.0
LOOKUP_S_MAX = "200 ms"
"""Longest wait of a lookup. It is long because a busy machine sometimes answers late, which must not show as a miss."""
QUIET = {"KVSTORE__POLICY__SCRUB_BYTES_PER_S": "0", "KVSTORE__POLICY__CANARY_INTERVAL_S": "0"}
"""Settings that turn off a sidecar's own reads from the device, so that all its reads are for the prompt."""


@contextmanager
def shared_redis() -> Iterator[str]:
    """Run a private Redis server on a socket in a fresh directory, and yield its URL; empty when none is installed."""
    with tempfile.TemporaryDirectory(prefix="kvstore-redis-") as directory:
        path = f"{directory}/redis.sock"
        try:
            binary = server_binary()
        except Unavailable:
            yield ""
            return
        command = [
            str(binary), "--port", "0", "--unixsocket", path, "--unixsocketperm", "600", "--dir", directory,
            "--save", "", "--appendonly", "no", "--maxmemory", str(REDIS_BYTES), "--maxmemory-policy", "allkeys-lru",
        ]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                _wait(path)
                yield f"unix://{path}"
            finally:
                process.kill()


def _wait(path: str) -> None:
    until_s = time.monotonic() + START_S_MAX
    while True:
        with socket.socket(socket.AF_UNIX) as line:
            try:
                line.connect(path)
            except OSError:
                if time.monotonic() > until_s:
                    raise Unavailable(f"the demo's Redis does not answer on {path}") from None
            else:
                return
        time.sleep(0.01)


def settings_of(name: str, url: str) -> dict[str, str]:
    """Return the environment of the node ``name``. ``url``: its Redis; empty: none."""
    redis = {"KVSTORE__TIERS__REDIS__URL": url, "KVSTORE__TIERS__REDIS__LOOKUP_S_MAX": LOOKUP_S_MAX} if url else {}
    return {**os.environ, **QUIET, "KVSTORE__SERVER__NODE": name, **redis}


def wait_shared(sidecar: Sidecar) -> None:
    """Wait until Redis has all chunks of the node."""
    until_s = time.monotonic() + WAIT_S_MAX
    with connect(sidecar.address) as client:
        while client.stats().backlog_chunk_count and time.monotonic() < until_s:
            time.sleep(0.02)


def show_places(sidecar: Sidecar, tokens: Sequence[int], console: Console) -> None:
    """Print the places of a prompt's prefix, as ``kvstore locate`` does, once both nodes report it."""
    with connect(sidecar.address) as client:
        spec = next(spec_from_message(each.spec) for each in client.stats().models if each.spec.layers)
        until_s = time.monotonic() + WAIT_S_MAX
        while len((found := client.locate(spec, tokens)).nodes) < 2 and time.monotonic() < until_s:
            time.sleep(0.1)
    console.print("kvstore locate, asked of the other node:")
    console.print(render([found], [len(tokens)]))
