"""A shared tier of objects in a directory: what one node puts there others find, in other processes, too."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import TypeVar

from kvstore.chunk import ChunkHeader, ChunkLayout
from kvstore.errors import Exhausted, Unavailable
from kvstore.seams import Workers, WorkerThreads
from kvstore.seams.jobs import done
from kvstore.spec import Durability, Tier
from kvstore.tiers import IS_FULL, Buffer, ChunkName, TierStatistics, UploadState
from kvstore.tiers.contract import host_memory
from kvstore.tiers.s3.depth import are_there
from tests.fakes.chunk import FakeChunk, opened
from tests.fakes.engine import account, probed
from tests.fakes.files import replace_file
from tests.fakes.switches import Switch, Switches

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class ObjectSettings:
    """Nodes with the same directory share it. It drops nothing; a full one refuses what comes."""

    directory: Path
    name: str = "s3"
    kind: Tier = Tier.S3
    capacity_bytes: int = 1 << 30
    switches: Path | None = None


class ObjectTier:
    """One node's way to the objects: a file for each chunk, named by its storage key, put there whole."""

    def __init__(self, settings: ObjectSettings, workers: Workers | None = None) -> None:
        self.name, self.kind = settings.name, settings.kind
        self.durability = Durability.SHARED if settings.kind is Tier.REDIS else Durability.OBJECT
        self.switches = Switches(settings.switches)
        self._directory = settings.directory
        self._capacity_bytes = settings.capacity_bytes
        self._workers = workers or WorkerThreads(2, f"kvstore-{settings.name}")
        self._read_bytes = self._written_bytes = self._write_count = 0

    async def _run(self, function: Callable[..., Result], *args: object) -> Result:
        try:
            return await done(self._workers, function, *args)
        except OSError as error:
            raise Unavailable(f"{self._directory} fails: {error}") from error

    def path(self, storage_key: bytes) -> Path:
        """Where a chunk lies. Open to tests that damage it."""
        return self._directory / storage_key.hex()

    async def probe(
        self, storage_keys: Sequence[bytes], timeout_s: float, chains: Sequence[int] = ()
    ) -> Sequence[bool]:
        """As S3: not every key of a chain is looked for."""

        async def is_there(key: bytes) -> bool:
            return self.path(key).exists()

        found = (await are_there(storage_keys, is_there, chains))[0]
        there = set(compress(storage_keys, found))
        return await probed(self.switches, storage_keys, timeout_s, there.__contains__)

    async def claim(self, storage_keys: Sequence[bytes], claim_s: float, timeout_s: float) -> Sequence[UploadState]:
        """It keeps no claims."""
        there = await self.probe(storage_keys, timeout_s)
        return [UploadState.THERE if each else UploadState.FREE for each in there]

    def takes(self, layout: ChunkLayout) -> bool:
        return True

    async def write(self, header: ChunkHeader, layout: ChunkLayout, pieces: Sequence[Buffer]) -> None:
        await self.switches.before("write")
        if self.switches.is_on(Switch.ABSENT):
            return
        if sum(self._sizes()) + layout.total_bytes > self._capacity_bytes:
            raise Exhausted(f"the engine of tiers.{self.name} is full", **{IS_FULL: True})
        self._write_count += 1
        beside = self._directory / f"{header.storage_key.hex()}.{os.getpid()}.{id(self)}.{self._write_count}"
        await self._run(put, beside, self.path(header.storage_key), *host_memory(pieces))
        self._written_bytes += layout.total_bytes

    async def open(self, name: ChunkName, ahead: Sequence[Buffer] = ()) -> FakeChunk | None:
        await self.switches.before("open")
        if self.switches.is_on(Switch.ABSENT):
            return None
        try:
            descriptor = os.open(self.path(name.storage_key), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Unavailable(f"{self._directory} fails: {error}") from error
        return await opened(
            name, lambda offset, count: self._run(os.pread, descriptor, count, offset), self.switches, self._was_read,
            lambda: os.close(descriptor),
        )  # fmt: skip

    def _was_read(self, byte_count: int) -> None:
        self._read_bytes += byte_count

    async def remove(self, storage_keys: Sequence[bytes]) -> None:
        await self.switches.before("remove")
        for key in storage_keys:
            await self._run(self.path(key).unlink, True)

    async def touch(self, storage_keys: Sequence[bytes]) -> None:
        """It drops nothing: use changes nothing."""
        await self.switches.before("touch")

    def drop_all(self) -> None:
        """What an operator may do at any time."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def _sizes(self) -> list[int]:
        """Other processes put and remove meanwhile."""
        found: list[int] = []
        for path in self._directory.glob("*"):
            with suppress(FileNotFoundError):
                if not path.suffix:
                    found.append(path.stat().st_size)
        return found

    def stalled_s(self) -> float:
        return self.switches.stalled_s()

    async def close(self) -> None:
        self._workers.close()

    def statistics(self) -> TierStatistics:
        sizes = self._sizes()
        return account(
            self.name, self._capacity_bytes, sum(sizes), len(sizes), self._read_bytes, self._written_bytes
        )  # fmt: skip


def put(beside: Path, target: Path, *pieces: object) -> None:
    """Blocking. The whole object or none."""
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_file(beside, *pieces)  # type: ignore[arg-type]
    beside.replace(target)
