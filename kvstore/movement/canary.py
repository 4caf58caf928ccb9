"""Canaries: small chunks of our own that are written, read and removed in each tier, so that a tier that fails silently
is noticed. This module also calls ``tidy`` of each tier at intervals, and asks shared tiers that say that they fail."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import numpy as np

from kvstore.catalog import ChunkTable, Copies
from kvstore.chunk import ChunkHeader, checksum_strips, layout_of, pack_header, strip_seeds
from kvstore.config import PolicySettings
from kvstore.errors import DataLoss, Exhausted, PermissionDenied, Unavailable
from kvstore.movement.shared import SharedCopies
from kvstore.seams import Clock, Random
from kvstore.spec import CacheKind, LayerSpec, ModelSpec, RopeSpec
from kvstore.telemetry import Counters
from kvstore.tiers import ChunkName, LocalTier, StoredChunk, WritePolicy

TIDY_INTERVAL_S = 10.0
SHARED_EVERY = 10
"""A shared tier is sent one canary in the time of so many of the node's own: each request there may be paid for."""
ASK_INTERVAL_S = 2.0
"""A shared tier that says that it fails is asked so often whether it still does: an idle node asks it nothing else. The
tier makes no request of this more often than of lookups."""
SHARED_S_MAX = 30.0
"""A canary that takes more seconds in a shared tier has failed."""
_CANARY = ModelSpec(
    model_id="kvstore/canary", weights_digest="00" * 32, layers=(LayerSpec(kv_heads=1, k_dim=16, v_dim=16),),
    hidden_size=16, vocab_size=2, cache_dtype="bfloat16", rope=RopeSpec(rotary_dim=16), chunk_tokens=64,
)  # fmt: skip
_LAYOUT = layout_of(_CANARY, CacheKind.KV, _CANARY.chunk_tokens)
_NAME = b"kvstore canary".ljust(32, b"\0")
_Canary = tuple[ChunkHeader, list[np.ndarray]]
"""A chunk that no model has: its header, and its pieces in memory."""
AnyTier = TypeVar("AnyTier", Copies, SharedCopies)
_log = logging.getLogger("kvstore.movement")


