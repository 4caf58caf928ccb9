"""Engines of every kind, and nodes that use them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from kvstore.tiers import ChunkName, SharedTier
from tests.contracts.chunks import Chunk
from tests.contracts.shared.redis_stand import EncodedRedisStand, OtherRedisStand, RedisStand
from tests.contracts.shared.s3_stand import EncodedS3Stand, S3Stand
from tests.contracts.wrappers import Faulty, Latency, SharedUnder, Throttle
from tests.fakes import EngineSettings, EngineTier, ObjectSettings, ObjectTier, Switches
from tests.simulated import LoopClock, SeededRandom, SeededWorkers, simulate

CAPACITY_BYTES = 1 << 20

SEED = 7

TIMEOUT_S = 1.0


class Stand:
    """An engine, and any number of nodes that use it."""

    evicts = False
    replaces = True
    """A second write of a chunk takes the place of the first."""
    keeps_claims = True
    is_timed = True
    """Its clock is a simulated one, which tells the time exactly."""
    cannot: ClassVar[dict[str, str]] = {}
    """Tests that it cannot have, and why."""

    def __init__(self, home: Path, capacity_bytes: int = CAPACITY_BYTES) -> None:
        home.mkdir(parents=True)
        self.home = home
        self.capacity_bytes = capacity_bytes
        self.switches = Switches(home / "switches")
        self.tier, self.other = self.node(), self.node()

    def node(self) -> SharedTier:
        raise NotImplementedError

    def drop_all(self) -> None:
        """As the engine may at any time."""
        raise NotImplementedError

    def flip(self, key: bytes, offset: int) -> None:
        """Damage one byte of what lies there; ``offset`` counts from its header."""
        raise NotImplementedError

    def put(self, key: bytes, data: bytes) -> None:
        """Write anything there, as others may."""
        raise NotImplementedError

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        async def whole() -> None:
            await scenario()
            for each in (self.tier, self.other, self.tier):
                await each.close()

        simulate(whole(), seed=SEED)


class EngineStand(Stand):
    evicts = True

    def node(self) -> SharedTier:
        name = str(self.home)
        self.fake = EngineTier(
            EngineSettings(
                engine=name, capacity_bytes=self.capacity_bytes, evicts=self.evicts, switches=self.home / "switches"
            )
        )
        return self.fake

    def drop_all(self) -> None:
        self.fake.engine.drop(1 << 30)

    def flip(self, key: bytes, offset: int) -> None:
        value = bytearray(self.fake.engine.values[key])
        value[offset] ^= 1
        self.fake.engine.values[key] = bytes(value)

    def put(self, key: bytes, data: bytes) -> None:
        self.fake.engine.values[key] = data


class FullStand(EngineStand):
    """An engine that evicts nothing."""

    evicts = False


class ObjectStand(Stand):
    keeps_claims = False

    def node(self) -> SharedTier:
        self.fake = ObjectTier(
            ObjectSettings(
                directory=self.home / "objects", capacity_bytes=self.capacity_bytes, switches=self.home / "switches"
            ),
            SeededWorkers(SEED),
        )
        return self.fake

    def drop_all(self) -> None:
        self.fake.drop_all()

    def flip(self, key: bytes, offset: int) -> None:
        data = bytearray(self.fake.path(key).read_bytes())
        data[offset] ^= 1
        self.put(key, bytes(data))

    def put(self, key: bytes, data: bytes) -> None:
        self.fake.path(key).write_bytes(data)


class LatencyStand(ObjectStand):
    def node(self) -> SharedTier:
        return SharedUnder(super().node(), Latency(LoopClock(), 0.0005))


class ThrottleStand(EngineStand):
    def node(self) -> SharedTier:
        return SharedUnder(super().node(), Throttle(LoopClock(), 1e8))


class FaultyStand(EngineStand):
    def node(self) -> SharedTier:
        return SharedUnder(super().node(), Faulty(SeededRandom(SEED)))


STANDS: dict[str, Any] = {
    "engine": EngineStand, "full engine": FullStand, "objects": ObjectStand, "latency": LatencyStand,
    "throttle": ThrottleStand, "faulty": FaultyStand, "redis": RedisStand,
    "another redis": OtherRedisStand, "redis lz4": EncodedRedisStand, "s3": S3Stand, "s3 lz4": EncodedS3Stand,
}  # fmt: skip


async def write(tier: SharedTier, what: Chunk) -> None:
    await tier.write(what.header, what.layout, what.pieces)


async def found(tier: SharedTier, what: Chunk, name: ChunkName | None = None) -> bool:
    """Return True when the tier gives exactly this chunk. False for a miss; other bytes fail the test."""
    target = [np.full(slab.byte_count, 0x5A, np.uint8) for slab in what.layout.slabs]
    stored = await tier.open(name or what.name, target)
    if stored is None:
        return False
    try:
        await stored.read(range(len(target)), target)
    finally:
        stored.close()
    assert all((one == other).all() for one, other in zip(target, what.pieces[1:], strict=True))
    return True
