"""Nodes that share tiers: services with a device each, and the engine between them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from kvstore.controller import LookupResult
from kvstore.errors import DataLoss
from kvstore.spec import ChunkState, MissReason, Tier
from kvstore.tiers import SharedTier, SharedUse, WritePolicy
from tests.fakes import EngineSettings, EngineTier, ObjectSettings, ObjectTier, Switches
from tests.fakes.engine import ENGINES, Engine
from tests.simulated import InlineWorkers, SimulatedDisk, simulate
from tests.tiers.service import SEED, DeviceService
from tests.tiers.values import ValueService

LOOKUP_S = 0.05
PATH = (1, 2, 3)


class Node(DeviceService):
    """One of the nodes that share these tiers."""

    def __init__(
        self, *makers: Callable[[], SharedTier], write: Mapping[str, WritePolicy] | None = None, **options: Any
    ) -> None:
        """``write``: by the name of a tier; BACK for the others."""
        super().__init__(disk=SimulatedDisk(SEED), **options)
        self.makers = makers
        self.write = write or {}
        self.shared: list[Any] = []

    async def attach(self) -> None:
        await super().attach()
        self.shared = [make() for make in self.makers]
        for tier in self.shared:
            write = self.write.get(tier.name, WritePolicy.BACK)
            self.controller.parts.movement.attach_shared(SharedUse(tier=tier, lookup_s_max=LOOKUP_S, write=write))

    async def lookup(self, *path: int, readers: int = 0) -> LookupResult:
        return await self.controller.lookup_wide(self.query(*path), readers)

    async def give(self, *path: int) -> None:
        """Store, and wait until every tier has it that takes it."""
        await self.keep(*path)
        await self.quiet()

    async def quiet(self) -> None:
        while self.controller.stats().backlog_count:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.01)

    async def fetch(self, *path: int) -> tuple[int, MissReason]:
        """As a ``DeviceService``'s; and what came is entered."""
        found = await super().fetch(*path)
        for _ in range(100):
            if self.controller.stats().loading_bytes:
                await asyncio.sleep(0.001)
        return found

    def lookup_now(self, *path: int) -> int:
        """How many chunks of a path the node has itself. No use is counted."""
        return len(self.controller.lookups.stored(self.query(*path))[0])

    def row(self, *path: int) -> int:
        """The row of the last chunk of a path."""
        query = self.query(*path)
        return self.controller.parts.catalog.model(self.model).seen(None, query.exactness).index[query.digests[-1]]

    def ghosts(self) -> list[bytes]:
        """Digests of chunks that no tier holds and something still refers to."""
        return [digest for space in self.controller.parts.catalog.spaces.numbered for digest in space.ghosts]

    def key(self, *path: int) -> bytes:
        """The storage key of the last chunk of a path."""
        parts, query = self.controller.parts, self.query(*path)
        return parts.movement.names.key(parts.catalog.model(self.model).seen(None, query.exactness), query.digests[-1])

    def is_empty(self) -> None:
        """Nothing is left of what did not come."""
        stats = self.controller.stats()
        assert (stats.chunk_count, stats.used_bytes, stats.lease_count, stats.loading_bytes) == (0, 0, 0, 0)
        assert not self.ghosts()


def spoil(engine: Engine, node: Node, *path: int) -> None:
    """A bit of the first strip of the path's last chunk flips in the engine."""
    key = node.key(*path)
    value = bytearray(engine.values[key])
    value[node.layout.header_bytes] ^= 1
    engine.values[key] = bytes(value)


class World:
    """Two nodes and the engine between them. ``switches`` are those of both nodes' ways to it."""

    def __init__(self, directory: Path, **engine: Any) -> None:
        self.settings = EngineSettings(engine=str(directory), switches=directory / "switches", **engine)
        self.switches = EngineTier(self.settings).switches
        self.one, self.other = (Node(lambda: EngineTier(self.settings)) for _ in range(2))

    @property
    def engine(self) -> Engine:
        return ENGINES[self.settings.engine]

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        run([self.one, self.other], scenario)


class Wide:
    """Nodes that share an engine (SHARED) and objects (OBJECT), each with its own switches."""

    def __init__(self, directory: Path, **engine: Any) -> None:
        self.directory = directory
        self.engine_settings = EngineSettings(
            engine=str(directory), switches=directory / "redis.switches", **engine
        )  # fmt: skip
        self.object_settings = ObjectSettings(
            directory=directory / "objects", switches=directory / "s3.switches"
        )  # fmt: skip
        self.redis = Switches(self.engine_settings.switches)
        self.s3 = Switches(self.object_settings.switches)

    @property
    def engine(self) -> Engine:
        return ENGINES[self.engine_settings.engine]

    def node(self, *, redis: str = "back", s3: str = "back", **options: Any) -> Node:
        """With what each tier's ``write`` setting says."""
        write = {"redis": WritePolicy(redis), "s3": WritePolicy(s3)}
        return Node(
            lambda: EngineTier(self.engine_settings), lambda: ObjectTier(self.object_settings, InlineWorkers()),
            write=write, **options,
        )  # fmt: skip

    def in_redis(self, node: Node, *path: int) -> list[bool]:
        """Which of a path's chunks the engine has."""
        return [node.key(*path[: number + 1]) in self.engine.values for number in range(len(path))]

    def in_s3(self, node: Node, *path: int) -> list[bool]:
        """Which of a path's chunks are objects."""
        keys = (node.key(*path[: number + 1]) for number in range(len(path)))
        return [(self.object_settings.directory / key.hex()).exists() for key in keys]


def run(nodes: list[Node], scenario: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        try:
            for node in nodes:
                await node.start()
            await scenario()
        finally:
            for node in nodes:
                await node.stop(kill=True)

    simulate(whole(), seed=SEED)


def tiers_of(found: LookupResult) -> list[tuple[Tier, int]]:
    return [(run.tier, run.chunk_count) for run in found.runs if run.state is ChunkState.HIT]


async def redeemed(node: Node, ticket: bytes) -> int:
    """How many chunks came by a ticket."""
    result = await node.controller.redeem(node.session, ticket)
    lost = [each async for news in node.controller.arrivals(result) for each in news if each.lost]
    node.controller.release(node.session, [result.lease_id])
    if lost:
        raise DataLoss(f"{len(lost)} chunks were lost on their way")
    return result.hit_count


class ValueNode(ValueService):
    """A node whose values an engine could have, too."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__()
        self._settings = settings

    async def attach(self) -> None:
        await super().attach()
        self.controller.parts.movement.attach_shared(SharedUse(tier=EngineTier(self._settings), lookup_s_max=LOOKUP_S))
