"""What lies beyond the node, and outlives it: an engine that drops chunks as it likes, and objects that stay. Both
delay, fail, and say wrong things of what they never had; a call that is cut short may still have its effect, at once or
later, and a write may come a second time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.chunk import ChunkHeader, ChunkLayout
from kvstore.errors import DeadlineExceeded, Exhausted, Unavailable
from kvstore.keys import storage_key
from kvstore.seams import TenantKeys
from kvstore.spec import Durability, Exactness, Provenance, Tier
from kvstore.tiers import Buffer, ChunkName, SharedUse, TierStatistics, UploadState, WritePolicy
from kvstore.tiers.contract import host_memory
from tests.fakes import Switches
from tests.fakes.chunk import FakeChunk, opened
from tests.fakes.engine import account
from tests.sim.models import Name

CAPACITY_BYTES = 1 << 30
ENGINE_CHUNK_COUNT = 24
LOOKUP_S = 0.02
WEATHERS = ("calm", "calm", "calm", "slow", "failing", "away", "stalled", "lying", "full")


@dataclass(eq=False)
class Store:
    """What one engine has. ``gone_s``: when each chunk left it last; ``had``: what it ever had."""

    values: dict[bytes, bytes] = field(default_factory=dict)
    gone_s: dict[bytes, float] = field(default_factory=dict)
    had: set[bytes] = field(default_factory=set)
    weather: str = "calm"
    claims: dict[bytes, tuple[object, float]] = field(default_factory=dict)
    """Key -> who is about to write it, and until when it says so."""

    def put(self, key: bytes, value: bytes) -> None:
        self.values.pop(key, None)
        self.values[key] = value
        self.had.add(key)

    def drop(self, key: bytes) -> None:
        del self.values[key]
        self.gone_s[key] = asyncio.get_running_loop().time()

    def was_there(self, key: bytes, since_s: float) -> bool:
        """Return True when it had a chunk at any moment since then."""
        return key in self.values or self.gone_s.get(key, -1.0) >= since_s


class Cloud:
    """Of one seed. It draws from a source of its own: seeds without it are as they were."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(f"cloud {seed}")
        self.engine, self.objects = Store(), Store()
        policies = list(WritePolicy)
        self._write = self.chance.choice(policies), self.chance.choice(policies)

    def uses(self) -> list[SharedUse]:
        """A node's ways to them, the fastest first."""
        engine = CloudTier("redis", Tier.REDIS, Durability.SHARED, self.engine, self.chance)
        objects = CloudTier("s3", Tier.S3, Durability.OBJECT, self.objects, self.chance)
        return [
            SharedUse(tier=tier, lookup_s_max=LOOKUP_S, write=write)
            for tier, write in zip((engine, objects), self._write, strict=True)
        ]

    def change(self) -> str:
        """Another weather; now and then the engine is flushed."""
        for store in (self.engine, self.objects):
            store.weather = self.chance.choice(WEATHERS)
        if self.chance.random() < 0.1:
            for key in list(self.engine.values):
                self.engine.drop(key)
        return f"{self.engine.weather}, {self.objects.weather}"

    def calm(self) -> None:
        self.engine.weather = self.objects.weather = "calm"

    def drawn_level(self) -> Durability:
        """What a store, or who waits for it, asks for."""
        return self.chance.choice((Durability.LOCAL, Durability.LOCAL, Durability.SHARED, Durability.OBJECT))


