"""LMCache's end of ``peers-s3``: a program for LMCache's own environment, where kvstore is not installed.

    python -P lmcache_s3_peer.py HOST FILE CHUNK_COUNT     the file's bytes are that many chunks, of one size

Each line of its input, "store NAME" or "fetch NAME", is answered by a line with the seconds that the command took. It
uses LMCache's S3 adapter with the settings that it has by itself, but for TLS. Fetched bytes are compared after the
time was taken.
"""

from __future__ import annotations

import os
import select
import sys
import time
from typing import Any

import numpy as np

WAIT_S_MAX = 60.0


class Piece:
    """A chunk's memory: what the adapter uses of LMCache's memory objects."""

    def __init__(self, memory: Any) -> None:
        self.data_ptr = memory.ctypes.data
        self.byte_array = memory.data
        self._byte_count = memory.nbytes

    def get_size(self) -> int:
        return int(self._byte_count)


def main(host: str, path: str, chunk_count: str) -> None:
    """Run the commands of the input until it ends."""
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.distributed.l2_adapters.s3_l2_adapter import S3L2Adapter, S3L2AdapterConfig

    data, count = np.fromfile(path, np.uint8), int(chunk_count)
    target = np.ones_like(data)
    pieces = {"store": np.split(data, count), "fetch": np.split(target, count)}
    config = S3L2AdapterConfig(
        host, "us-east-1", s3_prefer_http2=False, disable_tls=True, aws_access_key_id="bench",
        aws_secret_access_key="bench",  # noqa: S106 - the responder checks none
    )  # fmt: skip
    adapter = S3L2Adapter(config)

    def do(what: str, keys: list[Any], memory: list[Any]) -> None:
        event = adapter.get_store_event_fd() if what == "store" else adapter.get_load_event_fd()
        number = (adapter.submit_store_task if what == "store" else adapter.submit_load_task)(keys, memory)
        ready, _, _ = select.select([event], [], [], WAIT_S_MAX)
        assert ready, "it does not answer"
        os.eventfd_read(event)
        if what == "store":
            assert int(adapter.pop_completed_store_tasks()[number]) >= 0, "it did not store"
        else:
            found = adapter.query_load_result(number)
            assert found is not None, "it told no end"
            assert found.popcount() == len(keys), "it did not load"

    print("ready", flush=True)
    for line in sys.stdin:
        what, name = line.split()
        target[:] = 0
        keys = [ObjectKey(f"{name}-{number}".encode(), "peer", 0) for number in range(count)]
        memory = [Piece(each) for each in pieces[what]]
        began_s = time.perf_counter()
        do(what, keys, memory)
        took_s = time.perf_counter() - began_s
        assert what == "store" or (target == data).all(), "it gave other bytes"
        print(took_s, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
