"""What fetches of several parts count: KV and E of a chunk come from tiers together, or not at all."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from kvstore_client import Client, connect
from kvstore_ops.sidecar import Sidecar

from kvstore.spec import Durability, LayerSpec, RopeSpec
from tests.specs import random_cache, small_spec, tokens_of

STEP, COUNT, PARTS = 256, 8, 3
SPEC = small_spec(
    model_id="parts", layers=(LayerSpec(kv_heads=2, k_dim=64, v_dim=64),) * 4, hidden_size=1024, chunk_tokens=STEP,
    rope=RopeSpec(rotary_dim=64),
)  # fmt: skip
TOKENS = tokens_of(STEP * COUNT, 1)


def of_capacity(capacity: str) -> dict[str, str]:
    return {**os.environ, "KVSTORE__ARENA__CAPACITY_BYTES": capacity}


def store(client: Client) -> None:
    """Chunk by chunk: memory has room for few of them."""
    cache = random_cache(SPEC, STEP * COUNT, 1)
    hidden: Any = np.random.default_rng(5).integers(0, 1 << 16, (STEP * COUNT, 1024), dtype=np.uint16)
    for stop in range(STEP, STEP * COUNT + 1, STEP):
        kv = [(k[:, :stop], v[:, :stop]) for k, v in cache]
        receipt = client.store(SPEC, TOKENS[:stop], kv, hidden=dict.fromkeys(range(PARTS), hidden[:stop]))
        assert receipt.wait(20.0) is Durability.LOCAL, receipt.reason


def test_a_chunk_of_which_memory_has_room_for_some_parts_counts_for_nothing() -> None:
    """The parts that begin to come all the same are not the fetch's: their number went below zero, and statistics with
    it."""
    with Sidecar(nvme="128 MiB", environment=of_capacity("64 MiB")) as sidecar:
        with connect(sidecar.address) as client:
            store(client)
        for capacity in ("5 MiB", "6 MiB"):
            sidecar.stop()
            sidecar.environment = of_capacity(capacity)
            sidecar.start()
            with connect(sidecar.address) as client:
                fetched = client.fetch(SPEC, TOKENS, hidden_layers=range(PARTS))
                counts = client.stats().counters
            count = fetched.token_count // STEP
            assert 0 < count < COUNT
            assert counts["fetched_kv_chunks"] == counts["fetch_hit_chunks"] == count
            assert counts["fetched_e_chunks"] == PARTS * count
            assert counts["nvme_fetched_chunks"] == (1 + PARTS) * count
            assert counts["fetched_chunks"] == 0
