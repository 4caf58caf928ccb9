"""Tiers that are late, narrow or faulty: each wraps a tier and keeps its contract.

A ``Weather`` says what becomes of a call; ``LocalUnder`` and ``SharedUnder`` are tiers under one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.chunk import ChunkHeader, ChunkLayout
from kvstore.errors import DataLoss, Exhausted, Unavailable
from kvstore.seams import Clock, Random
from kvstore.spec import Durability, Tier
from kvstore.tiers import (
    Buffer,
    ChunkName,
    Evictor,
    LocalTier,
    Recovered,
    Residency,
    SharedTier,
    StoredChunk,
    TierStatistics,
    UploadState,
)
from kvstore.tiers.contract import host_memory


class Weather(Protocol):
    """Runs ahead of each call."""

    async def before(self, call: str, byte_count: int, target: Sequence[Buffer] = ()) -> None:
        """``byte_count``: what the call moves; ``target``: what a read is to fill. Raises what the call shall raise."""


class Latency:
    """Every call takes ``seconds`` longer; calls wait beside each other."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds

    async def before(self, call: str, byte_count: int, target: Sequence[Buffer] = ()) -> None:
        await self._clock.sleep(self._seconds)


class Throttle:
    """Bytes pass one call after the other at ``bytes_per_s``. The turn of a call that is cancelled stays taken."""

    def __init__(self, clock: Clock, bytes_per_s: float) -> None:
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    async def before(self, call: str, byte_count: int, target: Sequence[Buffer] = ()) -> None:
        now_s = self._clock.monotonic()
        self._free_at_s = max(now_s, self._free_at_s) + byte_count / self._bytes_per_s
        await self._clock.sleep(self._free_at_s - now_s)


class Faulty:
    """Calls fail by chance, each kind of failure with its own; the same seed draws the same ones. A read that loses
    data has filled its target with something else first. A call that fails has changed nothing."""

    def __init__(
        self, random: Random, *, unavailable: float = 0.0, data_loss: float = 0.0, exhausted: float = 0.0
    ) -> None:
        self._random = random
        self.unavailable, self.data_loss, self.exhausted = unavailable, data_loss, exhausted

    async def before(self, call: str, byte_count: int, target: Sequence[Buffer] = ()) -> None:
        drawn = int.from_bytes(self._random.bytes(6), "little") / (1 << 48)
        if drawn < self.unavailable:
            raise Unavailable(f"injected: the tier is away ({call})")
        drawn -= self.unavailable
        if call == "write" and drawn < self.exhausted:
            raise Exhausted("injected: the tier is full")
        if call in ("open", "read", "check") and drawn < self.data_loss:
            for each in host_memory(target):
                each[:] = 0xDB
            raise DataLoss(f"injected: the chunk is lost ({call})", reason="injected")


class _Under:
    """What tiers of both kinds have in common."""

    def __init__(self, tier: Any, weather: Weather) -> None:
        self.tier = tier
        self._weather = weather

    @property
    def name(self) -> str:
        return str(self.tier.name)

    @property
    def kind(self) -> Tier:
        return Tier(self.tier.kind)

    @property
    def durability(self) -> Durability:
        return Durability(self.tier.durability)

    def stalled_s(self) -> float:
        return float(self.tier.stalled_s())

    def statistics(self) -> TierStatistics:
        found: TierStatistics = self.tier.statistics()
        return found


class LocalUnder(_Under):
    """A local tier under some weather. What the contract has happen at once happens at once here, too."""

    tier: LocalTier

    def __init__(self, tier: LocalTier, weather: Weather) -> None:
        super().__init__(tier, weather)

    async def recover(self, evictor: Evictor) -> Recovered:
        return await self.tier.recover(evictor)

    async def write(self, header: ChunkHeader, layout: ChunkLayout, pieces: Sequence[Buffer]) -> Residency:
        await self._weather.before("write", layout.total_bytes)
        return await self.tier.write(header, layout, pieces)

    async def open(self, name: ChunkName, residency: Residency) -> StoredChunk:
        await self._weather.before("open", name.layout.header_bytes)
        return ChunkUnder(await self.tier.open(name, residency), self._weather, name.layout)

    async def renew(self, residency: Residency) -> bool:
        await self._weather.before("renew", 0)
        return await self.tier.renew(residency)

    async def supersede(self, writes: Mapping[bytes, int], wait_s: float) -> None:
        await self._weather.before("supersede", 0)
        await self.tier.supersede(writes, wait_s)

    def remove(self, residencies: Sequence[Residency], *, erase: bool = False) -> None:
        self.tier.remove(residencies, erase=erase)

    async def quarantine(self, residency: Residency) -> None:
        await self.tier.quarantine(residency)
        await self._weather.before("quarantine", 0)  # afterwards: the copy is gone however it ends

    async def tidy(self) -> None:
        await self.tier.tidy()

    def has_room(self, layout: ChunkLayout) -> bool:
        return self.tier.has_room(layout)

    def encodings(self, residencies: NDArray[np.int64]) -> NDArray[np.uint8]:
        return self.tier.encodings(residencies)

    async def close(self, held: Recovered | None) -> None:
        await self.tier.close(held)


class SharedUnder(_Under):
    """A shared tier under some weather."""

    tier: SharedTier

    def __init__(self, tier: SharedTier, weather: Weather) -> None:
        super().__init__(tier, weather)

    async def probe(
        self, storage_keys: Sequence[bytes], timeout_s: float, chains: Sequence[int] = ()
    ) -> Sequence[bool]:
        await self._weather.before("probe", 0)
        return await self.tier.probe(storage_keys, timeout_s, chains)

    async def claim(self, storage_keys: Sequence[bytes], claim_s: float, timeout_s: float) -> Sequence[UploadState]:
        await self._weather.before("claim", 0)
        return await self.tier.claim(storage_keys, claim_s, timeout_s)

    def takes(self, layout: ChunkLayout) -> bool:
        return self.tier.takes(layout)

    async def write(self, header: ChunkHeader, layout: ChunkLayout, pieces: Sequence[Buffer]) -> None:
        await self._weather.before("write", layout.total_bytes)
        await self.tier.write(header, layout, pieces)

    async def open(self, name: ChunkName, ahead: Sequence[Buffer] = ()) -> StoredChunk | None:
        await self._weather.before("open", name.layout.header_bytes)
        stored = await self.tier.open(name, ahead)
        return None if stored is None else ChunkUnder(stored, self._weather, name.layout)

    async def touch(self, storage_keys: Sequence[bytes]) -> None:
        await self._weather.before("touch", 0)
        await self.tier.touch(storage_keys)

    async def remove(self, storage_keys: Sequence[bytes]) -> None:
        await self._weather.before("remove", 0)
        await self.tier.remove(storage_keys)

    async def close(self) -> None:
        await self.tier.close()


class ChunkUnder:
    """A chunk of a tier under some weather."""

    def __init__(self, stored: StoredChunk, weather: Weather, layout: ChunkLayout) -> None:
        self.header = stored.header
        self._stored = stored
        self._weather = weather
        self._layout = layout

    async def read(self, slabs: range, target: Sequence[Buffer]) -> None:
        await self._weather.before("read", self._byte_count(slabs), target)
        await self._stored.read(slabs, target)

    async def check(self, slabs: range) -> None:
        await self._weather.before("check", self._byte_count(slabs))
        await self._stored.check(slabs)

    def _byte_count(self, slabs: range) -> int:
        return sum(self._layout.slabs[slab].byte_count for slab in slabs)

    def close(self) -> None:
        self._stored.close()
