"""A shared tier in memory: a dict that nodes of a process share by its name. It drops the least recently used."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.chunk import ChunkHeader, ChunkLayout
from kvstore.errors import DeadlineExceeded, Exhausted
from kvstore.spec import Durability, Tier
from kvstore.tiers import IS_FULL, Buffer, ChunkName, TierStatistics, UploadState
from kvstore.tiers.contract import host_memory
from tests.fakes.chunk import FakeChunk, opened
from tests.fakes.switches import Switch, Switches


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Nodes with the same ``engine`` share it. Without ``evicts`` a full one refuses what comes."""

    engine: str = "engine"
    name: str = "redis"
    kind: Tier = Tier.REDIS
    capacity_bytes: int = 1 << 20
    evicts: bool = True
    switches: Path | None = None


@dataclass(eq=False)
class Engine:
    """What the nodes share. ``values`` is open to tests that damage it."""

    values: OrderedDict[bytes, bytes] = field(default_factory=OrderedDict)
    """Storage key -> header and slabs, the least recently used first."""
    touches: Counter[bytes] = field(default_factory=Counter)
    """How often nodes told of each key's use."""
    claims: dict[bytes, tuple[object, float]] = field(default_factory=dict)
    """Storage key -> which node is about to write it, and until when it says so."""

    @property
    def held_bytes(self) -> int:
        return sum(map(len, self.values.values()))

    def claimed(self, key: bytes, who: object, claim_s: float) -> UploadState:
        """By a node that is about to write it."""
        now_s = asyncio.get_running_loop().time()
        holder, until_s = self.claims.get(key, (who, 0.0))
        if holder is not who and now_s < until_s:
            return UploadState.TAKEN
        self.claims[key] = (who, now_s + claim_s)
        return UploadState.FREE

    def drop(self, count: int) -> None:
        """As an engine does that needs its memory for others."""
        for _ in range(min(count, len(self.values))):
            self.values.popitem(last=False)


ENGINES: dict[str, Engine] = {}
"""By name."""


class EngineTier:
    """One node's way to the engine."""

    durability = Durability.SHARED

    def __init__(self, settings: EngineSettings) -> None:
        self.name, self.kind = settings.name, settings.kind
        self.engine = ENGINES.setdefault(settings.engine, Engine())
        self.switches = Switches(settings.switches)
        self._capacity_bytes = settings.capacity_bytes
        self._evicts = settings.evicts
        self._read_bytes = self._written_bytes = 0

    async def probe(
        self, storage_keys: Sequence[bytes], timeout_s: float, chains: Sequence[int] = ()
    ) -> Sequence[bool]:
        return await probed(self.switches, storage_keys, timeout_s, self.engine.values.__contains__)

    async def claim(self, storage_keys: Sequence[bytes], claim_s: float, timeout_s: float) -> Sequence[UploadState]:
        there = await self.probe(storage_keys, timeout_s)
        return [
            UploadState.THERE if is_there else self.engine.claimed(key, self, claim_s)
            for key, is_there in zip(storage_keys, there, strict=True)
        ]

    def takes(self, layout: ChunkLayout) -> bool:
        return True

    async def write(self, header: ChunkHeader, layout: ChunkLayout, pieces: Sequence[Buffer]) -> None:
        value = b"".join(piece.tobytes() for piece in host_memory(pieces))
        await self.switches.before("write")
        if self.switches.is_on(Switch.ABSENT):
            return
        engine = self.engine
        engine.values.pop(header.storage_key, None)
        while engine.values and self._evicts and engine.held_bytes + len(value) > self._capacity_bytes:
            engine.drop(1)
        if engine.held_bytes + len(value) > self._capacity_bytes:
            raise Exhausted(f"the engine of tiers.{self.name} is full", **{IS_FULL: True})
        engine.values[header.storage_key] = value
        self._written_bytes += len(value)

    async def open(self, name: ChunkName, ahead: Sequence[Buffer] = ()) -> FakeChunk | None:
        await self.switches.before("open")
        value = self.engine.values.get(name.storage_key)
        if value is None or self.switches.is_on(Switch.ABSENT):
            return None
        self.engine.values.move_to_end(name.storage_key)

        async def load(offset: int, count: int) -> bytes:
            return value[offset : offset + count]

        return await opened(name, load, self.switches, self._was_read, lambda: None)

    def _was_read(self, byte_count: int) -> None:
        self._read_bytes += byte_count

    async def remove(self, storage_keys: Sequence[bytes]) -> None:
        await self.switches.before("remove")
        for key in storage_keys:
            self.engine.values.pop(key, None)

    async def touch(self, storage_keys: Sequence[bytes]) -> None:
        await self.switches.before("touch")
        for key in storage_keys:
            self.engine.touches[key] += 1
            if key in self.engine.values:
                self.engine.values.move_to_end(key)

    def stalled_s(self) -> float:
        return self.switches.stalled_s()

    async def close(self) -> None:
        """The engine stays: it is not ours."""

    def statistics(self) -> TierStatistics:
        return account(
            self.name, self._capacity_bytes, self.engine.held_bytes, len(self.engine.values), self._read_bytes,
            self._written_bytes,
        )  # fmt: skip


async def probed(
    switches: Switches, storage_keys: Sequence[bytes], timeout_s: float, is_there: Callable[[bytes], bool]
) -> list[bool]:
    """What a probe of a fake answers. Raises DeadlineExceeded, Unavailable."""
    try:
        await asyncio.wait_for(switches.before("probe"), timeout_s)
    except TimeoutError as error:
        raise DeadlineExceeded(f"the fake has not answered within {timeout_s} s") from error
    is_absent, is_lying = switches.is_on(Switch.ABSENT), switches.is_on(Switch.LYING)
    return [(is_there(key) and not is_absent) != is_lying for key in storage_keys]


def account(
    name: str, capacity_bytes: int, held_bytes: int, chunk_count: int, read_bytes: int, written_bytes: int
) -> TierStatistics:
    """Of a tier without overhead."""
    return TierStatistics(
        name=name, state="up", capacity_bytes=capacity_bytes, file_bytes=held_bytes, allocated_bytes=held_bytes,
        free_bytes=0, quarantined_bytes=0, overhead_bytes=0, chunk_count=chunk_count, read_bytes=read_bytes,
        written_bytes=written_bytes,
    )  # fmt: skip
