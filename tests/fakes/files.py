"""A local tier of files in a directory, a chunk in each.

<directory>/<residency>.chunk     header and slabs, raw; made beside, synced and renamed
<directory>/clean                 the residencies of a clean stop, the least recently used first
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.chunk import ChunkHeader, ChunkLayout, parse_header, write_mark
from kvstore.errors import DataLoss, Exhausted, Unavailable
from kvstore.seams import Workers, WorkerThreads
from kvstore.seams.jobs import done
from kvstore.seams.memory import Bytes
from kvstore.spec import Durability, Encoding, Tier
from kvstore.tiers import Buffer, ChunkName, Evictor, IndexColumns, Recovered, Residency, TierStatistics
from kvstore.tiers.contract import host_memory
from tests.fakes.chunk import FakeChunk, opened
from tests.fakes.switches import Switches

Result = TypeVar("Result")
CLEAN = "clean"
SUFFIX = ".chunk"
HEADER_BYTES_MAX = 1 << 20


@dataclass(frozen=True, kw_only=True)
class FilesSettings:
    """``kind`` is what replies and events call it."""

    directory: Path
    name: str = "files"
    kind: Tier = Tier.NVME
    capacity_bytes: int = 1 << 20
    switches: Path | None = None


class FilesTier:
    """Copies in files. A residency is the number in a file's name, and never used again."""

    durability = Durability.LOCAL

    def __init__(self, settings: FilesSettings, workers: Workers | None = None) -> None:
        self.name, self.kind = settings.name, settings.kind
        self.switches = Switches(settings.switches)
        self._directory = settings.directory
        self._capacity_bytes = settings.capacity_bytes
        self._workers = workers or WorkerThreads(2, f"kvstore-{settings.name}")
        self._evictor: Evictor
        self._sizes: dict[Residency, int] = {}
        """Of all files that take room, given up or not."""
        self._descriptors: dict[Residency, set[int]] = {}
        """Open files of readers."""
        self._doomed: set[Residency] = set()
        """Given up, and to be erased."""
        self._unlinked: set[Residency] = set()
        """Given up and erased, but somebody reads them."""
        self._last = 0
        self._coming_bytes = 0
        self._in_flight: set[bytes] = set()
        self._read_bytes = self._written_bytes = 0

    async def _run(self, function: Callable[..., Result], *args: object) -> Result:
        try:
            return await done(self._workers, function, *args)
        except OSError as error:
            raise Unavailable(f"{self._directory} fails: {error}") from error

    # ------------------------------------------------------------ start and stop

    async def recover(self, evictor: Evictor) -> Recovered:
        self._evictor = evictor
        try:
            await self.switches.before("recover")
            order, found = await self._run(scan, self._directory)
        except BaseException:
            await self.close(None)
            raise
        rank = {residency: number for number, residency in enumerate(order)}
        rows = sorted(found, key=lambda row: rank.get(row[0], len(rank)))
        self._sizes = {residency: size for residency, size, _ in rows}
        self._last = max(self._sizes, default=0)
        is_proven = np.array([residency in rank for residency, _, _ in rows], np.bool_)
        return Recovered(columns_of([(residency, header) for residency, _, header in rows]), is_proven)

    async def close(self, held: Recovered | None) -> None:
        if held is not None:
            await self.tidy()
            await self._run(
                replace_file,
                self._directory / CLEAN,
                json.dumps(held.columns.residencies[held.is_proven].tolist()).encode(),
            )
        self._workers.close()

    # ------------------------------------------------------------ write

    def has_room(self, layout: ChunkLayout) -> bool:
        return self._has_room(layout, 0)

    def _has_room(self, layout: ChunkLayout, soon_bytes: int) -> bool:
        taken = sum(self._sizes.values()) + self._coming_bytes - soon_bytes
        return taken + layout.total_bytes <= self._capacity_bytes

    async def write(self, header: ChunkHeader, layout: ChunkLayout, pieces: Sequence[Buffer]) -> Residency:
        await self.switches.before("write")
        source = host_memory(pieces)
        await self._make_room(layout)
        self._last += 1
        residency = self._last
        self._coming_bytes += layout.total_bytes
        self._in_flight.add(header.storage_key)
        try:
            await self._run(replace_file, self._path(residency), *source)
        except BaseException:
            self._path(residency).unlink(missing_ok=True)
            raise
        finally:
            self._coming_bytes -= layout.total_bytes
            self._in_flight.discard(header.storage_key)
        self._sizes[residency] = layout.total_bytes
        self._written_bytes += layout.total_bytes
        return residency

    async def _make_room(self, layout: ChunkLayout) -> None:
        """Raises Exhausted."""

        def is_read(residency: Residency) -> bool:
            return residency in self._descriptors

        def enough() -> bool:
            return self._has_room(layout, sum(self._sizes[each] for each in self._doomed if not is_read(each)))

        if not self.has_room(layout) and layout.total_bytes <= self._capacity_bytes:
            if not enough():
                self._evictor.evict(lambda residency: not is_read(residency), enough)
            self._unlink_doomed()
        if not self.has_room(layout):
            raise Exhausted(f"no room for {layout.total_bytes} bytes: raise tiers.{self.name}.capacity_bytes")

    def _path(self, residency: Residency) -> Path:
        return self._directory / f"{residency}{SUFFIX}"

    def paths(self) -> list[tuple[Residency, Path]]:
        """Where each copy lies. Open to tests that damage it."""
        return [(each, self._path(each)) for each in sorted(self._sizes.keys() - self._doomed - self._unlinked)]

    # ------------------------------------------------------------ read

    async def open(self, name: ChunkName, residency: Residency) -> FakeChunk:
        await self.switches.before("open")
        if residency not in self._sizes or residency in self._doomed | self._unlinked:
            raise DataLoss("the directory holds no such chunk", reason="absent")
        try:
            descriptor = os.open(self._path(residency), os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DataLoss(f"the chunk's file is gone: {error}", reason="absent") from error
        self._descriptors.setdefault(residency, set()).add(descriptor)
        return await opened(
            name, lambda offset, count: self._run(os.pread, descriptor, count, offset), self.switches, self._was_read,
            lambda: self._closed(residency, descriptor),
        )  # fmt: skip

    def _was_read(self, byte_count: int) -> None:
        self._read_bytes += byte_count

    def _closed(self, residency: Residency, descriptor: int) -> None:
        os.close(descriptor)
        self._descriptors[residency].discard(descriptor)
        if not self._descriptors[residency]:
            del self._descriptors[residency]
            if residency in self._unlinked:
                self._unlinked.discard(residency)
                del self._sizes[residency]

    async def renew(self, residency: Residency) -> bool:
        await self.switches.before("renew")
        await self._run(rewrite, self._path(residency))
        return True

    # ------------------------------------------------------------ remove

    def remove(self, residencies: Sequence[Residency], *, erase: bool = False) -> None:
        self._doomed.update(residencies)
        if not erase:
            self._unlink_doomed()

    def _unlink_doomed(self) -> None:
        """What the directory refuses stays doomed. A file that somebody reads loses its name, and keeps its room."""
        for residency in sorted(self._doomed):
            try:
                self._path(residency).unlink(missing_ok=True)
            except OSError:
                continue
            self._doomed.discard(residency)
            if residency in self._descriptors:
                self._unlinked.add(residency)
            else:
                del self._sizes[residency]

    async def quarantine(self, residency: Residency) -> None:
        self.remove([residency], erase=True)
        await self.tidy()

    async def supersede(self, writes: Mapping[bytes, int], wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + wait_s
        while not self._in_flight.isdisjoint(writes):
            if loop.time() >= until_s:
                raise Unavailable("an older value is still being written: try again")
            await asyncio.sleep(0.005)
        await self.tidy()
        if self._doomed:
            raise Unavailable("an older value could not be erased: try again")

    async def tidy(self) -> None:
        if self._doomed:
            self._unlink_doomed()
            await self._run(sync_directory, self._directory)

    # ------------------------------------------------------------ told

    def encodings(self, residencies: NDArray[np.int64]) -> NDArray[np.uint8]:
        return np.full(len(residencies), Encoding.RAW, np.uint8)

    def stalled_s(self) -> float:
        return self.switches.stalled_s()

    def statistics(self) -> TierStatistics:
        held = sum(self._sizes.values())
        return TierStatistics(
            name=self.name, state="up", capacity_bytes=self._capacity_bytes, file_bytes=held, allocated_bytes=held,
            free_bytes=0, quarantined_bytes=0, overhead_bytes=0,
            chunk_count=len(self._sizes.keys() - self._doomed - self._unlinked), read_bytes=self._read_bytes,
            written_bytes=self._written_bytes,
        )  # fmt: skip


# ---------------------------------------------------------------- blocking


def scan(directory: Path) -> tuple[list[Residency], list[tuple[Residency, int, ChunkHeader]]]:
    """The order of a clean stop, which counts once; and (residency, bytes, header) of each file that is a chunk."""
    directory.mkdir(parents=True, exist_ok=True)
    clean = directory / CLEAN
    order = json.loads(clean.read_bytes()) if clean.exists() else []
    clean.unlink(missing_ok=True)
    found = []
    for path in directory.iterdir():
        if path.suffix != SUFFIX or not path.stem.isdecimal():
            path.unlink()  # one that a crash cut short
            continue
        with path.open("rb") as file:
            page = file.read(HEADER_BYTES_MAX)
        try:
            found.append((int(path.stem), path.stat().st_size, parse_header(np.frombuffer(page, np.uint8))))
        except DataLoss:
            path.unlink()
    return order, found


def columns_of(rows: Sequence[tuple[Residency, ChunkHeader]]) -> IndexColumns:
    """A row per copy, in this order."""
    headers = [header for _, header in rows]
    spaces = [(header.fingerprint, header.provenance, header.exactness) for header in headers]
    names = list(dict.fromkeys(spaces))
    return IndexColumns(
        names,
        np.array([residency for residency, _ in rows], np.int64),
        np.array([write_mark(header.write_id) for header in headers], np.uint64),
        np.array([header.token_count for header in headers], np.int32),
        np.array([names.index(space) for space in spaces], np.uint16),
        b"".join(header.chain_digest for header in headers),
        b"".join(header.parent for header in headers),
        np.array([header.stored_s for header in headers], np.uint32),
    )


def replace_file(path: Path, *pieces: Bytes | bytes) -> None:
    """The whole file or none, and durable."""
    fresh = path.with_name(f"{path.name}.new")
    with fresh.open("wb") as file:
        for piece in pieces:
            file.write(bytes(piece))
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    sync_directory(path.parent)


def rewrite(path: Path) -> None:
    """The same bytes, synced by this process."""
    replace_file(path, path.read_bytes())


def sync_directory(path: Path) -> None:
    """Names that came or went are durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
