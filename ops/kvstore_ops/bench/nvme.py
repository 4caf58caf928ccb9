"""nvme: the worse of a cold fetch and a durable store, each over bare threads that read, copy and write the same bytes.

The limits: 4 threads work request by request on a file of their own, without a service or checksums. They read and
copy; or they copy twice and write, with one fdatasync, into room that was written before. Beside them stand the same
threads with what no service can leave out that answers for its bytes, and whose caller waits for the copy: they check
what they read, or they copy everything once, as the caller wants it, before they copy, hash and write. Also shown are
the device's own rate, by O_DIRECT in 4 MiB requests to and from huge pages, and the rate of the first pass over fresh
room; all other stores of the service go to slots that were written before, too. A fetch is cold because more contexts
take turns than the arena holds; the tier's account proves it.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import statistics
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from kvstore_client import Client, Durability, Tier, connect

from kvstore.chunk import layout_of
from kvstore.errors import Exhausted
from kvstore.seams import SystemDisk
from kvstore.tiers.nvme.regions import FIRST_REGION_BYTES
from kvstore.units import format_bytes
from kvstore_ops.bench import copying as shared
from kvstore_ops.bench.result import Goal, Result, judged_by, quartiles, show
from kvstore_ops.sidecar import Sidecar

TARGET = 0.90
CHUNKS = {"full": 8, "quick": 4, "tiny": 1}
RUNS = {"full": 30, "quick": 15, "tiny": 2}
CONTEXTS = 3
"""Number of contexts that are fetched in turn, and of areas in the limit's file."""
KEPT = 5
"""Number of stored contexts that the device has room for beside those fetched."""
ARENA_CONTEXTS = 3
"""Number of contexts that fit into the arena. Five others enter it between two fetches of a context, so that nothing of
the context is left there."""
REQUEST_BYTES = 4 << 20
STRIP_BYTES = 128 << 10
"""Bytes of a strip of these chunks: each has a checksum."""
SPARE_BYTES = 1 << 30
PAGES_BYTES = 64 << 12
"""Bytes of region files beside slots; the canary has a small file of its own."""
IN_FLIGHT = 2
"""Number of stores in flight at a time, for the sustained rate."""
SUSTAINED_STORES = {"full": 12, "quick": 12, "tiny": 3}
BARE_THREADS = 4
THREADS_MAX = 8
"""Largest number of threads of the limit: as many as the service has readers."""
NOTE = (
    "the limit's threads copy while others of them wait for the device; a store's caller has the cores to himself "
    "until his tensors are copied, because an engine waits for that, and only then are the bytes moved, checksummed "
    "and written: on 2 cores a durable store is behind the limit by about the time that its caller is blocked"
)


def require_room(byte_count: int) -> None:
    """Raises Exhausted when the temporary directory has no room for ``byte_count`` and SPARE_BYTES more."""
    place = Path(tempfile.gettempdir())
    free = shutil.disk_usage(place).free
    if free < byte_count + SPARE_BYTES:
        raise Exhausted(
            f"{place} has {format_bytes(free)} free; this benchmark writes {format_bytes(byte_count)} there and leaves "
            f"{format_bytes(SPARE_BYTES)}: free some, or set TMPDIR to a directory on another device"
        )


