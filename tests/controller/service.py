"""A controller on simulated parts, and short ways to use it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from kvstore import keys
from kvstore.arena import Arena
from kvstore.chunk import layout_of, parse_header
from kvstore.config import LimitSettings
from kvstore.controller import ChainQuery, Controller, Fill, Parts, ReserveRequest, Session, StoreResult
from kvstore.policy import LeastRecentlyUsed
from kvstore.seams import Clock, FaultPoints, TenantKeys, Workers
from kvstore.spec import Durability, Exactness, ModelSpec, StoreState
from kvstore.telemetry import Counters
from tests.simulated import BytearrayMemory, InlineWorkers, ManualClock, SeededRandom
from tests.specs import small_spec

CHUNK = 16


async def soon(is_so: Callable[[], bool], round_count: int = 100_000) -> None:
    """Let others run until something is so."""
    for _ in range(round_count):
        if is_so():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not come to be")


class Service:
    """``chunks`` chunks fit the arena. Bytes of a chunk are a function of its digest: a wrong byte shows."""

    def __init__(
        self, chunks: int = 8, workers: Workers | None = None, clock: Clock | None = None, **limits: Any
    ) -> None:
        self.spec: ModelSpec = small_spec()
        self.layout = layout_of(self.spec, self.spec.kind, CHUNK)
        capacity = chunks * self.layout.total_bytes
        defaults = LimitSettings(leased_bytes_max=capacity, pin_bytes_max=capacity)
        self.clock: Any = clock or ManualClock()
        self.faults, self.memory = FaultPoints(), BytearrayMemory()
        self.arena = Arena(self.memory, self.faults, capacity_bytes=capacity, region_bytes=capacity)
        self.parts = Parts(
            arena=self.arena, policy=LeastRecentlyUsed, limits=replace(defaults, **limits), clock=self.clock,
            random=SeededRandom(1), memory=self.memory, workers=workers or InlineWorkers(), keys=TenantKeys(),
            faults=self.faults, counters=Counters(), deadline_s=0.2,
        )  # fmt: skip
        self.controller = Controller(self.parts)
        self.model = self.controller.register_model(self.spec)

    def tokens(self, *path: int) -> keys.Tokens:
        """One chunk of equal tokens per step of the path."""
        return keys.token_array(np.repeat(np.array(path or (0,)), CHUNK), self.spec.vocab_size)

    def query(self, *path: int, **options: Any) -> ChainQuery:
        return ChainQuery(self.model, keys.chain_digests(self.tokens(*path), CHUNK), **options)

    async def reserve(
        self, session: Session, *path: int, shards: int = 1, durability: Durability = Durability.NONE, **options: Any
    ) -> StoreResult:
        tokens = self.tokens(*path)
        digests = [keys.token_digest(tokens[at : at + CHUNK]) for at in range(0, tokens.size, CHUNK)]
        query = self.query(*path, **options)
        request = ReserveRequest(query, digests, shards=shards, durability=durability)
        return await self.controller.reserve(session, request)

    def body(self, digest: bytes) -> Any:
        """What a chunk of this digest holds (gaps are zeros)."""
        body = np.zeros(self.layout.body_bytes, np.uint8)
        for offset, length in zip(self.layout.strip_offsets, self.layout.strip_lengths, strict=True):
            body[int(offset) : int(offset) + int(length)] = np.frombuffer(digest, np.uint8)[int(offset) % 31]
        return body

    def stage(self, session: Session, result: StoreResult, *path: int) -> list[Fill]:
        """Write the wanted chunks into fresh staging."""
        wanted = [index for index, state in enumerate(result.states) if state is StoreState.WANTED]
        if not wanted:
            return []
        size = -(-self.layout.body_bytes // 4096) * 4096
        staging = self.controller.create_staging(session, size * len(wanted))
        digests = self.query(*path).digests
        for place, index in enumerate(wanted):
            staging.mapping.bytes[place * size : place * size + self.layout.body_bytes] = self.body(digests[index])
        return [
            Fill(index, 0, self.layout.strip_count, staging.staging_id, place * size)
            for place, index in enumerate(wanted)
        ]

    async def store(self, session: Session, *path: int, **options: Any) -> StoreResult:
        result = await self.reserve(session, *path, **options)
        fills = self.stage(session, result, *path)
        done = await self.controller.commit(session, result.reservation_id, fills)
        for fill in fills[:1]:
            self.controller.close_staging(session, fill.staging_id)
        return done

    def check(self, session: Session, *path: int) -> int:
        """Fetch, compare every byte and the header, release. Returns the chunks that hit."""
        query = self.query(*path)
        result = self.controller.fetches.fetch(session, query)
        for chunk in result.chunks:
            digest = query.digests[chunk.chain_index]
            header = parse_header(chunk.placement.pieces[0], self.layout)
            assert header.chain_digest == digest
            assert header.exactness is Exactness.EXACT
            body = np.concatenate(chunk.placement.pieces[1:])
            assert (body == self.body(digest)).all()
        self.controller.release(session, [result.lease_id])
        return result.hit_count
