"""Tiers that are late, narrow or faulty: each wraps a tier and keeps its contract. For tests and simulations only; the
service never builds one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from kvstore.chunk import ChunkHeader, ChunkLayout
from kvstore.errors import DataLoss, Exhausted, Unavailable
from kvstore.seams import Clock, Random
from kvstore.seams.memory import Bytes
from kvstore.tiers.contract import ChunkName, Found, Residency, StoredChunk, Tier, TierStatistics


class _Wrapper:
    """A tier around a tier. ``_before`` runs ahead of each call, with the bytes that the call moves."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier

    async def _before(self, call: str, byte_count: int, target: Sequence[Bytes] = ()) -> None:
        raise NotImplementedError

    async def write(self, header: ChunkHeader, layout: ChunkLayout, pieces: Sequence[Bytes]) -> Residency:
        await self._before("write", layout.total_bytes)
        return await self._tier.write(header, layout, pieces)

    async def open(self, name: ChunkName, residency: Residency) -> StoredChunk:
        await self._before("open", name.layout.header_bytes)
        return _WrappedChunk(self, await self._tier.open(name, residency))

    async def read(self, stored: StoredChunk, slabs: range, target: Sequence[Bytes]) -> None:
        """See ``StoredChunk.read``."""
        await self._before("read", sum(each.size for each in target), target)
        await stored.read(slabs, target)

    async def remove(self, residencies: Sequence[Residency], *, erase: bool = False) -> None:
        await self._before("remove", 0)
        await self._tier.remove(residencies, erase=erase)

    def scan(self) -> AsyncIterator[Found]:
        return self._tier.scan()

    def statistics(self) -> TierStatistics:
        return self._tier.statistics()


class _WrappedChunk:
    """A chunk of the wrapped tier, read by way of the wrapper."""

    def __init__(self, wrapper: _Wrapper, stored: StoredChunk) -> None:
        self.header = stored.header
        self._wrapper = wrapper
        self._stored = stored

    async def read(self, slabs: range, target: Sequence[Bytes]) -> None:
        await self._wrapper.read(self._stored, slabs, target)

    def close(self) -> None:
        self._stored.close()


class Latency(_Wrapper):
    """Every call takes ``seconds`` longer; calls wait beside each other."""

    def __init__(self, tier: Tier, clock: Clock, seconds: float) -> None:
        super().__init__(tier)
        self._clock = clock
        self._seconds = seconds

    async def _before(self, call: str, byte_count: int, target: Sequence[Bytes] = ()) -> None:
        await self._clock.sleep(self._seconds)


class Throttle(_Wrapper):
    """Bytes pass one call after the other at ``bytes_per_s``. The turn of a call that is cancelled stays taken."""

    def __init__(self, tier: Tier, clock: Clock, bytes_per_s: float) -> None:
        super().__init__(tier)
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._free_at_s = clock.monotonic()

    async def _before(self, call: str, byte_count: int, target: Sequence[Bytes] = ()) -> None:
        now_s = self._clock.monotonic()
        self._free_at_s = max(now_s, self._free_at_s) + byte_count / self._bytes_per_s
        await self._clock.sleep(self._free_at_s - now_s)


class Faulty(_Wrapper):
    """Calls fail by chance, each kind of failure with its own; the same seed draws the same ones. A read that loses
    data has filled its target with something else first. A call that fails has changed nothing."""

    def __init__(
        self, tier: Tier, random: Random, *, unavailable: float = 0.0, data_loss: float = 0.0, exhausted: float = 0.0
    ) -> None:
        super().__init__(tier)
        self._random = random
        self._unavailable, self._data_loss, self._exhausted = unavailable, data_loss, exhausted

    async def _before(self, call: str, byte_count: int, target: Sequence[Bytes] = ()) -> None:
        drawn = int.from_bytes(self._random.bytes(6), "little") / (1 << 48)
        if drawn < self._unavailable:
            raise Unavailable(f"injected: the tier is away ({call})")
        drawn -= self._unavailable
        if call == "write" and drawn < self._exhausted:
            raise Exhausted("injected: the tier is full")
        if call in ("open", "read") and drawn < self._data_loss:
            for each in target:
                each[:] = 0xDB
            raise DataLoss(f"injected: the chunk is lost ({call})", reason="injected")