class RawDevice:
    """The limit: ``area_count`` areas of ``byte_count`` bytes in one file, written before, used in turn like slots.
    ``is_direct`` is False where the file system has no O_DIRECT: the figures then say nothing about the device."""

    def __init__(self, path: Path, byte_count: int, area_count: int) -> None:
        self.byte_count = byte_count
        self.is_direct = True
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.is_direct = False
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
        self._memory, self._source, self._target = (_huge_pages(byte_count) for _ in range(3))
        self._memory[:] = np.frombuffer(np.random.default_rng(9).bytes(byte_count), np.uint8)
        self._source[:], self._target[:] = self._memory, 0
        self._threads = ThreadPoolExecutor(THREADS_MAX)
        os.posix_fallocate(self._descriptor, 0, byte_count * area_count)
        for area in range(area_count):
            self.write(area, 2)

    def read(self, area: int, thread_count: int) -> None:
        self._split(partial(self._request, os.preadv, area), thread_count)

    def write(self, area: int, thread_count: int) -> None:
        """Write an area with ``thread_count`` threads, and fdatasync it."""
        self._split(partial(self._request, os.pwritev, area), thread_count)
        os.fdatasync(self._descriptor)

    def fetch(self, area: int) -> None:
        """Do the least that a cold fetch has to do: read each request, then copy it to its destination."""

        def move(part: slice) -> None:
            self._request(os.preadv, area, part)
            np.copyto(self._target[part], self._memory[part])

        self._split(move, BARE_THREADS)

    def store(self, area: int) -> None:
        """Do the least that a durable store has to do: copy each part twice, then write it; fdatasync at the end."""

        def move(part: slice) -> None:
            np.copyto(self._target[part], self._source[part])
            np.copyto(self._memory[part], self._target[part])
            self._request(os.pwritev, area, part)

        self._split(move, BARE_THREADS)
        os.fdatasync(self._descriptor)

    def fetch_checked(self, area: int) -> None:
        """Do as ``fetch``, and hash each request before it is copied."""

        def move(part: slice) -> None:
            self._request(os.preadv, area, part)
            _hash(self._memory[part])
            np.copyto(self._target[part], self._memory[part])

        self._split(move, BARE_THREADS)

    def store_checked(self, area: int) -> None:
        """Copy everything, as a caller waits for it; then copy each part again, hash it and write it."""

        def take(part: slice) -> None:
            np.copyto(self._target[part], self._source[part])

        def move(part: slice) -> None:
            np.copyto(self._memory[part], self._target[part])
            _hash(self._memory[part])
            self._request(os.pwritev, area, part)

        self._split(take, BARE_THREADS)
        self._split(move, BARE_THREADS)
        os.fdatasync(self._descriptor)

    def _request(self, call: Callable[..., int], area: int, part: slice) -> None:
        memory = self._memory[part]
        assert call(self._descriptor, [memory.data], area * self.byte_count + part.start) == memory.size

    def _split(self, move: Callable[[slice], None], thread_count: int) -> None:
        def run(first: int) -> None:
            for start in range(first * REQUEST_BYTES, self.byte_count, thread_count * REQUEST_BYTES):
                move(slice(start, start + REQUEST_BYTES))

        jobs = [self._threads.submit(run, first) for first in range(thread_count)]
        wait(jobs)
        for job in jobs:
            job.result()

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._descriptor)


def _hash(memory: Any) -> None:
    for start in range(0, memory.size, STRIP_BYTES):
        xxhash.xxh3_128_digest(memory[start : start + STRIP_BYTES].data)


