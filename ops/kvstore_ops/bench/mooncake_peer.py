"""Mooncake's end of ``peers``: programs for Mooncake's own environment, where kvstore is not installed.

    python -P mooncake_peer.py segment MASTER_PORT PORT             owns the memory, until its input ends
    python -P mooncake_peer.py client MASTER_PORT PORT CHUNK_COUNT CHUNK_BYTES

Each line of the client's input, "store NUMBER", "fetch NUMBER" or "lookup NUMBER", is answered by a line with the
seconds that the command took. Fetched bytes are compared after the time was taken.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

SEGMENT_BYTES, LOCAL_BYTES = 3 << 30, 64 << 20


def begun(master_port: str, port: str, segment_bytes: int) -> Any:
    """Return a store that is set up."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    status = store.setup(
        f"127.0.0.1:{port}", "P2PHANDSHAKE", segment_bytes, LOCAL_BYTES, "tcp", "", f"127.0.0.1:{master_port}"
    )
    assert status == 0, f"its setup ended with {status}"
    return store


def serve(store: Any, chunk_count: int, chunk_bytes: int) -> None:
    """Run the commands of the input until it ends."""
    data = np.random.default_rng(1).integers(0, 255, chunk_count * chunk_bytes, np.uint8)
    target = np.ones_like(data)
    for each in (data, target):
        assert store.register_buffer(each.ctypes.data, each.nbytes) == 0
    places = {"store": data, "fetch": target}
    print("ready", flush=True)
    for line in sys.stdin:
        what, name = line.split()
        keys, sizes = [f"{name}@{number}" for number in range(chunk_count)], [chunk_bytes] * chunk_count
        memory = places.get(what, data)
        pointers = [memory.ctypes.data + number * chunk_bytes for number in range(chunk_count)]
        target[:] = 0
        began_s = time.perf_counter()
        if what == "store":
            ends, right = store.batch_put_from(keys, pointers, sizes), 0
        elif what == "fetch":
            ends, right = store.batch_get_into(keys, pointers, sizes), chunk_bytes
        else:
            ends, right = store.batch_is_exist(keys), 1
        took_s = time.perf_counter() - began_s
        assert list(ends) == [right] * chunk_count, f"its {what} ended with {ends}"
        assert what != "fetch" or (target == data).all(), "it gave other bytes"
        print(took_s, flush=True)


def main(role: str, master_port: str, port: str, *sizes: str) -> None:
    """Run one of the programs."""
    store = begun(master_port, port, SEGMENT_BYTES if role == "segment" else 0)
    if role == "client":
        serve(store, *map(int, sizes))
    else:
        print("ready", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
