"""redis: chunks from a Redis server into the arena, over a bare client that reads the same fields into its own memory.

The server is the embedded one, on a unix socket; both ends run on this machine. The bare client is one thread with one
connection, two fields in flight, a ``recv_into`` for each field, no checksum. On two processors it reads at one of two
rates, up to 1.7 times apart, which stand as long as its server and its connection do; so the rounds are divided among
several servers, each with a sidecar of its own. Pinned to the server's processor, whose caches have what was just sent,
it reads 1.2 times as fast as beside it. A fetched context is never in the arena: more contexts take turns than the
arena holds. A fetch ends when all slabs are there and checked; no client copies them.
Between the two stands a bare pipeline (``redis_pipeline``): two other processes read the same and hash it, as
movers do, without a service. It shows how much of the distance to the bare client is the service's own.
Beside it stands the rate at which stored chunks reach the server, over a bare client that writes the same fields. Both
are also measured for copies in envelopes, in fewer rounds.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from kvstore_client import Client, MissReason, Tier, connect

from kvstore.chunk import layout_of
from kvstore_ops.bench import copying as shared
from kvstore_ops.bench.paged import ask
from kvstore_ops.bench.redis_pipeline import IN_FLIGHT, Pipeline, read_fields
from kvstore_ops.bench.result import Result, quartiles, show
from kvstore_ops.sidecar import Sidecar

TARGET = 0.80
CHUNKS = {"full": 8, "quick": 4, "tiny": 1}
RUNS = {"full": 30, "quick": 15, "tiny": 2}
SEALED_RUNS = {"full": 10, "quick": 5, "tiny": 1}
SERVERS = {"full": 6, "quick": 3, "tiny": 1}
"""Among so many servers the rounds without an envelope are divided."""
NAMING_TEXT = "a secret of this benchmark, of 32 characters or more"
CONTEXTS = 3
ARENA_CONTEXTS = 2
POLL_S = 0.001
TRIES = 5
OVERLOADED_S = 0.2
"""Pause before another try: what held the room is given up by then."""
PUSHES_MAX = 100
"""Contexts that are stored at most to push one out of memory."""
WAIT_S_MAX = 60.0
LOOKUP_S_MAX = "1 s"
"""Longest wait of a lookup. It is long so that no fetch ends early because the server is busy for a moment."""


class Bare:
    """The limit: a bare client with one connection, and memory for everything that it reads."""

    def __init__(self, path: str, byte_count: int) -> None:
        import redis

        self.client: Any = redis.Redis(unix_socket_path=path, protocol=2)
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(path)
        self._memory = np.ones(byte_count + (1 << 20), np.uint8)

    def keys(self) -> set[bytes]:
        """Return the keys of all chunks."""
        return set(self.client.keys("*:c:*"))

    def fields(self, keys: Sequence[bytes]) -> list[tuple[bytes, bytes, int]]:
        """Return (key, name, bytes) of every field of these chunks; each chunk's header comes first."""
        found = []
        for key in keys:
            names = sorted(self.client.hkeys(key), key=lambda name: (name != b"h", len(name), name))
            found += [(key, name, self.client.hstrlen(key, name)) for name in names]
        return found

    def read(self, fields: Sequence[tuple[bytes, bytes, int]]) -> None:
        """Read the fields into own memory."""
        read_fields(self._line, self._memory.data, fields)

    def write(self, fields: Sequence[tuple[bytes, bytes, int]]) -> None:
        """Write the same fields from own memory, under other keys. The caller removes these keys afterwards."""
        for number, (key, name, size) in enumerate(fields):
            other = key + b"x"
            head = b"*4\r\n$4\r\nHSET\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n" % (
                len(other), other, len(name), name, size,
            )  # fmt: skip
            waiting = [memoryview(head), memoryview(self._memory[:size].data), memoryview(b"\r\n")]
            while waiting:
                count = self._line.sendmsg(waiting)
                while waiting and count >= len(waiting[0]):
                    count -= len(waiting.pop(0))
                if waiting:
                    waiting[0] = waiting[0][count:]
            if number + 1 >= IN_FLIGHT:
                self._heard()
        for _ in range(min(IN_FLIGHT - 1, len(fields))):
            self._heard()

    def _heard(self) -> None:
        assert self._line.recv(4, socket.MSG_WAITALL)[:1] == b":"

    def drop(self, keys: Sequence[bytes]) -> None:
        """Remove keys, and wait until the server has freed their memory."""
        self.client.unlink(*keys)
        while self.client.info("memory").get("lazyfree_pending_objects"):
            time.sleep(POLL_S)


