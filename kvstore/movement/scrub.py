"""Reads again what lies there: slowly all of it, so that rot is found before somebody asks; at once what a crash left,
before a store relies on it. And the canaries, which show that a tier that says nothing still works."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence

import numpy as np

from kvstore.arena import Arena, Placement
from kvstore.catalog import NOWHERE, Catalog
from kvstore.chunk import (
    ChunkHeader,
    ChunkLayout,
    are_right,
    checksum_strips,
    layout_of,
    pack_header,
    parse_header,
    slab_runs,
    strip_seeds,
)
from kvstore.config import PolicySettings
from kvstore.errors import DataLoss
from kvstore.movement.residency import Residency
from kvstore.movement.writeback import Writeback
from kvstore.seams import Clock, Random, Workers
from kvstore.seams.jobs import done
from kvstore.spec import CacheKind, LayerSpec, ModelSpec, RopeSpec
from kvstore.telemetry import Counters
from kvstore.tiers import ChunkName, LocalTier, check_header
from kvstore.tiers.dram import DramTier
from kvstore.tiers.nvme import aligned

IDLE_S = 1.0
ROWS_AT_ONCE = 4096
PROOFS_AT_ONCE = 8
TIDY_INTERVAL_S = 10.0
_CANARY = ModelSpec(
    model_id="kvstore/canary", weights_digest="00" * 32, layers=(LayerSpec(kv_heads=1, k_dim=16, v_dim=16),),
    hidden_size=16, vocab_size=2, cache_dtype="bfloat16", rope=RopeSpec(rotary_dim=16), chunk_tokens=64,
)  # fmt: skip
_log = logging.getLogger("kvstore.scrub")


class Scrub:
    """Verifies every strip of every copy in turn, at policy.scrub_bytes_per_s; 0 leaves it off."""

    def __init__(
        self,
        *,
        arena: Arena,
        catalog: Catalog,
        residency: Residency,
        writeback: Writeback,
        clock: Clock,
        random: Random,
        workers: Workers,
        counters: Counters,
        policies: PolicySettings,
    ) -> None:
        self._arena = arena
        self._catalog = catalog
        self._residency = residency
        self._writeback = writeback
        self._clock = clock
        self._random = random
        self._workers = workers
        self._counters = counters
        self._policies = policies
        self._doubtful: asyncio.Queue[tuple[int, asyncio.Future[None]]] = asyncio.Queue()

    async def run(self) -> None:
        """Go round for ever."""
        async with asyncio.TaskGroup() as group:
            for _ in range(PROOFS_AT_ONCE):
                group.create_task(self._proofs())
            group.create_task(self._tidy())
            if self._policies.scrub_bytes_per_s:
                group.create_task(self._go_round())
            if self._policies.canary_interval_s:
                group.create_task(self._canaries())

    async def _tidy(self) -> None:
        """Have the device erase what it refused to."""
        while True:
            await self._clock.sleep(TIDY_INTERVAL_S)
            nvme = self._residency.nvme
            if nvme is not None and not nvme.erasures.is_tidy:
                await nvme.erasures.tidy()

    # ------------------------------------------------------------ proofs

    async def prove(self, rows: Sequence[int], timeout_s: float) -> None:
        """Have the copies that a crash left checked and made durable, before anything is promised on them.
        Those that fail are gone afterwards; those that the device does not give in time stay what they are."""
        table = self._catalog.table
        doubtful = [row for row in rows if table.residencies[row] != NOWHERE and not table.is_proven(row)]
        if not doubtful:
            return
        futures: list[asyncio.Future[None]] = []
        for row in doubtful:
            future = asyncio.get_running_loop().create_future()
            futures.append(future)
            table.hold(row)
            self._doubtful.put_nowait((row, future))
        late = (await asyncio.wait(futures, timeout=timeout_s))[1]
        for future in late:
            future.cancel()
        if late:
            _log.warning("recovered chunks were not read in time", extra={"chunks": len(late)})

    async def _proofs(self) -> None:
        table = self._catalog.table
        while True:
            row, future = await self._doubtful.get()
            try:
                if not future.done() and not table.is_proven(row):
                    if await self.check_nvme(row, prove=True) is not None:
                        self._counters.add("nvme_proven_chunks")
            finally:
                self._catalog.unhold(row)
                if not future.done():
                    future.set_result(None)

    # ------------------------------------------------------------ rounds

    async def _go_round(self) -> None:
        while True:
            await self._clock.sleep(IDLE_S)
            await self.round()

    async def round(self) -> None:
        """Every copy once."""
        table = self._catalog.table
        for row in list(table.arena):
            if row in table.arena:
                await self._paced(row, self.check_arena(row))
        row = 0
        while row < len(table.digests):
            # A recovered chunk whose model nobody has registered yet cannot be checked: its layout is not known.
            if table.residencies[row] != NOWHERE and self._catalog.space_of(row).model_spec is not None:
                await self._paced(row, self.check_nvme(row))
            elif row % ROWS_AT_ONCE == 0:
                await self._clock.sleep(0)
            row += 1

    async def _paced(self, row: int, check: Awaitable[bool | None]) -> None:
        byte_count = self._residency.name(row).layout.total_bytes
        table = self._catalog.table
        table.hold(row)
        try:
            was_read = await check is not None
        finally:
            self._catalog.unhold(row)
        if was_read:
            self._counters.add("scrubbed_bytes", byte_count)
        await self._clock.sleep(byte_count / self._policies.scrub_bytes_per_s)

    async def check_arena(self, row: int) -> bool | None:
        """Whether memory's copy is what it was; None where nobody could look. One that is not goes; the device's takes
        its place at its next use."""
        table = self._catalog.table
        placement = table.arena[row]
        try:
            intact = await self._is_intact(self._residency.name(row), placement)
        except Exception as error:  # noqa: BLE001 - the boundary: one look that fails ends neither the round nor the service
            _log.warning("scrub could not read", extra={"reason": str(error)})
            return None
        if not intact and table.arena.get(row) is placement:
            self._counters.add("scrub_failures")
            self._residency.quarantine_arena(row)
        return intact

    async def _is_intact(self, name: ChunkName, placement: Placement) -> bool:
        """Whether a chunk's header and every strip are what they should be."""
        layout, (head, *slabs) = name.layout, placement.pieces
        try:
            header = check_header(name, parse_header(head, layout))
        except DataLoss:
            return False
        runs = slab_runs(layout, header.storage_key, header.write_id, range(len(slabs)), slabs)
        return await done(self._workers, are_right, runs, header.checksums.tobytes())

    async def check_nvme(self, row: int, *, prove: bool = False) -> bool | None:
        """Whether the device's copy is what it was; None where nobody could look. One that is not is quarantined, and
        written again from memory."""
        try:
            intact = await (self._residency.prove_nvme(row) if prove else self._residency.check_nvme(row))
        except Exception as error:  # noqa: BLE001 - the boundary: one look that fails ends neither the round nor the service
            _log.warning("scrub could not read", extra={"reason": str(error)})
            return None
        if not intact:
            if not prove:
                self._counters.add("scrub_failures")
            if row in self._catalog.table.arena:
                self._writeback.add(row)
        return intact

    # ------------------------------------------------------------ canaries

    async def _canaries(self) -> None:
        while True:
            tiers: list[LocalTier | None] = [DramTier(self._arena, self._workers), self._residency.nvme]
            for tier in tiers:
                if tier is not None and tier.has_room(_canary_layout()):  # it never drives out a user's chunk
                    await self.canary(tier.name, tier)
            await self._clock.sleep(self._policies.canary_interval_s)

    async def canary(self, name: str, tier: LocalTier) -> bool:
        """Store a chunk, read it, compare it, remove it. False, and said aloud, when that fails."""
        layout = _canary_layout()
        header, pieces = _canary_chunk(layout, self._random.bytes(layout.body_bytes), self._random.bytes(16))
        found = [np.zeros_like(piece) for piece in pieces[1:]]
        try:
            residency = await tier.write(header, layout, pieces)
            try:
                stored = await tier.open(ChunkName(header.storage_key, layout), residency)
                try:
                    await stored.read(range(len(layout.slabs)), found)
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
            _log.error("canary failed", extra={"tier": name, "reason": reason})
        return works


def _canary_layout() -> ChunkLayout:
    return layout_of(_CANARY, CacheKind.KV, _CANARY.chunk_tokens)


def _canary_chunk(layout: ChunkLayout, body: bytes, write_id: bytes) -> tuple[ChunkHeader, list[np.ndarray]]:
    slab = aligned(layout.body_bytes)
    slab[:] = np.frombuffer(body, np.uint8)
    digest = b"kvstore canary".ljust(32, b"\0")
    header = ChunkHeader(
        kind=CacheKind.KV, token_count=layout.token_count, namespace=digest, fingerprint=digest, storage_key=digest,
        parent=bytes(32), chain_digest=digest, token_digest=digest, tenant_digest=bytes(16), first_position=0,
        rope_digest=bytes(16), write_id=write_id, checksums=np.zeros((layout.strip_count, 16), np.uint8),
    )  # fmt: skip
    seeds = strip_seeds(digest, layout, write_id)
    header.checksums[:] = np.frombuffer(checksum_strips(slab, layout, 0, seeds), np.uint8).reshape(-1, 16)
    first = aligned(layout.header_bytes)
    first[:] = np.frombuffer(pack_header(header, layout), np.uint8)
    return header, [first, slab]
