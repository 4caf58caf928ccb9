"""s3: fetches of chunks of the 8B geometry from a bucket into the arena, verified. The limit is bare aiobotocore with 8
ranged GETs of the same sizes against the same server, whose bytes are dropped. Stores are measured, too, over bare PUTs
of the same bytes.

The server is ``s3_responder``, a minimal one in memory: with a real server on the same cores both sides would mostly
wait for it. Both sides are also measured against a responder whose answers begin 30 ms late, which simulates a bucket.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstore.chunk import ChunkHeader, ChunkLayout, checksum_strips, layout_of, pack_header, strip_seeds
from kvstore.config import S3Settings
from kvstore.seams import MoverProcesses, SystemClock, SystemMemory, WorkerThreads
from kvstore.seams.memory import Bytes
from kvstore.seams.scheduler import MOVER_NICE
from kvstore.spec import CacheKind
from kvstore.tiers import ChunkName
from kvstore.tiers.s3 import Lanes, S3Tier
from kvstore.tiers.s3.objects import object_key
from kvstore_ops.bench import copying as shared
from kvstore_ops.bench.result import Result, quartiles, show
from kvstore_ops.bench.s3_responder import responder

TARGET = 0.90
RUNS = {"full": 20, "quick": 8, "tiny": 2}
LATE_RUNS = {"full": 10, "quick": 4, "tiny": 1}
FIRST_BYTE_S = 0.030
MOVER_COUNT = 2
GETS = 8
PUTS = 4
BUCKET = "bench"
NOTE = (
    "the server is a minimal responder on loopback, no S3 server; the bare client has one process and drops what it "
    "reads, the tier two processes that copy it into the arena and check every strip; both sides share the cores with "
    "the server"
)


@dataclass
class Chunks:
    """``count`` chunks one after the other in ``memory``, which the byte movers map."""

    layout: ChunkLayout
    memory: Bytes
    headers: list[ChunkHeader]

    def pieces(self, number: int) -> list[Bytes]:
        """Return the header and the slabs of one chunk."""
        place, found = number * self.layout.total_bytes, []
        for size in self.layout.piece_bytes:
            found.append(self.memory[place : place + size])
            place += size
        return found

    @property
    def byte_count(self) -> int:
        return self.layout.body_bytes * len(self.headers)


def chunks_in(memory: Bytes, layout: ChunkLayout, count: int) -> Chunks:
    """Fill the memory with chunks of random bytes and valid headers."""
    random = np.random.default_rng(3)
    made = Chunks(layout, memory, [])
    for number in range(count):
        key, write_id = random.bytes(32), random.bytes(16)
        seeds = strip_seeds(key, layout, write_id)
        pieces = made.pieces(number)
        rows = []
        for index, slab in enumerate(pieces[1:]):
            slab[:] = np.frombuffer(random.bytes(slab.size), np.uint8)
            rows.append(checksum_strips(slab, layout, index, seeds))
        header = ChunkHeader(
            kind=layout.kind, token_count=layout.token_count, namespace=bytes(32), fingerprint=bytes(32),
            storage_key=key, parent=bytes(32), chain_digest=key, token_digest=key, tenant_digest=bytes(16),
            first_position=0, rope_digest=bytes(16), write_id=write_id,
            checksums=np.frombuffer(b"".join(rows), np.uint8).reshape(-1, 16),
        )  # fmt: skip
        pieces[0][:] = np.frombuffer(pack_header(header, layout), np.uint8)
        made.headers.append(header)
    return made


def tier_of(settings: S3Settings, movers: MoverProcesses) -> S3Tier:
    """Build the tier as the service does."""
    lanes = Lanes(
        readers=movers.lane("s3-read", settings.reader_count, nice=MOVER_NICE),
        writers=movers.lane("s3-write", settings.writer_count, nice=MOVER_NICE),
        askers=movers.lane("s3-ask", 2, nice=MOVER_NICE), near=WorkerThreads(1, "s3-near"),
    )  # fmt: skip
    return S3Tier(settings, lanes, SystemClock())


async def fetch(tier: S3Tier, chunks: Chunks, group_bytes: int) -> None:
    """Open every chunk, and read its slabs in groups, as movement does."""

    async def one(number: int) -> None:
        slabs, pieces = chunks.layout.slabs, chunks.pieces(number)[1:]
        step = max(1, group_bytes // slabs[0].byte_count)
        stored = await tier.open(ChunkName(chunks.headers[number].storage_key, chunks.layout), pieces[:step])
        assert stored is not None
        async with asyncio.TaskGroup() as group:
            for first in range(0, len(slabs), step):
                part = range(first, min(first + step, len(slabs)))
                group.create_task(stored.read(part, pieces[part.start : part.stop]))
        stored.close()

    await _all(one(number) for number in range(len(chunks.headers)))


async def store(tier: S3Tier, chunks: Chunks) -> None:
    """Write every chunk. The bucket must not have it yet."""
    await _all(tier.write(header, chunks.layout, chunks.pieces(number)) for number, header in enumerate(chunks.headers))


async def _all(works: Any) -> None:
    async with asyncio.TaskGroup() as group:
        for work in works:
            group.create_task(work)


class Bare:
    """The limit: the bare client, by its own calls."""

    def __init__(self, client: Any, settings: S3Settings, chunks: Chunks) -> None:
        self._client, self._settings, self._chunks = client, settings, chunks

    def _key(self, number: int, prefix: str = "") -> str:
        return prefix + object_key(self._settings, self._chunks.headers[number].storage_key)

    async def fetch(self) -> None:
        """Read each object's body in ranges, GETS at a time."""
        limit, layout = asyncio.Semaphore(GETS), self._chunks.layout

        async def get(key: str, start: int, stop: int) -> None:
            async with limit:
                answer = await self._client.get_object(Bucket=BUCKET, Key=key, Range=f"bytes={start}-{stop - 1}")
                async with answer["Body"] as body:
                    assert len(await body.read()) == stop - start

        step = self._settings.range_bytes
        await _all(
            get(self._key(number), start, min(start + step, layout.total_bytes))
            for number in range(len(self._chunks.headers))
            for start in range(layout.header_bytes, layout.total_bytes, step)
        )

    async def store(self) -> None:
        """Write each object by one PUT, PUTS at a time."""
        limit, size = asyncio.Semaphore(PUTS), self._chunks.layout.total_bytes

        async def put(number: int) -> None:
            async with limit:
                data = self._chunks.memory[number * size : (number + 1) * size].tobytes()
                await self._client.put_object(Bucket=BUCKET, Key=self._key(number, "bare/"), Body=data)

        await _all(put(number) for number in range(len(self._chunks.headers)))