def _huge_pages(byte_count: int) -> Any:
    """Return memory in huge pages, so that its rate does not depend on the places of small pages."""
    memory = mmap.mmap(-1, byte_count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


@dataclass
class Seconds:
    """The seconds of each round. ``demote``: from the commit until the device has everything; ``sustained``: per store,
    of many with several in flight. ``reads`` and ``writes``: the raw device's, by number of threads."""

    fetch: list[float] = field(default_factory=list)
    store: list[float] = field(default_factory=list)
    blocked: list[float] = field(default_factory=list)
    demote: list[float] = field(default_factory=list)
    sustained: list[float] = field(default_factory=list)
    bare_fetch: list[float] = field(default_factory=list)
    bare_store: list[float] = field(default_factory=list)
    checked_fetch: list[float] = field(default_factory=list)
    checked_store: list[float] = field(default_factory=list)
    reads: dict[int, list[float]] = field(default_factory=lambda: {1: [], 2: [], 8: []})
    writes: dict[int, list[float]] = field(default_factory=lambda: {1: [], 2: [], 8: []})


class Rig:
    """A sidecar whose device tier is small and whose arena is smaller, and a client of it."""

    def __init__(self, client: Client, scale: str) -> None:
        self.client = client
        self.spec = shared.geometry(scale)
        self.count = CHUNKS[scale] * shared.CHUNK_TOKENS
        self.source, self.into = shared.tensors(self.spec, self.count), shared.tensors(self.spec, self.count)
        shared.fill_with_noise(self.source)
        self.byte_count = sum(k.nbytes + v.nbytes for k, v in self.into)
        self._stored = 0

    def device(self) -> Any:
        """Return the device tier's statistics."""
        return self.client.stats().tiers[0]

    def tokens(self, number: int) -> Any:
        return shared.random_tokens(self.count, 1000 + number)

    def store(self, seconds: Seconds) -> None:
        """Store a fresh context, and wait until the device has it."""
        tokens, before = self.tokens(self._stored), self.device().written_bytes
        self._stored += 1
        receipts: list[Any] = []
        blocked = shared.timed(lambda: receipts.append(self.client.store(self.spec, tokens, self.source)))
        committed = shared.timed(lambda: receipts[0].stored_token_count)
        level: list[Durability] = []
        demoted = shared.timed(lambda: level.append(receipts[0].wait()))
        assert level == [Durability.LOCAL], receipts[0].reason
        assert self.device().written_bytes - before >= self.byte_count
        seconds.blocked.append(blocked)
        seconds.demote.append(demoted)
        seconds.store.append(blocked + committed + demoted)

    def store_many(self, count: int, seconds: Seconds) -> None:
        """Store ``count`` fresh contexts, IN_FLIGHT at a time, and wait until the device has them."""
        running: deque[Any] = deque()

        def run() -> None:
            for number in range(count + IN_FLIGHT - 1):
                if number < count:
                    running.append(self.client.store(self.spec, self.tokens(self._stored), self.source))
                    self._stored += 1
                if number >= IN_FLIGHT - 1:
                    receipt = running.popleft()
                    assert receipt.wait() is Durability.LOCAL, receipt.reason

        seconds.sustained.append(shared.timed(run) / count)

    def fetch(self, number: int, seconds: Seconds) -> None:
        """Fetch one of the first contexts, from the device."""
        tokens, before = self.tokens(number), self.device().read_bytes
        fetched: list[Any] = []
        took = shared.timed(lambda: fetched.append(self.client.fetch(self.spec, tokens, into=self.into)))
        assert (fetched[0].token_count, fetched[0].tier) == (self.count, Tier.NVME)
        assert self.device().read_bytes - before >= self.byte_count, "it was not read from the device"
        seconds.fetch.append(took)


@contextmanager
def rig(scale: str) -> Iterator[tuple[Sidecar, Rig]]:
    """Yield a fresh sidecar, its arena backed by pages, and its rig."""
    spec = shared.geometry(scale)
    slot_bytes = layout_of(spec, spec.kind, shared.CHUNK_TOKENS).total_bytes
    context_bytes = slot_bytes * CHUNKS[scale]
    device_bytes = context_bytes * (CONTEXTS + KEPT) + FIRST_REGION_BYTES + PAGES_BYTES
    require_room(device_bytes + context_bytes * CONTEXTS)
    arena_bytes = context_bytes * ARENA_CONTEXTS + slot_bytes
    with Sidecar("--capacity", str(arena_bytes), nvme=str(device_bytes)) as sidecar:
        sidecar.wait_prefaulted()
        with connect(sidecar.address, timeout_s=60.0) as client:
            yield sidecar, Rig(client, scale)


def measure(scale: str) -> dict[str, Any]:
    """Measure interleaved rounds of both sides, after a pass over the whole device."""
    with rig(scale) as (sidecar, ours):
        raw = RawDevice(sidecar.directory / "limit", ours.byte_count, CONTEXTS)
        fresh, warm, seconds = Seconds(), Seconds(), Seconds()
        for _ in range(CONTEXTS + KEPT):
            ours.store(fresh)
        for number in range(CONTEXTS):
            ours.fetch(number, warm)  # now used last: from here on a store takes the slots of an earlier store
        for _ in range(ARENA_CONTEXTS):
            ours.store(warm)
        for number in range(RUNS[scale]):
            area = number % CONTEXTS
            for threads, times in seconds.reads.items():
                times.append(shared.timed(partial(raw.read, area, threads)))
            seconds.bare_fetch.append(shared.timed(partial(raw.fetch, area)))
            seconds.checked_fetch.append(shared.timed(partial(raw.fetch_checked, area)))
            ours.fetch(area, seconds)
            for threads, times in seconds.writes.items():
                times.append(shared.timed(partial(raw.write, area, threads)))
            seconds.bare_store.append(shared.timed(partial(raw.store, area)))
            seconds.checked_store.append(shared.timed(partial(raw.store_checked, area)))
            ours.store(seconds)
        for each in (warm, seconds, seconds):  # the first round adds the staging memory that several stores need
            ours.store_many(SUSTAINED_STORES[scale], each)
        raw.close()
        kind = SystemDisk().file_system(sidecar.directory)
        return {
            "bytes": ours.byte_count, "seconds": seconds, "fresh": fresh, "direct": raw.is_direct, "file_system": kind,
        }  # fmt: skip


def better(seconds: dict[int, list[float]]) -> list[float]:
    """Return the times of the number of threads that is fastest."""
    return min(seconds.values(), key=statistics.median)


def over(limits: list[float], mine: list[float]) -> float:
    """Return the median of a limit's seconds over ours, round by round."""
    return statistics.median(limit / each for limit, each in zip(limits, mine, strict=True))


def sustained_ratio(seconds: Seconds) -> float:
    """Return the rate of stores on their way over that of the bare threads' stores, one after the other."""
    return statistics.median(seconds.bare_store) / statistics.median(seconds.sustained)


def rows_of(seconds: Seconds, fresh: Seconds, byte_count: int) -> list[tuple[str, str]]:
    """Return the table's rows."""

    def rate(values: list[float]) -> str:
        return f"{byte_count / statistics.median(values) / 1e9:.2f} GB/s"

    fetch, store = seconds.fetch, seconds.store
    return [
        ("cold fetch", f"{rate(fetch)}, {over(seconds.bare_fetch, fetch):.3f} of bare threads"),
        ("  bare: read, copied", rate(seconds.bare_fetch)),
        (
            "  bare: read, checked, copied",
            f"{rate(seconds.checked_fetch)}, ours {over(seconds.checked_fetch, fetch):.3f}",
        ),
        *((f"raw read, threads: {n}", rate(each)) for n, each in seconds.reads.items()),
        ("  the fetch over the device", f"{over(better(seconds.reads), fetch):.3f}"),
        ("durable store", f"{rate(store)}, {over(seconds.bare_store, store):.3f} of bare threads"),
        ("  bare: copied, copied, written", rate(seconds.bare_store)),
        (
            "  bare: all copied; then copied, hashed, written",
            f"{rate(seconds.checked_store)}, ours {over(seconds.checked_store, store):.3f}",
        ),
        ("  the engine is blocked for", f"{statistics.median(seconds.blocked) * 1e3:.0f} ms"),
        ("  demote: commit until LOCAL", rate(seconds.demote)),
        ("  into room never written", rate(fresh.store)),
        *((f"raw write + fdatasync, threads: {n}", rate(each)) for n, each in seconds.writes.items()),
        ("  the store over the device", f"{over(better(seconds.writes), store):.3f}"),
        (f"  {IN_FLIGHT} on their way", f"{rate(seconds.sustained)}, {sustained_ratio(seconds):.3f} of bare threads"),
    ]


def run(scale: str) -> Result:
    """Measure both ratios; the figure is that of the worse."""
    found = measure(scale)
    byte_count, seconds = found["bytes"], found["seconds"]

    def rate(values: list[float]) -> float:
        return float(byte_count / statistics.median(values))

    sides = {"fetch": (seconds.fetch, seconds.bare_fetch), "store": (seconds.store, seconds.bare_store)}
    ratios = {name: [limit / mine for mine, limit in zip(*side, strict=True)] for name, side in sides.items()}
    medians = {name: statistics.median(each) for name, each in ratios.items()}
    worse = min(medians, key=lambda name: medians[name])
    checked = {
        "fetch": over(seconds.checked_fetch, seconds.fetch), "store": over(seconds.checked_store, seconds.store)
    }  # fmt: skip
    of_device = {
        "fetch": over(better(seconds.reads), seconds.fetch), "store": over(better(seconds.writes), seconds.store)
    }  # fmt: skip
    title = f"nvme: {byte_count >> 20} MiB, {len(seconds.fetch)} pairs, {found['file_system']}"
    show(title, rows_of(seconds, found["fresh"], byte_count))
    return Result(
        name="nvme", value=rate(sides[worse][0]), unit="B/s", limit=rate(sides[worse][1]), ratio=medians[worse],
        **judged_by(
            *(Goal(name, each, TARGET) for name, each in medians.items()), Goal("direct I/O", found["direct"], 1)
        ),
        runs=RUNS[scale], spread=quartiles(ratios[worse]),
        conditions={
            "scale": scale, "bytes": byte_count, "cold": True, "slots": "all written before", "worse": worse,
            "file_system": found["file_system"], "direct": found["direct"],
            "fetch_ratio": medians["fetch"], "fetch_bytes_per_s": rate(seconds.fetch),
            "fetch_spread": quartiles(ratios["fetch"]),
            "store_ratio": medians["store"], "store_bytes_per_s": rate(seconds.store),
            "store_spread": quartiles(ratios["store"]),
            "checked_ratios": checked, "checked_fetch_bytes_per_s": rate(seconds.checked_fetch),
            "checked_store_bytes_per_s": rate(seconds.checked_store),
            "store_blocked_s": statistics.median(seconds.blocked), "device_ratios": of_device,
            "sustained_store_bytes_per_s": rate(seconds.sustained), "sustained_ratio": sustained_ratio(seconds),
            "demote_bytes_per_s": rate(seconds.demote), "fresh_room_bytes_per_s": rate(found["fresh"].store),
            **{f"read_{n}_thread_bytes_per_s": rate(each) for n, each in seconds.reads.items()},
            **{f"write_{n}_thread_bytes_per_s": rate(each) for n, each in seconds.writes.items()},
            "note": NOTE,
        },
    )  # fmt: skip
