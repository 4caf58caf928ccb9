"""What a shared tier says or gives wrong costs misses, and no wrong bytes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kvstore_client import Client, connect

from kvstore.errors import DataLoss
from kvstore.keys import chain_digests, fingerprint, storage_keys
from kvstore.seams import TenantKeys
from kvstore.spec import Durability, Exactness, MissReason, Provenance, Tier
from tests.e2e.shared_tiers import KINDS, Shared
from tests.e2e.sharing.scenes import (
    COUNT,
    SEEDS,
    SPEC,
    STEP,
    WHOLE,
    Nodes,
    cache,
    flood,
    get,
    given,
    places,
    quiet,
    tokens,
)
from tests.fakes import Switch
from tests.server.raw import eventually


@pytest.mark.parametrize("switch", [Switch.CORRUPT, Switch.GARBLED])
def test_what_comes_back_wrong_is_a_miss(one: Client, two: Client, shared: Shared, switch: Switch) -> None:
    seed = given(one)
    for name in KINDS:
        shared.switches(name).turn_on(switch)
    assert get(two, seed) == (0, MissReason.CORRUPT)
    stream = two.fetch_layers(SPEC, tokens(given(one)))
    with pytest.raises(DataLoss):
        list(stream)


def test_what_is_damaged_is_a_shorter_prefix_until_it_is_stored_again(one: Client, two: Client, shared: Shared) -> None:
    seed, there = given_at(one, shared)
    spoil(there["redis"][2])
    assert get(two, seed) == (2 * STEP, MissReason.CORRUPT)
    assert two.store(SPEC, tokens(seed), cache(seed)).wait(10.0) is Durability.LOCAL
    quiet(two)
    flood(two, seed)
    shared.drop_all("s3")
    assert get(two, seed) == WHOLE


def given_at(client: Client, shared: Shared) -> tuple[int, dict[str, list[Path]]]:
    """The seed of a new context that the node and the shared tiers have, and where each of its chunks lies, by the
    tiers' names. By the chunks' own names: the other node may be writing chunks of an earlier test there."""
    seed = given(client)
    keys = storage_keys(
        TenantKeys().secret, fingerprint(SPEC, SPEC.kind), Provenance.IN_CONTEXT, Exactness.EXACT,
        chain_digests(tokens(seed), STEP),
    )  # fmt: skip
    return seed, {name: [shared.directory / name / key.hex() for key in keys] for name in KINDS}


def spoil(path: Path) -> None:
    """A bit of its last byte flips."""
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


@pytest.mark.parametrize("plane", ["local", "remote"])
def test_a_hint_that_turns_out_wrong_midway_is_a_shorter_prefix(
    nodes: Nodes, one: Client, shared: Shared, plane: str
) -> None:
    with connect(nodes.two.address if plane == "remote" else nodes.two.socket_address) as client:
        contexts = [given_at(one, shared) for _ in range(2)]
        for each, _ in contexts:
            assert places(client, each) == [Tier.REDIS] * 4
        for _, there in contexts:
            for name in KINDS:
                there[name][2].unlink()
        seed, layered = (each for each, _ in contexts)
        assert get(client, seed) == (2 * STEP, MissReason.EVICTED)
        assert get(client, seed) == (2 * STEP, MissReason.COLD)
        stream = client.fetch_layers(SPEC, tokens(layered))
        assert stream.token_count == COUNT
        with pytest.raises(DataLoss):
            list(stream)
        assert stream.good_token_count == 2 * STEP
        assert get(client, layered)[0] == 2 * STEP
        eventually(lambda: client.stats().sessions.lease_count == 0)


def test_an_engine_that_drops_everything_costs_misses(one: Client, two: Client, shared: Shared) -> None:
    seed = given(one)
    assert places(two, seed) == [Tier.REDIS] * 4
    shared.drop_all(*KINDS)
    assert get(two, seed) == (0, MissReason.EVICTED)
    assert places(two, seed) == []
    assert get(one, seed) == WHOLE, "the node has its own"
    assert two.store(SPEC, tokens(seed), cache(seed)).wait(10.0) is Durability.LOCAL
    quiet(two)
    flood(two, seed)
    assert get(two, seed) == WHOLE


def test_hints_that_lie_cost_a_read(one: Client, two: Client, shared: Shared) -> None:
    seed, nowhere = given(one), next(SEEDS)
    for name in KINDS:
        shared.switches(name).turn_on(Switch.LYING)
    assert get(two, seed) == (0, MissReason.COLD)
    for kind in KINDS.values():
        assert places(two, nowhere) == [kind] * 4
        assert get(two, nowhere) == (0, MissReason.EVICTED)
    assert places(two, nowhere) == []
