"""What tests on two nodes with shared tiers have in common: contexts, and what a client says of them."""

from __future__ import annotations

import itertools
import time
from typing import Any, NamedTuple

import numpy as np
from kvstore_client import Client

from kvstore.spec import Durability, MissReason, Tier
from tests.e2e.shared_tiers import Shared, SharingSidecar
from tests.e2e.test_nvme import same
from tests.server.raw import eventually
from tests.specs import random_cache, small_spec, tokens_of

STEP = 512
COUNT = 4 * STEP
SPEC = small_spec(chunk_tokens=STEP)
KEEPS_E = small_spec(model_id="kept", weights_digest="cd" * 32, chunk_tokens=STEP, hidden_size=24, keeps_e=True)
BOUND_S = 8.0
"""No call of these clients takes longer, whatever the tiers do."""
SEEDS = itertools.count(1)
"""Each scene has contexts of its own."""


class Nodes(NamedTuple):
    shared: Shared
    one: SharingSidecar
    two: SharingSidecar


def tokens(seed: int, count: int = COUNT) -> Any:
    return tokens_of(COUNT, seed)[:count]


def cache(seed: int, count: int = COUNT) -> Any:
    return [(k[:, :count], v[:, :count]) for k, v in random_cache(SPEC, COUNT, seed)]


def e_of(seed: int, width: int = SPEC.hidden_size) -> Any:
    return np.random.default_rng(seed).integers(0, 1 << 16, (COUNT, width), dtype=np.uint16)


def quiet(client: Client) -> None:
    """Every tier has what it takes."""
    eventually(lambda: client.stats().backlog_chunk_count == 0)


def give(client: Client, seed: int, count: int = COUNT, **more: Any) -> int:
    """Store, and wait until the shared tiers have it. Returns the seed."""
    assert client.store(SPEC, tokens(seed, count), cache(seed, count), **more).wait(10.0) is Durability.LOCAL
    quiet(client)
    return seed


def given(client: Client, **more: Any) -> int:
    """The seed of a new context that the node and the shared tiers have."""
    return give(client, next(SEEDS), **more)


def places(client: Client, seed: int) -> list[Tier]:
    """Where a lookup says that its leading chunks are."""
    return [each.tier for each in client.lookup(SPEC, tokens(seed)).chunks if each.tier]


def get(client: Client, seed: int) -> tuple[int, MissReason]:
    """How much of a context comes, all of it right, and why no more; within the bound."""
    began_s = time.monotonic()
    fetched = client.fetch(SPEC, tokens(seed))
    assert time.monotonic() - began_s < BOUND_S, "it was waited for"
    assert same(fetched, cache(seed), fetched.token_count)
    return fetched.token_count, fetched.reason


def flood(client: Client, seed: int) -> None:
    """Have the node give a context up for others."""
    for _ in range(40):
        if not {Tier.DRAM, Tier.NVME} & set(places(client, seed)):
            return
        given(client)
    raise AssertionError("it does not go")


WHOLE = (COUNT, MissReason.NONE)