@asynccontextmanager
async def bare_client(url: str) -> AsyncIterator[Any]:
    """Yield a bare client with as many connections as it uses, and without checksums other than TCP's."""
    from aiobotocore.config import AioConfig
    from aiobotocore.session import AioSession

    config = AioConfig(
        s3={"addressing_style": "path", "payload_signing_enabled": False}, max_pool_connections=GETS + PUTS,
        request_checksum_calculation="when_required", response_checksum_validation="when_required",
    )  # fmt: skip
    async with AioSession().create_client("s3", endpoint_url=url, region_name="us-east-1", config=config) as client:
        yield client


@dataclass
class Times:
    """The seconds of each round."""

    fetch: list[float] = field(default_factory=list)
    bare_fetch: list[float] = field(default_factory=list)
    store: list[float] = field(default_factory=list)
    bare_store: list[float] = field(default_factory=list)


async def timed(times: list[float], work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Do the work, and note its seconds."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await work()
    times.append(loop.time() - began_s)


async def measure(settings: S3Settings, movers: MoverProcesses, scale: str, run_count: int) -> tuple[Times, int]:
    """Measure rounds of fetches and stores, ours and bare, after a warm-up. Return the times and a round's bytes."""
    layout = layout_of(shared.geometry(scale), CacheKind.KV, shared.CHUNK_TOKENS)
    count = shared.CHUNKS[scale]
    mapping = SystemMemory(movers).read_only_to_others("bench", layout.total_bytes * count)
    chunks = chunks_in(mapping.bytes, layout, count)
    tier, times, warm = tier_of(settings, movers), Times(), Times()
    keys = [header.storage_key for header in chunks.headers]
    async with bare_client(settings.endpoint_url) as client:
        bare = Bare(client, settings, chunks)
        for number in range(run_count + 1):
            kept = times if number else warm
            await timed(kept.bare_store, bare.store)
            await tier.remove(keys)  # else the tier would adopt the objects of the last round
            await timed(kept.store, lambda: store(tier, chunks))
            await timed(kept.bare_fetch, bare.fetch)
            await timed(kept.fetch, lambda: fetch(tier, chunks, settings.range_bytes))
    await tier.close()
    mapping.close()
    return times, chunks.byte_count


@contextmanager
def movers_with_keys() -> Iterator[MoverProcesses]:
    """Yield byte movers. Their environment, which is this process's when they begin, has credentials."""
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "bench")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "bench")
    with closing(MoverProcesses(MOVER_COUNT)) as movers:
        yield movers


