"""LMCache's end of ``peers``: a program for LMCache's own environment, where kvstore is not installed.

    python -P lmcache_peer.py PORT HTTP_PORT TOKENS     beside ``lmcache server`` on these ports

Each line of its input, "store NUMBER", "fetch NUMBER" or "lookup NUMBER", is answered by a line with the seconds that
the command took. It drives the client of ``lmcache bench server``, with pages of the 8B geometry in the processors'
memory, and takes the seconds that this client measures. What is fetched is compared after the time was taken.
"""

from __future__ import annotations

import argparse
import sys
import time
import zlib
from typing import Any

import torch

SHAPE = "(2,512,16,8,128):bfloat16:32"
"""K and V, pages, tokens of a page, heads, dim; dtype; layers."""
VISIBLE_S_MAX = 10.0


def client_of(port: str, http_port: str, tokens: str) -> Any:
    """Return LMCache's client, started."""
    from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
    from lmcache.cli.commands.bench.server_bench.command import add_server_arguments
    from lmcache.cli.commands.bench.server_bench.config import parse_args_to_config

    parser = argparse.ArgumentParser()
    add_server_arguments(parser)
    words = f"--mode cpu --transfer-mode lmcache_driven --kvcache-shape-spec {SHAPE} --num-blocks 512 --block-size 16"
    words += f" --num-tokens {tokens} --rpc-url tcp://127.0.0.1:{port} --url http://127.0.0.1:{http_port}"
    client = ServerBenchClient(parse_args_to_config(parser.parse_args(words.split())), lambda _: None)
    client.start()
    return client


class Peer:
    """LMCache's client, and the checksums of what it has stored."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._sessions = 0
        self._stored: dict[int, Any] = {}

    def do(self, what: str, number: int) -> float:
        """Do one command, and return its seconds."""
        request, found = self._looked_up(number)
        count, client = request.num_full_tokens, self._client
        hit_tokens = found.hit_chunks * request.chunk_size
        assert hit_tokens == (0 if what == "store" else count), f"{what} of {number}: {hit_tokens} tokens are there"
        moved = found
        if what == "store":
            self._stored[number] = self._checksums(request)
            moved = client.store(request, start_token=0, token_count=count)
        elif what == "fetch":
            client.zero_destination(request, start_token=0, token_count=count)
            moved = client.retrieve(request, start_token=0, token_count=count)
            assert self._checksums(request) == self._stored[number], "it gave other bytes"
        assert moved.succeeded, f"its {what} failed"
        client.end_session(request)
        if what == "store":
            self._wait_visible(number)
        return float(moved.latency_ms) / 1e3

    def _checksums(self, request: Any) -> list[int]:
        """Return a checksum of each layer of a request's pages. Those of LMCache's client come from the daemon, and
        take longer than all else."""
        blocks = slice(request.block_offset, request.block_offset + request.num_blocks)
        (worker,) = self._client._workers
        return [
            zlib.crc32(each[:, blocks].contiguous().view(torch.uint8).numpy()) for each in worker.kv_caches.values()
        ]

    def _looked_up(self, number: int) -> tuple[Any, Any]:
        """Return a new request, and what its lookup found."""
        self._sessions += 1
        request = self._client.create_request(number, request_id=f"{number}-{self._sessions}", request_kind="cold")
        found = self._client.lookup(request)
        assert found.succeeded, "its lookup failed"
        return request, found

    def _wait_visible(self, number: int) -> None:
        """Return when a lookup finds all: the answer to a store may come before."""
        until_s = time.monotonic() + VISIBLE_S_MAX
        while True:
            request, found = self._looked_up(number)
            self._client.end_session(request)
            if found.is_full_hit:
                return
            assert time.monotonic() < until_s, f"of {number}, {found.hit_chunks} chunks can be found"
            time.sleep(0.01)


def main(port: str, http_port: str, tokens: str) -> None:
    """Run the commands of the input until it ends."""
    peer = Peer(client_of(port, http_port, tokens))
    print("ready", flush=True)
    for line in sys.stdin:
        what, name = line.split()
        print(peer.do(what, int(name)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
