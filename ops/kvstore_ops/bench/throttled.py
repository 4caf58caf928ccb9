"""A sidecar with a throttled device: each read sleeps until a device of the wanted rate would have delivered the bytes.

A file that the benchmark writes has the rate in bytes per second; 0: not throttled. No program that users run can be
throttled.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvstore.chunk import ChunkHeader, ChunkLayout
from kvstore.config import Settings, load
from kvstore.server.app import serve
from kvstore.server.tiers import TIERS
from kvstore.server.world import TierOwner, World
from kvstore.tiers.contract import Buffer, ChunkName, LocalTier, StoredChunk
from kvstore_ops.sidecar import Sidecar

RATE_FILE = "KVSTORE_BENCH_RATE_FILE"
FLAGS = {
    "--state-directory": "server.state_directory",
    "--socket-directory": "server.socket_directory",
    "--capacity": "arena.capacity_bytes",
    "--nvme": "tiers.nvme.capacity_bytes",
}


class Throttle:
    """One throttled device: its reads queue up, however many there are at once."""

    def __init__(self, rate_file: Path) -> None:
        self._rate_file = rate_file
        self._free_s = 0.0

    async def take(self, byte_count: int) -> None:
        """Wait until a device of the rate would have delivered ``byte_count`` more bytes."""
        rate = float(self._rate_file.read_text() or 0)
        if not rate:
            return
        now = time.monotonic()
        self._free_s = max(self._free_s, now) + byte_count / rate
        await asyncio.sleep(self._free_s - now)


class ThrottledChunk:
    """A stored chunk whose reads are throttled."""

    def __init__(self, chunk: StoredChunk, layout: ChunkLayout, throttle: Throttle) -> None:
        self._chunk = chunk
        self._layout = layout
        self._throttle = throttle

    @property
    def header(self) -> ChunkHeader:
        return self._chunk.header

    async def read(self, slabs: range, target: Sequence[Buffer]) -> None:
        await self._throttle.take(sum(self._layout.slabs[slab].byte_count for slab in slabs))
        await self._chunk.read(slabs, target)

    async def check(self, slabs: range) -> None:
        await self._chunk.check(slabs)

    def close(self) -> None:
        self._chunk.close()


class ThrottledTier:
    """A tier whose chunks' reads are throttled. Everything else is the given tier's own."""

    def __init__(self, tier: LocalTier, throttle: Throttle) -> None:
        self._tier = tier
        self._throttle = throttle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    async def open(self, name: ChunkName, residency: int) -> StoredChunk:
        return ThrottledChunk(await self._tier.open(name, residency), name.layout, self._throttle)


class ThrottledSidecar(Sidecar):
    """A sidecar whose device ``set_rate`` throttles; at first it is not throttled."""

    program = ("kvstore_ops.bench.throttled",)

    def __init__(self, *arguments: str, nvme: str) -> None:
        super().__init__(*arguments, nvme=nvme)
        self._rate_file = self.directory / "rate"
        self.environment = {**os.environ, RATE_FILE: str(self._rate_file)}
        self.set_rate(0)

    def set_rate(self, bytes_per_s: float) -> None:
        """Throttle the device from the next read on. 0: do not throttle."""
        beside = self._rate_file.with_suffix(".new")
        beside.write_text(str(bytes_per_s))
        beside.replace(self._rate_file)


def main(arguments: list[str]) -> int:
    """Serve until a signal stops the sidecar."""
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    (device,) = TIERS.local

    def build(settings: Settings, world: World, owner: TierOwner) -> Any:
        tier = device.build(settings, world, owner)
        return None if tier is None else ThrottledTier(tier, Throttle(Path(os.environ[RATE_FILE])))

    flags: dict[str, object] = {FLAGS[name]: value for name, value in given.items()}
    return serve(load(None, os.environ, flags), replace(TIERS, local=(replace(device, build=build),)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