@dataclass
class Seconds:
    """The seconds of each round."""

    fetch: list[float] = field(default_factory=list)
    bare_fetch: list[float] = field(default_factory=list)
    pipeline: list[float] = field(default_factory=list)
    store: list[float] = field(default_factory=list)
    bare_store: list[float] = field(default_factory=list)


class Rig:
    """A sidecar over its own Redis, a client of it, and the contexts that are fetched in turn."""

    def __init__(self, client: Client, bare: Bare, pipeline: Pipeline, scale: str) -> None:
        self.client, self.bare, self.pipeline = client, bare, pipeline
        self.spec = shared.geometry(scale)
        self.count = CHUNKS[scale] * shared.CHUNK_TOKENS
        self.source = shared.tensors(self.spec, self.count)
        shared.fill_with_noise(self.source)
        self.byte_count = sum(k.nbytes + v.nbytes for k, v in self.source)
        self.contexts = [self.store() for _ in range(CONTEXTS)]

    def account(self) -> Any:
        """Return the Redis tier's statistics."""
        return self.client.stats().tiers[-1]

    def store(self, seconds: Seconds | None = None) -> tuple[Any, list[tuple[bytes, bytes, int]]]:
        """Store a fresh context, wait until Redis has it, and return (tokens, fields in Redis)."""
        for _ in range(TRIES):
            tokens = shared.random_tokens(self.count, time.monotonic_ns() % (1 << 32))
            keys, before = self.bare.keys(), self.account().written_bytes
            receipt = self.client.store(self.spec, tokens, self.source)
            stored = receipt.stored_token_count
            began = time.perf_counter()
            self._wait_written(before + self.byte_count * stored // self.count)
            if stored == self.count:
                break
            time.sleep(OVERLOADED_S)  # the context before held its room yet: try another one
        assert stored == self.count, receipt.reason
        if seconds is not None:
            seconds.store.append(time.perf_counter() - began)
        return tokens, self.bare.fields(sorted(self.bare.keys() - keys))

    def _wait_written(self, byte_count: int) -> None:
        """Wait until so many bytes have been written to Redis since the start."""
        until = time.perf_counter() + WAIT_S_MAX
        while self.account().written_bytes < byte_count:
            assert time.perf_counter() < until, self.client.stats().tier_problem
            time.sleep(POLL_S)

    def store_and_drop(self, seconds: Seconds | None = None) -> None:
        """Store a fresh context, and remove it from Redis."""
        _, stored = self.store(seconds)
        self.bare.drop(list(dict.fromkeys(key for key, _, _ in stored)))

    def is_in_memory(self, tokens: Any) -> bool:
        """Return True when any of a context is there: its first chunk leaves last. The presence table tells nothing of
        a context that goes on beyond the node."""
        match = self.client.peek(self.spec, tokens[: shared.CHUNK_TOKENS])
        return match is not None and any(chunk.tier is Tier.DRAM for chunk in match.chunks)

    def fetch(self, number: int, seconds: Seconds, tries: int = TRIES) -> None:
        """Fetch a context into the arena, and another one where the one before had not left all of its room yet, or
        where a part of this one was still there: each use makes it stay longer."""
        tokens = self.contexts[number][0]
        for _ in range(PUSHES_MAX):
            if not self.is_in_memory(tokens):  # it may have been in use when others came, so that one of them left
                break
            self.store_and_drop()
        before = self.account().read_bytes
        began = time.perf_counter()
        prefix = ask(self.client, self.spec, tokens)
        while prefix.advance():
            pass  # each call returns whether there is another step
        took = time.perf_counter() - began
        found = (prefix.settle(set()), prefix.tier, prefix.reason)
        prefix.close()
        is_all = self.account().read_bytes - before == self.byte_count
        if (found[2] is MissReason.OVERLOADED or not is_all) and tries > 1:
            time.sleep(OVERLOADED_S)
            self.renew(number)
            self.fetch(number, seconds, tries - 1)
            return
        assert found[:2] == (self.count, Tier.REDIS), found
        assert is_all, "it was not read from Redis"
        seconds.fetch.append(took)

    def renew(self, number: int) -> None:
        """Have a fresh context take the place of one."""
        self.bare.drop(list(dict.fromkeys(key for key, _, _ in self.contexts[number][1])))
        self.contexts[number] = self.store()

    def round(self, number: int, seconds: Seconds) -> None:
        """Let each side fetch once and store once."""
        fields = self.contexts[number][1]
        seconds.bare_fetch.append(shared.timed(lambda: self.bare.read(fields)))
        self.pipeline.give(fields)
        seconds.pipeline.append(shared.timed(self.pipeline.read))
        self.fetch(number, seconds)
        seconds.bare_store.append(shared.timed(lambda: self.bare.write(fields)))
        self.bare.drop([key + b"x" for key in dict.fromkeys(key for key, _, _ in fields)])
        self.store_and_drop(seconds)


@contextmanager
def rig(scale: str, envelope: str, url: str = "", path: str = "") -> Iterator[Rig]:
    """Yield the rig of a fresh sidecar, whose arena is backed by pages. Copies get this envelope, with the key of a
    tenant's secret. Redis is the embedded one, or the one at ``url``, whose socket is ``path``."""
    spec = shared.geometry(scale)
    slot_bytes = layout_of(spec, spec.kind, shared.CHUNK_TOKENS).total_bytes
    context_bytes = slot_bytes * CHUNKS[scale]
    embedded = {"EMBEDDED": "true", "EMBEDDED_BYTES": str((CONTEXTS + 3) * context_bytes + (256 << 20))}
    own = {**({"URL": url} if url else embedded), "LOOKUP_S_MAX": LOOKUP_S_MAX, "ENVELOPE": envelope}
    environment = {**os.environ, **{f"KVSTORE__TIERS__REDIS__{name}": value for name, value in own.items()}}
    capacity = ARENA_CONTEXTS * context_bytes
    sidecar = Sidecar("--capacity", str(capacity), environment=environment)
    secret = sidecar.directory / "secret"
    secret.touch(0o600)
    secret.write_text(NAMING_TEXT)
    environment["KVSTORE__TENANTS__DEFAULT__SECRET_FILE"] = str(secret)
    with sidecar:
        sidecar.wait_prefaulted()
        path = path or str(next((Path(sidecar.directory) / "redis").glob("*/redis.sock")))
        with closing(Pipeline(path, context_bytes)) as pipeline, connect(sidecar.address, timeout_s=60.0) as client:
            yield Rig(client, Bare(path, context_bytes), pipeline, scale)


@dataclass
class Rates:
    """The rates with one envelope: each round's ratio to the bare client, and the median rates in B/s."""

    fetch_ratios: list[float]
    store_ratios: list[float]
    fetch: float
    bare_fetch: float
    store: float
    bare_store: float
    pipeline: float
    pipeline_ratios: list[float]
    """Each round's ratio of the fetch to the pipeline."""
    limit_ratios: list[float]
    """Each round's ratio of the pipeline to the bare client."""
    byte_count: int


def measured(scale: str, envelope: str, round_count: int, server_count: int = 1) -> Rates:
    """Measure interleaved rounds of fetches and stores, ours and bare, after a warm-up of each server."""
    seconds = Seconds()
    for server in range(server_count):
        with rig(scale, envelope) as ours:
            for number in range(CONTEXTS):
                ours.round(number, Seconds())
            for number in range(server, round_count, server_count):
                ours.round(number // server_count % CONTEXTS, seconds)
            byte_count = ours.byte_count

    def rate(values: list[float]) -> float:
        return float(byte_count / statistics.median(values))

    return Rates(
        [limit / mine for mine, limit in zip(seconds.fetch, seconds.bare_fetch, strict=True)],
        [limit / mine for mine, limit in zip(seconds.store, seconds.bare_store, strict=True)],
        rate(seconds.fetch), rate(seconds.bare_fetch), rate(seconds.store), rate(seconds.bare_store),
        rate(seconds.pipeline),
        [limit / mine for mine, limit in zip(seconds.fetch, seconds.pipeline, strict=True)],
        [limit / mine for mine, limit in zip(seconds.pipeline, seconds.bare_fetch, strict=True)], byte_count,
    )  # fmt: skip


def run(scale: str) -> Result:
    """Measure without an envelope, to which the target applies, then with each kind of envelope."""
    found = measured(scale, "none", RUNS[scale], SERVERS[scale])
    sealed = {kind: measured(scale, kind, SEALED_RUNS[scale]) for kind in ("mac", "aead")}
    ratio, store_ratio = statistics.median(found.fetch_ratios), statistics.median(found.store_ratios)
    of_pipeline, limit_ratio = statistics.median(found.pipeline_ratios), statistics.median(found.limit_ratios)
    rows = [
        ("fetch into the arena, checked", f"{found.fetch / 1e9:.2f} GB/s, {ratio:.3f} of the bare client"),
        ("  bare: recv_into", f"{found.bare_fetch / 1e9:.2f} GB/s"),
        ("  bare: two processes that hash", f"{found.pipeline / 1e9:.2f} GB/s, {limit_ratio:.3f} of the bare client"),
        ("  the fetch over these", f"{of_pipeline:.3f}"),
        ("stored chunks reach Redis", f"{found.store / 1e9:.2f} GB/s, {store_ratio:.3f} of the bare client"),
        ("  bare: sendmsg", f"{found.bare_store / 1e9:.2f} GB/s"),
    ]
    for kind, each in sealed.items():
        fetched, stored = statistics.median(each.fetch_ratios), statistics.median(each.store_ratios)
        rows += [
            (f"fetch, envelope {kind}", f"{each.fetch / 1e9:.2f} GB/s, {fetched:.3f} of the bare client"),
            (f"store, envelope {kind}", f"{each.store / 1e9:.2f} GB/s, {stored:.3f} of the bare client"),
        ]
    show(f"redis: {found.byte_count >> 20} MiB, {len(found.fetch_ratios)} rounds, {SERVERS[scale]} servers", rows)
    return Result(
        name="redis", value=found.fetch, unit="B/s", limit=found.bare_fetch, ratio=ratio,
        target=f">= {TARGET}", met=ratio >= TARGET, runs=len(found.fetch_ratios), spread=quartiles(found.fetch_ratios),
        conditions={
            "scale": scale, "bytes": found.byte_count, "line": "unix socket", "processors": os.cpu_count(),
            "servers": SERVERS[scale],
            "store_bytes_per_s": found.store, "store_ratio": store_ratio, "store_spread": quartiles(found.store_ratios),
            "bare_store_bytes_per_s": found.bare_store, "pipeline_bytes_per_s": found.pipeline,
            "pipeline_ratio": of_pipeline, "limit_ratio": limit_ratio,
            "pipeline_spread": quartiles(found.pipeline_ratios),
            **{f"{kind}_bytes_per_s": each.fetch for kind, each in sealed.items()},
            **{f"{kind}_ratio": statistics.median(each.fetch_ratios) for kind, each in sealed.items()},
            **{f"{kind}_store_ratio": statistics.median(each.store_ratios) for kind, each in sealed.items()},
        },
    )  # fmt: skip
