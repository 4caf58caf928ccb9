"""LMCache's end of ``peers-redis``: a program for LMCache's own environment, where kvstore is not installed.

    python -P lmcache_redis_peer.py PORT FILE CHUNK_COUNT     the file's bytes are that many chunks, of one size

Each line of its input, "store NAME" or "fetch NAME", is answered by a line with the seconds that the command took. It
uses the native client that LMCache's "resp" adapter wraps, with that adapter's eight threads. Fetched bytes are
compared after the time was taken.
"""

from __future__ import annotations

import select
import sys
import time
from typing import Any

import numpy as np

WORKER_COUNT = 8
WAIT_S_MAX = 60.0


def done(client: Any, number: int) -> None:
    """Wait for one batch."""
    while True:
        ready, _, _ = select.select([client.event_fd()], [], [], WAIT_S_MAX)
        assert ready, "it does not answer"
        for completed, is_good, said, _ in client.drain_completions():
            if completed == number:
                assert is_good, said
                return


def main(port: str, path: str, chunk_count: str) -> None:
    """Run the commands of the input until it ends."""
    from lmcache.lmcache_redis import LMCacheRedisClient

    data, count = np.fromfile(path, np.uint8), int(chunk_count)
    target = np.ones_like(data)
    pieces = {"store": np.split(data, count), "fetch": np.split(target, count)}
    client = LMCacheRedisClient("127.0.0.1", int(port), WORKER_COUNT, "", "")
    submit = {"store": client.submit_batch_set, "fetch": client.submit_batch_get}
    print("ready", flush=True)
    for line in sys.stdin:
        what, name = line.split()
        target[:] = 0
        keys = [f"peer@{name}@{number}" for number in range(count)]
        began_s = time.perf_counter()
        done(client, submit[what](keys, [each.data for each in pieces[what]]))
        took_s = time.perf_counter() - began_s
        assert what == "store" or (target == data).all(), "it gave other bytes"
        print(took_s, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