class CloudTier:
    """One process's way to a store."""

    def __init__(self, name: str, kind: Tier, durability: Durability, store: Store, chance: random.Random) -> None:
        self.name, self.kind, self.durability = name, kind, durability
        self._store = store
        self._chance = chance
        self._waiting: dict[object, float] = {}
        self._switches = Switches()

    async def _called(self) -> None:
        """Raises Unavailable."""
        me, loop = object(), asyncio.get_running_loop()
        self._waiting[me] = loop.time()
        try:
            await asyncio.sleep(self._chance.uniform(0.0, 0.5 if self._store.weather == "slow" else 0.01))
            while self._store.weather == "stalled":  # noqa: ASYNC110 - the weather is nobody's event
                await asyncio.sleep(0.1)
        finally:
            del self._waiting[me]
        away = {"away": 1.0, "failing": 0.4}.get(self._store.weather, 0.0)
        if self._chance.random() < away:
            raise Unavailable(f"{self.name} is away")

    async def probe(
        self, storage_keys: Sequence[bytes], timeout_s: float, chains: Sequence[int] = ()
    ) -> Sequence[bool]:
        try:
            async with asyncio.timeout(timeout_s):
                await self._called()
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self.name} has not answered in time") from error
        store = self._store
        if store.weather == "lying":  # what it had once and dropped it does not claim to have
            return [key not in store.had for key in storage_keys]
        return [key in store.values for key in storage_keys]

    async def claim(self, storage_keys: Sequence[bytes], claim_s: float, timeout_s: float) -> Sequence[UploadState]:
        """Of objects in the place that nodes share for it. A claim of a life that has ended stays for its time."""
        there = await self.probe(storage_keys, timeout_s)
        return [
            UploadState.THERE if is_there else self._claimed(key, claim_s)
            for key, is_there in zip(storage_keys, there, strict=True)
        ]

    def _claimed(self, key: bytes, claim_s: float) -> UploadState:
        now_s = asyncio.get_running_loop().time()
        holder, until_s = self._store.claims.get(key, (self, 0.0))
        if holder is not self and now_s < until_s:
            return UploadState.TAKEN
        self._store.claims[key] = (self, now_s + claim_s)
        return UploadState.FREE

    def takes(self, layout: ChunkLayout) -> bool:
        return True

    async def write(self, header: ChunkHeader, layout: ChunkLayout, pieces: Sequence[Buffer]) -> None:
        value = b"".join(piece.tobytes() for piece in host_memory(pieces))
        try:
            await self._called()
        except (asyncio.CancelledError, Unavailable):
            if self._chance.random() < 0.3:
                self._put(header.storage_key, value)  # it came through all the same
            else:
                self._put_later(header.storage_key, value)
            raise
        if self._store.weather == "full":
            raise Exhausted(f"{self.name} is full")
        self._put(header.storage_key, value)
        self._put_later(header.storage_key, value)

    def _put_later(self, key: bytes, value: bytes) -> None:
        """Now and then a message is held up on its way, and overtaken; also one of a life that has ended meanwhile."""
        if self._chance.random() < 0.2:
            asyncio.get_running_loop().call_later(self._chance.choice((0.01, 1.0, 30.0)), self._put, key, value)

    def _put(self, key: bytes, value: bytes) -> None:
        self._store.put(key, value)
        while self.durability is Durability.SHARED and len(self._store.values) > ENGINE_CHUNK_COUNT:
            self._store.drop(next(iter(self._store.values)))

    async def open(self, name: ChunkName, ahead: Sequence[Buffer] = ()) -> FakeChunk | None:
        await self._called()
        value = self._store.values.get(name.storage_key)
        if value is None:
            return None

        async def load(offset: int, count: int) -> bytes:
            await self._called()
            return value[offset : offset + count]

        return await opened(name, load, self._switches, lambda _: None, lambda: None)

    async def remove(self, storage_keys: Sequence[bytes]) -> None:
        await self._called()

    async def touch(self, storage_keys: Sequence[bytes]) -> None:
        await self._called()
        for key in storage_keys:
            if key in self._store.values:
                self._store.put(key, self._store.values[key])

    def stalled_s(self) -> float:
        if not self._waiting:
            return 0.0
        return asyncio.get_running_loop().time() - min(self._waiting.values())

    async def close(self) -> None:
        """It is not ours."""

    def statistics(self) -> TierStatistics:
        held = sum(map(len, self._store.values.values()))
        return account(self.name, CAPACITY_BYTES, held, len(self._store.values), 0, 0)


def key_of(name: Name) -> bytes:
    """Under which a chunk lies beyond the node."""
    return storage_key(TenantKeys().secret, name[0], Provenance.IN_CONTEXT, Exactness.EXACT, name[1])


def has_cloud(seed: int) -> bool:
    """Which seeds have one."""
    return seed % 4 == 2
