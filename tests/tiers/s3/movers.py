"""A process whose byte movers speak S3: a chunk of thousands of strips, whose header is more than a mover's answer can
carry, goes to a bucket and comes back into the same memory.

    python -m tests.tiers.s3.movers ENDPOINT_URL BUCKET
"""

from __future__ import annotations

import asyncio
import sys

from kvstore_ops.bench.s3 import chunks_in, fetch, store, tier_of

from kvstore.chunk import layout_of
from kvstore.config import S3Settings
from kvstore.seams import MoverProcesses, SystemMemory
from kvstore.seams.movers.child import PACKET_BYTES_MAX
from kvstore.spec import CacheKind, LayerSpec
from tests.specs import small_spec

SPEC = small_spec(layers=(LayerSpec(kv_heads=128, k_dim=8, v_dim=8),) * 40)


async def scenario(movers: MoverProcesses, url: str, bucket: str) -> None:
    """Raises AssertionError, or what the tier raises."""
    layout = layout_of(SPEC, CacheKind.KV, 16)
    assert layout.header_bytes > PACKET_BYTES_MAX
    mapping = SystemMemory(movers).read_only_to_others("test", 2 * layout.total_bytes)
    chunks = chunks_in(mapping.bytes, layout, 2)
    settings = S3Settings(bucket=bucket, prefix="movers", endpoint_url=url, addressing="path")
    tier = tier_of(settings, movers)
    await store(tier, chunks)
    before = mapping.bytes.copy()
    for number in range(2):
        for piece in chunks.pieces(number)[1:]:
            piece[:] = 0xDB
    await fetch(tier, chunks, 1 << 20)
    assert (mapping.bytes == before).all()
    await tier.close()


def main(url: str, bucket: str) -> None:
    """Forks first, as the service does."""
    movers = MoverProcesses(2)
    try:
        asyncio.run(scenario(movers, url, bucket))
        assert "aiobotocore" in sys.modules, "the long headers were read by a thread of this process"
    finally:
        movers.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