class Canaries:
    """Sends a canary through each local tier every policy.canary_interval_s seconds, and through each shared tier in
    ``SHARED_EVERY`` times as many; 0 sends none."""

    def __init__(
        self, table: ChunkTable, shared: Sequence[SharedCopies], clock: Clock, random: Random, counters: Counters,
        policies: PolicySettings,
    ) -> None:  # fmt: skip
        self._table = table
        self._shared = shared
        self._clock = clock
        self._random = random
        self._counters = counters
        self._policies = policies
        self._left: dict[str, bytes] = {}
        """By shared tier, the key of a canary that it did not remove."""
        self._unsure: dict[str, _Canary] = {}
        """By shared tier, a canary that failed to be written, and may be there all the same, or come there yet."""

    async def run(self) -> None:
        """Send canaries, and have tiers tidy up, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._every(TIDY_INTERVAL_S, self._table.copies, _tidied))
            if self._shared:
                group.create_task(self._every(ASK_INTERVAL_S, self._shared, self.ask_if_failing))
            if interval_s := self._policies.canary_interval_s:
                group.create_task(self._canaries(interval_s))
                group.create_task(self._every(SHARED_EVERY * interval_s, self._shared, self.shared_canary))

    async def _every(
        self, interval_s: float, tiers: Sequence[AnyTier], act: Callable[[AnyTier], Awaitable[object]]
    ) -> None:
        while True:
            await self._clock.sleep(interval_s)
            for tier in list(tiers):
                await act(tier)

    async def _canaries(self, interval_s: float) -> None:
        while True:
            for copies in list(self._table.copies):
                if copies.tier.has_room(_LAYOUT):  # a canary never drives out a user's chunk
                    await self.canary(copies.tier)
            await self._clock.sleep(interval_s)

    async def ask_if_failing(self, shared: SharedCopies) -> None:
        """Ask a shared tier that says that it fails for a chunk that no node has. Its state changes with an answer, and
        a node without requests would show for ever what was so once."""
        if shared.is_asked and shared.statistics().state == "failing":
            await shared.ask([self._random.bytes(32)], ASK_INTERVAL_S)

    async def shared_canary(self, shared: SharedCopies) -> bool | None:
        """Write a chunk to a shared tier, read it, compare it, remove it. None: the tier is not asked now, this node
        does not write there, a limit is reached, or the canary before could not be removed. False, with an
        error in the log, when any of these steps fails."""
        if shared.write_policy is WritePolicy.NEVER or not shared.is_asked:
            return None
        if shared.tier.statistics().state != "up":
            return None
        try:
            async with asyncio.timeout(SHARED_S_MAX):
                left = self._left.get(shared.tier.name)
                if left is not None and not await self._has_removed(shared, left):
                    return None
                await self._through(shared)
        except (Exhausted, PermissionDenied):
            return None
        except DataLoss as error:  # it answers: a read of a chunk would find out the same
            return self._tell(shared.tier.name, error.message)
        except Exception as error:  # noqa: BLE001 - the boundary: a canary that dies says so, and takes nothing along
            reason = str(error) or type(error).__name__
            shared.breaker.failed(reason)
            return self._tell(shared.tier.name, reason)
        shared.worked()
        return self._tell(shared.tier.name, "")

    async def _has_removed(self, shared: SharedCopies, key: bytes) -> bool:
        """Remove a canary. False: it stays there, as where this node may not delete. No other one is sent before it is
        gone, because they would pile up."""
        try:
            await shared.tier.remove([key])
        except (Unavailable, PermissionDenied) as error:
            if shared.tier.name not in self._left:
                _log.warning("a canary stays", extra={"tier": shared.tier.name, "reason": error.message})
            self._left[shared.tier.name] = key
            return False
        self._left.pop(shared.tier.name, None)
        return True

    async def _through(self, shared: SharedCopies) -> None:
        """Raises DataLoss when the tier gives other bytes back, or none."""
        canary = self._unsure.pop(shared.tier.name, None)
        canary = canary or _fresh(self._random, self._random.bytes(32))  # no other node's key
        header, pieces = canary
        try:
            await shared.tier.write(header, _LAYOUT, pieces)
        except BaseException:
            self._unsure[shared.tier.name] = canary  # sent again should it not go now: S3 takes no other bytes there
            with suppress(Unavailable, PermissionDenied):
                await shared.tier.remove([header.storage_key])
            raise
        try:
            stored = await shared.tier.open(ChunkName(header.storage_key, _LAYOUT))
            if stored is None:
                raise DataLoss("it does not have what it took")
            await _compare(stored, pieces)
        finally:
            await self._has_removed(shared, header.storage_key)

    async def canary(self, tier: LocalTier) -> bool:
        """Write a chunk, read it, compare it, remove it. False, with an error in the log, when any of these steps
        fails."""
        header, pieces = _fresh(self._random, _NAME)
        reason = ""
        try:
            residency = await tier.write(header, _LAYOUT, pieces)
            try:
                await _compare(await tier.open(ChunkName(header.storage_key, _LAYOUT), residency), pieces)
            finally:
                tier.remove([residency], erase=True)
                await tier.tidy()
        except Exception as error:  # noqa: BLE001 - the boundary: a canary that dies says so, and takes nothing along
            reason = str(error) or type(error).__name__
        return self._tell(tier.name, reason)

    def _tell(self, tier: str, reason: str) -> bool:
        """Count a canary, and log it where it failed. ``reason``: why; empty: it did not. Returns True when it did
        not."""
        self._counters.add("canary_failures" if reason else "canary_passes")
        if reason:
            _log.error("canary failed", extra={"tier": tier, "reason": reason})
        return not reason


async def _tidied(copies: Copies) -> None:
    """Have a tier erase the copies that it could not erase before."""
    await copies.tier.tidy()


async def _compare(stored: StoredChunk, pieces: Sequence[np.ndarray]) -> None:
    """Read an opened canary, and close it. Raises DataLoss when it has other bytes than were written."""
    found = [np.zeros_like(piece) for piece in pieces[1:]]
    try:
        await stored.read(range(len(_LAYOUT.slabs)), found)
    finally:
        stored.close()
    if not all((one == other).all() for one, other in zip(found, pieces[1:], strict=True)):
        raise DataLoss("it gave other bytes back")


def _fresh(random: Random, storage_key: bytes) -> _Canary:
    slab, digest = np.frombuffer(bytearray(random.bytes(_LAYOUT.body_bytes)), np.uint8), _NAME
    write_id = random.bytes(16)
    checksums = checksum_strips(slab, _LAYOUT, 0, strip_seeds(storage_key, _LAYOUT, write_id))
    header = ChunkHeader(
        kind=CacheKind.KV, token_count=_LAYOUT.token_count, namespace=digest, fingerprint=digest,
        storage_key=storage_key,
        parent=bytes(32), chain_digest=digest, token_digest=digest, tenant_digest=bytes(16), first_position=0,
        rope_digest=bytes(16), write_id=write_id, checksums=np.frombuffer(checksums, np.uint8).reshape(-1, 16),
    )  # fmt: skip
    return header, [np.frombuffer(bytearray(pack_header(header, _LAYOUT)), np.uint8), slab]
