"""lookup-shared: a lookup of 128 keys, half of which lie in memory and half in Redis, over one round trip and a
millisecond.

The round trip has two legs, from the client to the sidecar and from there to Redis: a lookup call that names no chunks,
and a bare client's pipelined EXISTS of the keys that the node lacks, over one connection, with nothing else. The
service asks Redis for these keys alone, because it knows its own chunks. The round trip of all keys would be an easier
limit; it stands beside it, as does the ratio without the call, which no client of any sidecar could reach.
All use one unix socket of one server, in turns. Another node stored the chains. Each chain is looked up once, because
the service remembers an answer for some seconds.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from kvstore_client import Client, Match, ModelSpec, Tier, connect

from kvstore.keys import fingerprint
from kvstore.v1 import cache_pb2 as pb
from kvstore_ops.bench import copying as shared
from kvstore_ops.bench.result import Result, quartiles, show
from kvstore_ops.sidecar import Sidecar

KEYS = 128
NEAR = KEYS // 2
"""Number of keys whose chunks are in memory."""
MORE_S = 0.001
TARGET = 1.0
CHAINS = {"full": 240, "quick": 80, "tiny": 6}
WARM_UP = 3
STORED_S_MAX = 120.0


class BareExists:
    """The limit: a bare client of Redis."""

    def __init__(self, path: str) -> None:
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(path)

    def ask(self, keys: Sequence[bytes]) -> None:
        """Ask for these keys, and return once Redis has answered that all of them exist."""
        self._line.sendall(b"".join(b"*2\r\n$6\r\nEXISTS\r\n$%d\r\n%b\r\n" % (len(key), key) for key in keys))
        assert self._line.recv(4 * len(keys), socket.MSG_WAITALL) == b":1\r\n" * len(keys)


def _sidecar(**redis: str) -> Sidecar:
    environment = {f"KVSTORE__TIERS__REDIS__{name}": value for name, value in redis.items()}
    environment["KVSTORE__POLICY__SCRUB_BYTES_PER_S"] = "0"  # of chunks as small as these it reads hundreds a second
    return Sidecar("--capacity", "64 MiB", environment={**os.environ, **environment})


@contextmanager
def _nodes() -> Iterator[tuple[Client, Client, str]]:
    """Yield a client of the storing node, a client of the asking node, and the path of the socket of their Redis."""
    with _sidecar(EMBEDDED="true") as storing:
        path = f"{storing.directory}/redis/default/redis.sock"
        with _sidecar(URL=f"unix://{path}", WRITE="never", LOOKUP_S_MAX="1 s") as asking:
            for each in (storing, asking):
                each.wait_prefaulted()
            with connect(storing.address, timeout_s=60.0) as one, connect(asking.address, timeout_s=60.0) as two:
                yield one, two, path


def _stored(client: Client, spec: ModelSpec, server: Any, tokens: Any) -> list[bytes]:
    """Store a chain, wait until Redis has it, and return the Redis keys that are new."""
    before, plane = set(server.keys("*:c:*")), np.zeros((1, len(tokens), 8), np.uint16)
    client.store(spec, tokens, [(plane, plane)]).wait()
    until_s = time.monotonic() + STORED_S_MAX
    while client.stats().backlog_chunk_count:
        assert time.monotonic() < until_s, client.stats().tier_problem
        time.sleep(0.002)
    return sorted(set(server.keys("*:c:*")) - before)


def _check(match: Match) -> None:
    assert match.prefix_token_count == KEYS
    assert [each.tier for each in match.chunks] == [Tier.DRAM] * NEAR + [Tier.REDIS] * (KEYS - NEAR)


def run(scale: str) -> Result:
    """Measure one lookup and one round trip for each chain."""
    import redis

    spec = ModelSpec.dense(
        "bench-lookup", "unverified:bench", layer_count=1, kv_heads=1, head_dim=8, hidden_size=8, chunk_tokens=1,
        vocab_size=shared.VOCABULARY,
    )  # fmt: skip
    first = shared.random_tokens(NEAR, 1)
    rests = [shared.random_tokens(KEYS - NEAR, 2 + number) for number in range(WARM_UP + CHAINS[scale])]
    chains = [np.concatenate([first, each]) for each in rests]
    with _nodes() as (storing, asking, path):
        server = redis.Redis(unix_socket_path=path, protocol=2)
        near_keys = _stored(storing, spec, server, first)
        keys = [_stored(storing, spec, server, each) for each in chains]
        plane = np.zeros((1, NEAR, 8), np.uint16)
        asking.store(spec, first, [(plane, plane)]).wait()
        bare = BareExists(path)
        session = asking.connect_now()
        empty = pb.LookupRequest(query=pb.ChainQuery(fingerprint=fingerprint(spec, spec.kind)))
        ours, trips, whole_trips, nothing, found = [], [], [], [], []
        for chain, far in zip(chains, keys, strict=True):
            assert len(far) == KEYS - NEAR
            trips.append(shared.timed(lambda far=far: bare.ask(far)))  # type: ignore[misc]  # bound at once
            whole_trips.append(shared.timed(lambda far=far: bare.ask([*near_keys, *far])))  # type: ignore[misc]  # as above
            nothing.append(shared.timed(lambda: session.call(session.cache.Lookup, empty, 10.0)))
            ours.append(shared.timed(lambda chain=chain: found.append(asking.lookup(spec, chain))))  # type: ignore[misc]  # as above
        near = [shared.timed(lambda: asking.lookup(spec, first)) for _ in ours]
        for match in found:
            _check(match)
    ours, trips, nothing = ours[WARM_UP:], trips[WARM_UP:], nothing[WARM_UP:]
    ratios = [mine / (call + trip + MORE_S) for mine, call, trip in zip(ours, nothing, trips, strict=True)]
    value, trip_s, call_s = statistics.median(ours), statistics.median(trips), statistics.median(nothing)
    whole_s = statistics.median(whole_trips[WARM_UP:])
    limit_s = call_s + trip_s + MORE_S
    ratio = value / limit_s
    show(
        f"lookup-shared: {KEYS} keys, {KEYS - NEAR} of them in Redis only; {len(ours)} lookups",
        [
            ("lookup p50", f"{value * 1e6:.0f} us, {ratio:.2f} of one round trip and 1 ms (target {TARGET})"),
            ("lookup p99", f"{np.percentile(ours, 99) * 1e6:.0f} us"),
            ("  one leg: a lookup call that names no chunks p50", f"{call_s * 1e6:.0f} us"),
            (f"  one leg: a bare pipelined EXISTS of {KEYS - NEAR} p50", f"{trip_s * 1e6:.0f} us"),
            ("  lookup over the second leg and 1 ms alone", f"{value / (trip_s + MORE_S):.2f}"),
            (f"  bare: pipelined EXISTS of all {KEYS} p50", f"{whole_s * 1e6:.0f} us"),
            (f"  the {NEAR} in memory alone, without a call, p50", f"{statistics.median(near) * 1e6:.0f} us"),
        ],
    )
    return Result(
        name="lookup-shared", value=value, unit="s", limit=limit_s, ratio=ratio, target=f"<= {TARGET}",
        met=ratio <= TARGET, runs=len(ours), spread=quartiles(ratios), conditions={
            "scale": scale, "line": "unix socket", "processors": os.cpu_count(), "round_trip_us": trip_s * 1e6,
            "asked_keys": KEYS - NEAR, "keys": KEYS, "round_trip_of_all_keys_us": whole_s * 1e6,
            "p99_us": float(np.percentile(ours, 99)) * 1e6, "empty_call_us": call_s * 1e6,
            "ratio_without_call": value / (trip_s + MORE_S),
            "near_us": statistics.median(near) * 1e6,
        },
    )  # fmt: skip
