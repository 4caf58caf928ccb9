"""Two nodes: a second sidecar acts as another node, which shares only a Redis server with the first."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvstore_client import connect
from rich.console import Console

from kvstore.errors import Unavailable
from kvstore.tiers.redis.embedded import server_binary
from kvstore.wire import spec_from_message
from kvstore_ops.locate import render
from kvstore_ops.redis_server import redis_server
from kvstore_ops.sidecar import Sidecar

REDIS_BYTES = 256 << 20
WAIT_S_MAX = 30.0
LOOKUP_S_MAX = "200 ms"
"""Longest wait of a lookup. It is long because a busy machine sometimes answers late, which must not show as a miss."""
QUIET = {"KVSTORE__POLICY__SCRUB_BYTES_PER_S": "0", "KVSTORE__POLICY__CANARY_INTERVAL_S": "0"}
"""Settings that turn off a sidecar's own reads from the device, so that all its reads are for the prompt."""


@contextmanager
def shared_redis() -> Iterator[str]:
    """Run a private Redis server, and yield its URL; empty when none is installed."""
    try:
        server_binary()
    except Unavailable:
        yield ""
        return
    with redis_server(REDIS_BYTES, "--maxmemory-policy", "allkeys-lru") as path:
        yield f"unix://{path}"


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
