"""index: the memory that a device's catalog needs per chunk, and the time to open the directory after a clean stop.

The directory is a real one: the tier's own code writes the files, their first pages and the snapshot. The slots have no
data, because an open with a snapshot does not read them. A fresh process opens the directory as the server does. Chunks
form chains as in conversations: a shared prefix of 64, and seven continuations of 64 after it. Beside it are measured:
an open without a snapshot, which reads real headers, and lookups of whole chains in the recovered catalog.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import gc
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from kvstore_client import ModelSpec

from kvstore.arena import Arena
from kvstore.chunk import ChunkHeader, layout_of, pack_header
from kvstore.config import load
from kvstore.controller import ChainQuery, Controller, Parts
from kvstore.keys import ROOT_DIGEST, fingerprint
from kvstore.policy import LeastRecentlyUsed
from kvstore.seams import FaultPoints, SystemClock, SystemDisk, SystemMemory, SystemRandom, TenantKeys, WorkerThreads
from kvstore.server.tiers import open_nvme
from kvstore.spec import Encoding, Exactness, Provenance
from kvstore.telemetry import Counters
from kvstore.tiers import IndexColumns
from kvstore.tiers.nvme import Directory, PosixIO, Regions, Snapshot, aligned
from kvstore_ops.bench.footprint import anonymous_mib
from kvstore_ops.bench.nvme import require_room
from kvstore_ops.bench.result import Goal, Result, judged_by, show

BYTES_TARGET, SECONDS_TARGET = 250, 10.0
CHUNKS = {"full": 1_000_000, "quick": 1_000_000, "tiny": 20_000}
REBUILT = {"full": 1_000_000, "quick": 50_000, "tiny": 2_000}
LOOKUPS = {"full": 5000, "quick": 2000, "tiny": 100}
RUN, FAMILY = 64, 512
"""Number of chunks of a shared prefix, and of a continuation; of a prefix with all its continuations."""
ROOM_BYTES = 64 << 20
SLOTS_AT_ONCE = 512


def model() -> ModelSpec:
    """Return a spec whose chunks take slots of 8 KiB, the smallest slots."""
    return ModelSpec.dense(
        "bench-index", "unverified:bench", layer_count=1, kv_heads=1, head_dim=8, hidden_size=8, chunk_tokens=128,
        vocab_size=128_256,
    )  # fmt: skip


def digests_of(count: int) -> bytes:
    """Return the chunks' digests, 32 bytes each, parents before their children."""
    return np.random.default_rng(1).bytes(32 * count)


def parents_of(digests: bytes) -> bytes:
    """Return the digest of each chunk's parent."""
    rows = np.frombuffer(digests, np.uint8).reshape(-1, 32)
    place = np.arange(len(rows))
    above = np.where(place % RUN == 0, place - place % FAMILY + RUN - 1, place - 1)
    parents = rows[np.minimum(above, place)]
    parents[place % FAMILY == 0] = np.frombuffer(ROOT_DIGEST, np.uint8)
    return parents.tobytes()


class SparseDisk(SystemDisk):
    """Files that are as long as allocated files, but take no room on the disk until they are written."""

    def allocate(self, descriptor: int, byte_count: int) -> None:
        os.ftruncate(descriptor, byte_count)


