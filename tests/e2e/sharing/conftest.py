"""The two nodes, and a client of each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kvstore_client import Client, connect

from tests.e2e.shared_tiers import Shared, SharingSidecar
from tests.e2e.sharing.scenes import Nodes
from tests.server.raw import eventually


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    shared = Shared(tmp_path_factory.mktemp("shared"))
    with SharingSidecar(shared) as one, SharingSidecar(shared) as two:
        yield Nodes(shared, one, two)


@pytest.fixture
def shared(nodes: Nodes) -> Iterator[Shared]:
    """Every test leaves the tiers well, and asked by both nodes."""
    yield nodes.shared
    nodes.shared.turn_off()
    for node in (nodes.one, nodes.two):
        with connect(node.socket_address) as client:
            eventually(lambda client=client: {tier.state for tier in client.stats().tiers} == {"up"})


@pytest.fixture
def one(nodes: Nodes, shared: Shared) -> Iterator[Client]:
    with connect(nodes.one.socket_address) as client:
        yield client


@pytest.fixture
def two(nodes: Nodes, shared: Shared) -> Iterator[Client]:
    with connect(nodes.two.socket_address) as client:
        yield client
