"""remote: a fetch of 256 MiB over loopback TCP, verified, into pre-faulted tensors. The limit is a bare gRPC stream of
as many bytes in messages of the same size, decoded by hand and dropped."""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from kvstore_client import connect
from kvstore_client.planes.stream.session import OPTIONS

from kvstore.remote.door import OPTIONS as SERVER_OPTIONS
from kvstore.v1 import remote_pb2 as rpb
from kvstore.wire.data import data_message, split_message
from kvstore_ops.bench import copying as shared
from kvstore_ops.bench.lookup import cpu_seconds
from kvstore_ops.bench.result import Result, quartiles, show
from kvstore_ops.sidecar import TOKEN, Sidecar

TARGET = 0.70
MESSAGE_BYTES = 2 << 20
PATH = "/bench/Stream"


async def serve() -> None:
    """Run the limit's server. It sends as many messages as a request asks for, each the same bytes, made beforehand."""
    run = rpb.StripRun(chunk=1, strip_first=8, strip_count=16, byte_count=MESSAGE_BYTES)
    data = np.random.default_rng(0).integers(0, 255, MESSAGE_BYTES, dtype=np.uint8)
    message = data_message(rpb.FetchBytesResponse(runs=[run]), [data])

    async def stream(request: bytes, context: Any) -> None:
        for _ in range(int(request)):
            await context.write(message)

    server = grpc.aio.server(options=SERVER_OPTIONS)
    handlers = {"Stream": grpc.unary_stream_rpc_method_handler(stream)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", handlers),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await asyncio.to_thread(sys.stdin.read)  # until the benchmark ends
    await server.stop(None)


@contextmanager
def bare_server() -> Iterator[tuple[str, int]]:
    """Run the limit's server in a process of its own, as the remote plane's is, and yield (address, process id)."""
    command = [sys.executable, "-m", "kvstore_ops.bench.remote"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        yield f"127.0.0.1:{int(process.stdout.readline())}", process.pid
        process.stdin.close()


def _with_children(pid: int) -> list[int]:
    """Return the ids of a process and of its children: the sidecar, the remote plane and others."""
    return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def _both_ends(action: Callable[[], None], server: list[int]) -> tuple[float, float]:
    """Return the seconds that the action takes, and the processor seconds that this process and ``server`` spend."""

    def spent() -> float:
        return time.process_time() + sum(map(cpu_seconds, server))

    before = spent()
    passed = shared.timed(action)
    return passed, spent() - before


def run(scale: str) -> Result:
    """Measure interleaved pairs of a fetch and a bare stream, after a warm-up of both."""
    spec = shared.geometry(scale)
    count = shared.CHUNKS[scale] * shared.CHUNK_TOKENS
    tokens = shared.random_tokens(count, 1)
    into = shared.tensors(spec, count)
    byte_count = sum(k.nbytes + v.nbytes for k, v in into)
    capacity = "64 MiB" if scale == "tiny" else "1 GiB"
    pairs: list[tuple[tuple[float, float], tuple[float, float]]] = []
    stores: list[float] = []
    with Sidecar("--capacity", capacity, plane="remote") as sidecar, bare_server() as (address, bare_pid):
        sidecar.wait_prefaulted()
        with (
            connect(sidecar.address, token=TOKEN, timeout_s=60.0) as client,
            grpc.insecure_channel(address, OPTIONS) as bare,
        ):
            stream = bare.unary_stream(PATH)
            stores.append(shared.timed(lambda: client.store(spec, tokens, into).wait()))

            def fetch() -> None:
                assert client.fetch(spec, tokens, into=into).token_count == count

            def limit() -> None:
                for message in stream(str(-(-byte_count // MESSAGE_BYTES)).encode()):
                    split_message(rpb.FetchBytesResponse, message)

            fetch()
            limit()
            server = _with_children(sidecar.pid)
            for _ in range(shared.RUNS[scale]):
                pairs.append((_both_ends(limit, [bare_pid]), _both_ends(fetch, server)))
    limits, ours = ([pair[side][0] for pair in pairs] for side in (0, 1))
    bare_s, spent_s = (statistics.mean(pair[side][1] for pair in pairs) for side in (0, 1))
    ratios = [each / mine for each, mine in zip(limits, ours, strict=True)]
    ratio = statistics.median(ratios)
    rate, limit_rate = byte_count / statistics.median(ours), byte_count / statistics.median(limits)
    show(
        f"remote: {byte_count >> 20} MiB over loopback TCP, {len(ours)} pairs",
        [
            ("fetch, verified", f"{rate / 1e9:.2f} GB/s, {ratio:.3f} of the bare stream"),
            ("bare gRPC stream", f"{limit_rate / 1e9:.2f} GB/s"),
            ("processor time at both ends", f"{spent_s * 1e3:.0f} ms, the bare stream {bare_s * 1e3:.0f} ms"),
            ("store, first and committed", f"{byte_count / stores[0] / 1e9:.2f} GB/s"),
        ],
    )
    return Result(
        name="remote", value=rate, unit="B/s", limit=limit_rate, ratio=ratio, target=f">= {TARGET}",
        met=ratio >= TARGET, runs=len(ours), spread=quartiles(ratios),
        conditions={
            "scale": scale, "bytes": byte_count, "message_bytes": MESSAGE_BYTES, "tls": False, "verified": True,
            "processors": os.cpu_count(), "processor_s": spent_s, "bare_processor_s": bare_s,
            "store_bytes_per_s": byte_count / stores[0],
        },
    )  # fmt: skip


if __name__ == "__main__":
    asyncio.run(serve())