class Written:
    """A directory with region files for ``count`` chunks."""

    def __init__(self, path: Path, disk: SystemDisk, count: int) -> None:
        self.layout = layout_of(model(), model().kind, model().chunk_tokens)
        self.slot_bytes = self.layout.total_bytes
        self.count = count
        self.directory = Directory(path, disk, FaultPoints())
        self.directory.begin()
        self.io = PosixIO(disk)
        self.regions = Regions(
            path, disk, self.io, FaultPoints(), capacity_bytes=count * self.slot_bytes + ROOM_BYTES,
            region_bytes=1 << 30,
        )  # fmt: skip
        while self.regions.free_count(self.slot_bytes) < count:
            self.regions.create(self.slot_bytes)
        self.digests = digests_of(count)
        self.parents = parents_of(self.digests)

    def end_cleanly(self) -> None:
        """Write the snapshot of a clean stop: the least recently used chunk first, so a child before its parent."""
        taken = [self.regions.take(self.slot_bytes, Encoding.RAW) for _ in range(self.count)]
        order = np.lexsort((-np.arange(self.count), np.arange(self.count) // FAMILY))

        def ordered(digests: bytes) -> bytes:
            return np.frombuffer(digests, np.uint8).reshape(-1, 32)[order].tobytes()

        columns = IndexColumns(
            [(fingerprint(model(), model().kind), Provenance.IN_CONTEXT, Exactness.EXACT)],
            np.array(taken, np.int64)[order],
            np.random.default_rng(2).integers(0, 1 << 63, self.count, np.uint64),
            np.full(self.count, model().chunk_tokens, np.int32),
            np.zeros(self.count, np.uint16),
            ordered(self.digests),
            ordered(self.parents),
        )
        self.directory.end(Snapshot(columns))

    def fill(self) -> None:
        """Write a real header, and a body of zeros, into each slot."""
        name = fingerprint(model(), model().kind)
        plain = ChunkHeader(
            kind=model().kind, token_count=model().chunk_tokens, namespace=name, fingerprint=name,
            storage_key=bytes(32), parent=ROOT_DIGEST, chain_digest=bytes(32), token_digest=bytes(32),
            tenant_digest=bytes(16), first_position=0, rope_digest=bytes(16), write_id=bytes(16),
            checksums=np.zeros((self.layout.strip_count, 16), np.uint8),
        )  # fmt: skip
        buffer = aligned(SLOTS_AT_ONCE * self.slot_bytes)
        buffer[:] = 0
        place = 0
        for region in self.regions.by_number.values():
            for first in range(0, min(region.slot_count, self.count - place // 32), SLOTS_AT_ONCE):
                stop = min(first + SLOTS_AT_ONCE, region.slot_count, first + self.count - place // 32)
                for slot in range(stop - first):
                    digest, parent = self.digests[place : place + 32], self.parents[place : place + 32]
                    header = dataclasses.replace(plain, chain_digest=digest, storage_key=digest, parent=parent)
                    packed = pack_header(header, self.layout)
                    start = slot * self.slot_bytes
                    buffer[start : start + len(packed)] = np.frombuffer(packed, np.uint8)
                    place += 32
                self.io.write(region.descriptor, region.offset(first), buffer[: (stop - first) * self.slot_bytes])

    def close(self) -> None:
        self.regions.close()
        self.directory.close()


# ---------------------------------------------------------------- the process that opens the directory


def anonymous_bytes() -> float:
    """Return this process's private memory, after free memory was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return anonymous_mib(os.getpid()) * (1 << 20)


async def opened(path: Path, count: int, lookup_count: int) -> dict[str, float]:
    """Open a directory as the server does, and return the measurements. ``bytes``: memory per chunk that the open
    added to this process."""
    flags = {
        "server.state_directory": path / "state", "tiers.nvme.directory": path, "arena.capacity_bytes": "16 MiB",
        "tiers.nvme.capacity_bytes": str(count * (8 << 10) + ROOM_BYTES),
    }  # fmt: skip
    settings = load(flags=flags).settings
    memory, faults, clock = SystemMemory(), FaultPoints(), SystemClock()
    parts = Parts(
        arena=Arena(memory, faults, capacity_bytes=settings.arena.capacity_bytes, region_bytes=1 << 20),
        policy=LeastRecentlyUsed, limits=settings.limits, clock=clock, random=SystemRandom(), memory=memory,
        workers=WorkerThreads(1, "kvstore-bench"), keys=TenantKeys(), faults=faults, counters=Counters(),
    )  # fmt: skip
    controller = Controller(parts)
    before = anonymous_bytes()
    started = time.perf_counter()
    await controller.parts.movement.attach(open_nvme(settings.tiers.nvme, SystemDisk(), clock, faults))
    seconds = time.perf_counter() - started
    started = time.perf_counter()
    controller.register_model(model())
    shown = time.perf_counter() - started
    presence = controller.presence().bytes.size
    after, peak = anonymous_bytes() + presence, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert len(parts.catalog.table) == count
    times = lookup_seconds(controller, count, lookup_count)
    started = time.perf_counter()
    await controller.parts.movement.detach()
    return {
        "seconds": seconds, "bytes": (after - before) / count, "peak_mib": peak / 1024, "shown_s": shown,
        "presence_bytes": presence / count,
        "lookup_s": statistics.median(times), "lookups_per_s": len(times) / sum(times),
        "close_s": time.perf_counter() - started,
    }  # fmt: skip


def lookup_seconds(controller: Controller, count: int, lookup_count: int) -> list[float]:
    """Return the seconds of lookups, each of a random prefix and one of its continuations: 128 keys."""
    digests, name = digests_of(count), fingerprint(model(), model().kind)
    keys = [digests[at : at + 32] for at in range(0, len(digests), 32)]
    chosen = random.Random(3)  # noqa: S311 - which chain is asked for is no secret
    queries = []
    for _ in range(lookup_count):
        first = chosen.randrange(count // FAMILY) * FAMILY
        own = first + RUN * chosen.randrange(1, FAMILY // RUN)
        queries.append(ChainQuery(name, keys[first : first + RUN] + keys[own : own + RUN]))
    times = []
    for query in queries:
        started = time.perf_counter()
        hits = controller.lookups.lookup(query).hit_count
        times.append(time.perf_counter() - started)
        assert hits == 2 * RUN
    return times


def in_fresh_process(path: Path, count: int, lookup_count: int) -> dict[str, float]:
    """Run ``opened`` in a fresh process, and return its measurements."""
    command = [sys.executable, "-m", "kvstore_ops.bench.index", str(path), str(count), str(lookup_count)]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    answer: dict[str, float] = json.loads(found.splitlines()[-1])
    return answer


# ---------------------------------------------------------------- the benchmark


def run(scale: str) -> Result:
    """Measure an open after a clean stop, and a rebuild from headers."""
    count, rebuilt = CHUNKS[scale], REBUILT[scale]
    require_room(rebuilt * (8 << 10) + ROOM_BYTES + count * 100)
    with tempfile.TemporaryDirectory(prefix="kvstore-") as place:
        written = Written(Path(place) / "clean", SparseDisk(), count)
        written.end_cleanly()
        written.close()
        clean = in_fresh_process(Path(place) / "clean", count, LOOKUPS[scale])
        written = Written(Path(place) / "crashed", SystemDisk(), rebuilt)
        written.fill()
        written.close()
        crashed = in_fresh_process(Path(place) / "crashed", rebuilt, LOOKUPS[scale])
    value, seconds, rate = clean["bytes"], clean["seconds"], rebuilt / crashed["seconds"]
    show(
        f"index: {count:,} chunks",
        [
            (
                "resident bytes per chunk",
                f"{value:.0f} (target {BYTES_TARGET}), {clean['presence_bytes']:.0f} of them shared",
            ),
            ("opening, clean", f"{seconds:.2f} s (target {SECONDS_TARGET:.0f}), peak {clean['peak_mib']:.0f} MiB"),
            ("  then, when its model is named, shown to clients", f"{clean['shown_s']:.2f} s"),
            ("stopping: the snapshot written", f"{clean['close_s']:.2f} s"),
            (f"rebuild of {rebuilt:,} from headers", f"{crashed['seconds']:.2f} s, {rate:,.0f} chunks/s"),
            ("  then resident bytes per chunk", f"{crashed['bytes']:.0f}, peak {crashed['peak_mib']:.0f} MiB"),
            ("lookup of 128 keys", f"{clean['lookup_s'] * 1e6:.0f} us p50, {clean['lookups_per_s']:,.0f} per second"),
        ],
    )
    return Result(
        name="index", value=value, unit="B/chunk", limit=BYTES_TARGET, ratio=value / BYTES_TARGET,
        **judged_by(
            Goal("bytes per chunk", value, BYTES_TARGET, is_upper=True),
            Goal("seconds to open", seconds, SECONDS_TARGET, is_upper=True),
        ),
        runs=1, spread=(value / BYTES_TARGET, value / BYTES_TARGET),
        conditions={
            "scale": scale, "chunks": count, "open_s": seconds, "shown_s": clean["shown_s"], "stop_s": clean["close_s"],
            "rebuild_chunks": rebuilt, "rebuild_s": crashed["seconds"], "rebuild_chunks_per_s": rate,
            "rebuild_bytes_per_chunk": crashed["bytes"], "open_peak_mib": clean["peak_mib"],
            "rebuild_peak_mib": crashed["peak_mib"], "lookup_keys": 2 * RUN, "lookup_s": clean["lookup_s"],
            "lookups_per_s": clean["lookups_per_s"],
        },
    )  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(asyncio.run(opened(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))))
