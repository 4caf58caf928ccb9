"""Prompts that nobody has stored yet, and what is stored of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from kvstore_client import Client, ModelSpec

from tests.specs import bits, random_cache, small_spec, tokens_of

SPEC = small_spec()

STEP = SPEC.chunk_tokens

COUNT = 5 * STEP + 7


def left(client: Client) -> int:
    stats = client.stats()
    return stats.sessions.reservation_count + stats.arena.reserved_bytes


def fresh() -> tuple[Any, Any]:
    """Tokens nobody stored yet, and their cache."""
    return tokens_of(COUNT, seed=int(np.random.default_rng().integers(1 << 31))), random_cache(SPEC, COUNT)


def assert_stored(client: Client, tokens: Any, cache: Any, count: int = COUNT, spec: ModelSpec = SPEC) -> None:
    found = client.fetch(spec, tokens, verify=True)
    assert found.token_count == count
    for got, said in zip(found, [layer for layer in cache if layer is not None], strict=True):
        for one, other in zip(got, said, strict=True):
            assert np.array_equal(bits(one), bits(other)[:, :count])
