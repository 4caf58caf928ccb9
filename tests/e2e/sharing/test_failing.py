"""A shared tier that stalls, fails or is full costs misses, and no service."""

from __future__ import annotations

import io
import json
import os
import re
import time
import urllib.request
from typing import Any

import numpy as np
import pytest
from kvstore_client import Client, connect
from kvstore_ops.status import render
from rich.console import Console

from kvstore.errors import KVStoreError
from kvstore.spec import Durability, MissReason, Tier
from tests.e2e.shared_tiers import CAPACITY_BYTES, KINDS, LOOKUP_S, Shared, SharingSidecar
from tests.e2e.sharing.scenes import (
    BOUND_S,
    COUNT,
    SEEDS,
    SPEC,
    STEP,
    WHOLE,
    Nodes,
    cache,
    get,
    give,
    given,
    places,
    tokens,
)
from tests.e2e.test_nvme import same
from tests.fakes import Switch
from tests.server.raw import eventually


def test_while_tiers_stall_clients_have_their_answers(one: Client, two: Client, shared: Shared) -> None:
    seed, fresh = given(one), next(SEEDS)
    assert places(two, seed) == [Tier.REDIS] * 4
    for name in KINDS:
        shared.switches(name).turn_on(Switch.STALLED)
    assert get(two, seed) == (0, MissReason.UNAVAILABLE)
    assert two.store(SPEC, tokens(fresh), cache(fresh)).wait(10.0) is Durability.LOCAL
    assert get(two, fresh) == WHOLE
    began_s = time.monotonic()
    assert places(two, next(SEEDS)) == []
    assert time.monotonic() - began_s < BOUND_S
    eventually(lambda: [tier.state for tier in two.stats().tiers] == ["up", "failing", "failing"])
    transfer = two.start_fetch_prefix(SPEC, tokens(fresh))
    assert transfer.cancel(BOUND_S)
    shared.turn_off()
    eventually(lambda: get(two, seed) == WHOLE, 10.0)
    eventually(lambda: two.stats().loading_bytes == 0)


def test_a_client_in_a_hurry_gets_what_the_node_has(nodes: Nodes, one: Client, two: Client, shared: Shared) -> None:
    """It waits for less than lookups may wait for a shared tier. Both stand still: the second is asked as soon as the
    first has been silent for long."""
    seed = given(one)
    assert two.store(SPEC, tokens(seed, STEP), cache(seed, STEP)).wait(10.0) is Durability.LOCAL
    for name in ("redis", "s3"):
        shared.switches(name).turn_on(Switch.STALLED)
    for address in (nodes.two.socket_address, nodes.two.address):
        with connect(address, timeout_s=LOOKUP_S / 2) as client:
            assert get(client, seed)[0] == STEP
            assert places(client, seed) == [Tier.DRAM]


def drawn(stats: Any) -> str:
    """As ``kvstore status`` has it."""
    page = io.StringIO()
    Console(file=page).print(render(stats))
    return page.getvalue()


def metrics(node: SharingSidecar) -> str:
    log = [json.loads(line) for line in (node.directory / "log").read_text().splitlines()]
    url = [line["metrics"] for line in log if line["message"] == "ready"][-1]
    with urllib.request.urlopen(url, timeout=10) as page:
        return str(page.read().decode())


def page_of(node: SharingSidecar, name: str) -> dict[str, float]:
    """What the metrics page says of each tier."""
    rows = re.findall(rf'^kvstore_{name}\{{tier="(\w+)"\}} (\S+)$', metrics(node), re.MULTILINE)
    return {tier: float(value) for tier, value in rows}


