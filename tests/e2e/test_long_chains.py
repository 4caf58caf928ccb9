"""A real Redis has a chain that is longer than one question to it: another node finds and fetches all of it."""

from __future__ import annotations

import os
from typing import Any

from kvstore_client import connect
from kvstore_ops.sidecar import Sidecar

from kvstore.movement.questions import PROBE_COUNT_MAX
from kvstore.spec import Durability, LayerSpec, MissReason, Tier
from tests.e2e.test_nvme import same
from tests.fakes.redis_server import RedisServer
from tests.server.raw import eventually
from tests.specs import random_cache, small_spec, tokens_of

SPEC = small_spec(layers=(LayerSpec(kv_heads=1, k_dim=8, v_dim=8),), chunk_tokens=16)
COUNT = 16 * (3 * PROBE_COUNT_MAX - 72)
"""3,000 chunks."""


def node(server: RedisServer) -> Sidecar:
    """The bound is generous: a slow machine is no reason to find less here."""
    own = {"TIERS__REDIS__URL": server.url, "TIERS__REDIS__LOOKUP_S_MAX": "4 s", "CONTROLLER__DEADLINE_S": "20"}
    environment = {**os.environ, **{f"KVSTORE__{name}": value for name, value in own.items()}}
    return Sidecar("--capacity", "64 MiB", environment=environment)


def test_a_chain_of_three_thousand_chunks_is_found_by_another_node() -> None:
    tokens: Any = tokens_of(COUNT)
    kv = random_cache(SPEC, COUNT)
    with RedisServer() as server, node(server) as one, node(server) as two:
        with connect(one.address, timeout_s=60.0) as client:
            assert client.store(SPEC, tokens, kv).wait(60.0) is Durability.MEMORY
            eventually(lambda: client.stats().backlog_chunk_count == 0, 120.0)
        with connect(two.address, timeout_s=60.0) as client:
            found = client.lookup(SPEC, tokens)
            assert found.prefix_token_count == COUNT
            assert {each.tier for each in found.chunks} == {Tier.REDIS}
            fetched = client.fetch(SPEC, tokens)
            assert (fetched.token_count, fetched.reason) == (COUNT, MissReason.NONE)
            assert same(fetched, kv, COUNT)
