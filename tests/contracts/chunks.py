"""Chunks to put into tiers: any kind, geometry and size, every byte drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from blake3 import blake3
from kvstore_client.opaque.value import namespace_spec

from kvstore.chunk import ChunkHeader, ChunkLayout, checksum_strips, layout_of, pack_header, strip_seeds, write_mark
from kvstore.errors import DataLoss
from kvstore.seams.memory import Bytes
from kvstore.spec import CacheKind, LayerSpec
from kvstore.tiers import ChunkName, LocalTier, Residency
from kvstore.tiers.nvme import aligned
from tests.specs import odd_spec, small_spec

SMALL = layout_of(small_spec(), CacheKind.KV, 16)
"""Three pages: a header and two slabs."""
VALUE = layout_of(replace(namespace_spec("notes"), chunk_tokens=4), CacheKind.OPAQUE, 4)
"""Bytes under a key, which may be replaced."""
LARGE = layout_of(small_spec(chunk_tokens=2048), CacheKind.KV, 2048)
"""More than twenty small ones."""


def layouts() -> dict[str, ChunkLayout]:
    """Kinds and geometries that differ in all that a tier could trip over."""
    wide = small_spec(
        layers=(LayerSpec(kv_heads=96, k_dim=8, v_dim=8),) * 3, chunk_tokens=2
    )  # a header of more than a page
    return {
        "kv": SMALL,
        "kv tail": layout_of(small_spec(), CacheKind.KV, 3),
        "kv float32": layout_of(odd_spec("float32", 3, 24, 8, 48), CacheKind.KV, 48),
        "kv many heads": layout_of(wide, CacheKind.KV, 2),
        "mla float8": layout_of(odd_spec("float8_e4m3fn", 1, 48, 16, 160, mla=True), CacheKind.MLA, 160),
        "hidden": layout_of(small_spec(chunk_tokens=100), CacheKind.E, 100, 1),
    }


@dataclass(eq=False)
class Chunk:
    """A raw chunk as an arena holds it: header piece and slabs."""

    layout: ChunkLayout
    header: ChunkHeader
    pieces: list[Bytes]

    @property
    def name(self) -> ChunkName:
        return ChunkName(self.header.storage_key, self.layout, write_mark(self.header.write_id))

    @property
    def any_write(self) -> ChunkName:
        return ChunkName(self.header.storage_key, self.layout)


def chunk(
    number: int = 0, layout: ChunkLayout = SMALL, *, write: int = 0, is_noise: bool = False, **changes: Any
) -> Chunk:
    """The chunk of a number: its name follows from the number alone, its bytes from number and ``write``.
    ``is_noise``: no encoding makes it smaller."""
    key = blake3(b"chunk %d" % number).digest()
    random = np.random.default_rng((number, write))
    fields: dict[str, Any] = {
        "kind": layout.kind, "e_layer": layout.slabs[0].layer if layout.kind is CacheKind.E else -1,
        "token_count": layout.token_count, "namespace": bytes(32), "fingerprint": bytes(32), "storage_key": key,
        "parent": bytes(32), "chain_digest": key, "token_digest": key, "tenant_digest": bytes(16),
        "first_position": 0, "rope_digest": bytes(16), "write_id": random.bytes(16),
        "checksums": np.zeros((layout.strip_count, 16), np.uint8),
    }  # fmt: skip
    header = ChunkHeader(**{**fields, **changes})
    seeds = strip_seeds(header.storage_key, layout, header.write_id)
    memory = aligned(layout.total_bytes)
    memory[:] = 0
    body = memory[layout.header_bytes :]
    for offset, length in zip(layout.strip_offsets.tolist(), layout.strip_lengths.tolist(), strict=True):
        # Half noise, half repetition: something to compress, and something that does not.
        strip = body[offset : offset + length]
        strip[:] = np.frombuffer(random.bytes(length), np.uint8)
        if not is_noise:
            strip[: length // 2] = number % 251
    pieces, place = [memory[: layout.header_bytes]], layout.header_bytes
    for index, slab in enumerate(layout.slabs):
        pieces.append(memory[place : place + slab.byte_count])
        row = checksum_strips(pieces[-1], layout, index, seeds)
        first = slab.strip_first
        header.checksums[first : first + slab.strip_count] = np.frombuffer(row, np.uint8).reshape(-1, 16)
        place += slab.byte_count
    pieces[0][:] = np.frombuffer(pack_header(header, layout), np.uint8)
    return Chunk(layout, header, pieces)


async def write(tier: LocalTier, what: Chunk) -> Residency:
    return await tier.write(what.header, what.layout, what.pieces)


async def read(tier: LocalTier, name: ChunkName, residency: Residency, slabs: range | None = None) -> list[Bytes]:
    """Raw slabs, into memory that held something else."""
    chosen = range(len(name.layout.slabs)) if slabs is None else slabs
    target = [np.full(name.layout.slabs[slab].byte_count, 0x5A, np.uint8) for slab in chosen]
    stored = await tier.open(name, residency)
    try:
        await stored.read(chosen, target)
    finally:
        stored.close()
    return target


async def holds(tier: LocalTier, what: Chunk, residency: Residency) -> bool:
    """Return True when the tier gives exactly this chunk; False when it says that it is lost. Other bytes fail the
    test."""
    try:
        found = await read(tier, what.name, residency)
    except DataLoss:
        return False
    for one, other in zip(found, what.pieces[1:], strict=True):
        assert (one == other).all(), "a tier gave bytes that are not the chunk's"
    return True


def balance(tier: LocalTier) -> None:
    """The account is right, whatever happened before."""
    now = tier.statistics()
    parts = (now.allocated_bytes, now.free_bytes, now.quarantined_bytes, now.overhead_bytes)
    assert min(parts) >= 0, now
    assert now.file_bytes == sum(parts), now
    assert now.file_bytes <= now.capacity_bytes, now
    assert now.chunk_count >= 0, now