def test_an_outage_is_gone_without_and_ends_by_itself(nodes: Nodes, one: Client, two: Client, shared: Shared) -> None:
    seed, fresh = given(one), next(SEEDS)
    for name in KINDS:
        shared.switches(name).turn_on(Switch.AWAY)
    for _ in range(4):
        assert places(two, next(SEEDS)) == []
    assert get(two, seed)[0] == 0
    assert two.store(SPEC, tokens(fresh), cache(fresh)).wait(10.0) is Durability.LOCAL
    assert get(two, fresh) == WHOLE
    stats = two.stats()
    assert [tier.state for tier in stats.tiers] == ["up", "failing", "failing"]
    assert "redis (failing, shared)" in drawn(stats)
    assert page_of(nodes.two, "tier_up") == {"nvme": 1.0, "redis": 0.0, "s3": 0.0}
    assert "tiers.redis: the fake is away" in stats.tier_problem
    shared.turn_off()
    eventually(lambda: get(two, seed) == WHOLE, 10.0)
    eventually(lambda: [tier.state for tier in two.stats().tiers] == ["up"] * 3, 10.0)
    eventually(lambda: places(one, fresh) == [Tier.REDIS] * 4, 20.0)
    eventually(lambda: two.stats().tier_problem == "", 20.0)  # it took other chunks of that time first


def test_while_an_engine_is_full_stores_reach_the_node(one: Client, two: Client, shared: Shared) -> None:
    for name in KINDS:
        full = shared.settings(name).directory / "full"
        full.touch()
        os.truncate(full, CAPACITY_BYTES)
    seed = next(SEEDS)
    assert one.store(SPEC, tokens(seed), cache(seed)).wait(10.0) is Durability.LOCAL
    eventually(lambda: one.stats().counters["s3_refused_chunks"] >= 4)
    assert "tiers.s3: the engine of tiers.s3 is full" in one.stats().tier_problem
    assert get(one, seed) == WHOLE
    assert places(two, seed) == []
    for name in KINDS:
        (shared.settings(name).directory / "full").unlink()


def test_a_store_of_what_others_have_is_joined_and_goes_on(one: Client, two: Client) -> None:
    """Partial chunks and what follows the hinted chunks are the node's own."""
    seed = next(SEEDS)
    give(one, seed, 2 * STEP)
    writer = two.start_store(SPEC, tokens(seed))
    into = [tuple(np.zeros_like(each) for each in pair) for pair in cache(seed)]
    transfer = two.start_fetch(writer.ticket, into=into)
    for layer, pair in enumerate(cache(seed)):
        writer.put_layer(layer, pair)
    assert writer.commit().wait(10.0) is Durability.LOCAL
    transfer.wait(10.0)
    assert same(into, cache(seed), COUNT)
    seed = next(SEEDS)
    give(one, seed, 2 * STEP)
    assert get(two, seed)[0] == 2 * STEP
    count = 2 * STEP + 100
    assert two.store(SPEC, tokens(seed, count), cache(seed, count)).wait(10.0) is Durability.LOCAL
    assert two.lookup(SPEC, tokens(seed)).prefix_token_count == count
    assert get(two, seed)[0] == count
    assert get(one, seed)[0] == 2 * STEP, "partial chunks stay on their node"


def test_a_fetch_that_is_given_up_leaves_nothing(one: Client, two: Client, shared: Shared) -> None:
    seed = given(one)
    assert places(two, seed) == [Tier.REDIS] * 4
    shared.switches("redis").turn_on(Switch.STALLED)
    transfer = two.start_fetch_prefix(SPEC, tokens(seed))
    began_s = time.monotonic()
    assert transfer.cancel(BOUND_S)
    assert time.monotonic() - began_s < BOUND_S
    with pytest.raises(KVStoreError):
        transfer.wait(1.0)
    shared.turn_off()
    eventually(lambda: (two.stats().sessions.lease_count, two.stats().loading_bytes) == (0, 0))
    eventually(lambda: get(two, seed) == WHOLE, 10.0)


def test_operators_see_their_rows(nodes: Nodes, one: Client) -> None:
    given(one)
    stats = one.stats()
    assert [(tier.name, tier.state) for tier in stats.tiers] == [("nvme", "up"), ("redis", "up"), ("s3", "up")]
    assert stats.tier_problem == ""
    assert [tier.is_shared for tier in stats.tiers] == [False, True, True]
    assert all(f"{tier.name} (up" in drawn(stats) for tier in stats.tiers)
    assert set(page_of(nodes.one, "tier_chunk_count")) == {"nvme"}, "a shared engine's keys may be others than chunks"
    assert page_of(nodes.one, "tier_up") == {"nvme": 1.0, "redis": 1.0, "s3": 1.0}
    for name in ("written_chunks", "refused_chunks", "asked_chunks", "late_answers"):
        assert f"kvstore_redis_{name}_total" in metrics(nodes.one)
