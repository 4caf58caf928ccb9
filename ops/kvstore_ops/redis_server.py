"""A private Redis server for the demo and the benchmarks, on a fresh directory."""

from __future__ import annotations

import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.errors import Unavailable
from kvstore.tiers.redis.embedded import dying_with_us, server_binary

START_S_MAX = 10.0


@contextmanager
def redis_server(byte_count: int, *options: str) -> Iterator[str]:
    """Run a server on a socket in a fresh directory, and yield the socket's path. ``options``: further words of its
    command, which win. Raises Unavailable when no server is installed, or it does not answer."""
    with tempfile.TemporaryDirectory(prefix="kvstore-redis-") as directory:
        path = f"{directory}/redis.sock"
        command = [
            *dying_with_us(), str(server_binary()), "--port", "0", "--unixsocket", path, "--unixsocketperm", "600",
            "--dir", directory, "--save", "", "--appendonly", "no", "--maxmemory", str(byte_count), *options,
        ]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                _wait(path)
                yield path
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
                    raise Unavailable(f"the private Redis does not answer on {path}") from None
            else:
                return
        time.sleep(0.01)
