"""Canaries: small chunks of our own that are written, read and removed in each tier, so that a tier that fails silently
is noticed. This module also calls ``tidy`` of each tier, at intervals."""

from __future__ import annotations

import asyncio
import logging

import numpy as np

from kvstore.catalog import ChunkTable
from kvstore.chunk import ChunkHeader, checksum_strips, layout_of, pack_header, strip_seeds
from kvstore.config import PolicySettings
from kvstore.seams import Clock, Random
from kvstore.spec import CacheKind, LayerSpec, ModelSpec, RopeSpec
from kvstore.telemetry import Counters
from kvstore.tiers import ChunkName, LocalTier

TIDY_INTERVAL_S = 10.0
_CANARY = ModelSpec(
    model_id="kvstore/canary", weights_digest="00" * 32, layers=(LayerSpec(kv_heads=1, k_dim=16, v_dim=16),),
    hidden_size=16, vocab_size=2, cache_dtype="bfloat16", rope=RopeSpec(rotary_dim=16), chunk_tokens=64,
)  # fmt: skip
_LAYOUT = layout_of(_CANARY, CacheKind.KV, _CANARY.chunk_tokens)
_log = logging.getLogger("kvstore.movement")


class Canaries:
    """Sends a canary through each local tier every policy.canary_interval_s seconds; 0 sends none."""

    def __init__(
        self, table: ChunkTable, clock: Clock, random: Random, counters: Counters, policies: PolicySettings
    ) -> None:
        self._table = table
        self._clock = clock
        self._random = random
        self._counters = counters
        self._policies = policies

    async def run(self) -> None:
        """Send canaries, and have tiers tidy up, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._tidy())
            if self._policies.canary_interval_s:
                group.create_task(self._canaries())

    async def _tidy(self) -> None:
        """Have tiers erase the copies that they could not erase before."""
        while True:
            await self._clock.sleep(TIDY_INTERVAL_S)
            for copies in list(self._table.copies):
                await copies.tier.tidy()

    async def _canaries(self) -> None:
        while True:
            for copies in list(self._table.copies):
                if copies.tier.has_room(_LAYOUT):  # a canary never drives out a user's chunk
                    await self.canary(copies.tier)
            await self._clock.sleep(self._policies.canary_interval_s)

    async def canary(self, tier: LocalTier) -> bool:
        """Write a chunk, read it, compare it, remove it. False, with an error in the log, when any of these steps
        fails."""
        header, pieces = _canary_chunk(self._random.bytes(_LAYOUT.body_bytes), self._random.bytes(16))
        found = [np.zeros_like(piece) for piece in pieces[1:]]
        try:
            residency = await tier.write(header, _LAYOUT, pieces)
            try:
                stored = await tier.open(ChunkName(header.storage_key, _LAYOUT), residency)
                try:
                    await stored.read(range(len(_LAYOUT.slabs)), found)
                finally:
                    stored.close()
            finally:
                tier.remove([residency], erase=True)
                await tier.tidy()
            works = all((one == other).all() for one, other in zip(found, pieces[1:], strict=True))
            reason = "" if works else "it gave other bytes back"
        except Exception as error:  # noqa: BLE001 - the boundary: a canary that dies says so, and takes nothing along
            works, reason = False, str(error)
        self._counters.add("canary_passes" if works else "canary_failures")
        if not works:
            _log.error("canary failed", extra={"tier": tier.name, "reason": reason})
        return works


def _canary_chunk(body: bytes, write_id: bytes) -> tuple[ChunkHeader, list[np.ndarray]]:
    slab, digest = np.frombuffer(bytearray(body), np.uint8), b"kvstore canary".ljust(32, b"\0")
    checksums = checksum_strips(slab, _LAYOUT, 0, strip_seeds(digest, _LAYOUT, write_id))
    header = ChunkHeader(
        kind=CacheKind.KV, token_count=_LAYOUT.token_count, namespace=digest, fingerprint=digest, storage_key=digest,
        parent=bytes(32), chain_digest=digest, token_digest=digest, tenant_digest=bytes(16), first_position=0,
        rope_digest=bytes(16), write_id=write_id, checksums=np.frombuffer(checksums, np.uint8).reshape(-1, 16),
    )  # fmt: skip
    return header, [np.frombuffer(bytearray(pack_header(header, _LAYOUT)), np.uint8), slab]