@contextmanager
def bucket(first_byte_s: float = 0.0) -> Iterator[S3Settings]:
    """Run a responder, and yield the settings of a tier over it."""
    with responder(first_byte_s) as url:
        yield S3Settings(bucket=BUCKET, prefix="bench", endpoint_url=url, addressing="path")


def run(scale: str) -> Result:
    """Measure fetches and stores. The figure is the fetch's ratio; the store's is among the conditions."""
    with movers_with_keys() as movers:
        with bucket() as settings:
            times, byte_count = asyncio.run(measure(settings, movers, scale, RUNS[scale]))
        with bucket(FIRST_BYTE_S) as settings:
            late, _ = asyncio.run(measure(settings, movers, scale, LATE_RUNS[scale]))
    ratios = [bare / mine for bare, mine in zip(times.bare_fetch, times.fetch, strict=True)]
    store_ratios = [bare / mine for bare, mine in zip(times.bare_store, times.store, strict=True)]
    late_ratios = [bare / mine for bare, mine in zip(late.bare_fetch, late.fetch, strict=True)]
    late_ratio, late_rate = statistics.median(late_ratios), byte_count / statistics.median(late.fetch)
    ratio, store_ratio = statistics.median(ratios), statistics.median(store_ratios)
    rates = {name: byte_count / statistics.median(seconds) for name, seconds in vars(times).items()}
    show(
        f"s3: {byte_count >> 20} MiB, {len(ratios)} pairs, against a minimal responder on loopback",
        [
            ("fetch into the arena, verified", f"{rates['fetch'] / 1e9:.2f} GB/s, {ratio:.3f} of bare aiobotocore"),
            (f"  bare: {GETS} ranged GETs, dropped", f"{rates['bare_fetch'] / 1e9:.2f} GB/s"),
            ("store: a look, then a PUT", f"{rates['store'] / 1e9:.2f} GB/s, {store_ratio:.3f}"),
            (f"  bare: {PUTS} PUTs", f"{rates['bare_store'] / 1e9:.2f} GB/s"),
            (
                f"fetch, first bytes {FIRST_BYTE_S * 1e3:.0f} ms late (simulated)",
                f"{late_rate / 1e9:.2f} GB/s, {late_ratio:.3f} of bare aiobotocore, likewise late",
            ),
        ],
    )
    return Result(
        name="s3", value=rates["fetch"], unit="B/s", limit=rates["bare_fetch"], ratio=ratio, target=f">= {TARGET}",
        met=ratio >= TARGET, runs=len(ratios), spread=quartiles(ratios),
        conditions={
            "scale": scale, "bytes": byte_count, "range_bytes": S3Settings().range_bytes, "store_ratio": store_ratio,
            "store_spread": quartiles(store_ratios), **{f"{name}_bytes_per_s": each for name, each in rates.items()},
            "late_first_byte_s": FIRST_BYTE_S, "late_is": "simulated by the responder", "late_ratio": late_ratio,
            "late_spread": quartiles(late_ratios), "late_fetch_bytes_per_s": late_rate, "note": NOTE,
        },
    )  # fmt: skip
