"""Two real servers and the objects that they share: what one stored the other has, and what the engine does wrong costs
misses, no wrong bytes and no service."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from kvstore_client import Client, connect

from kvstore.spec import Durability, MissReason, Tier
from tests.e2e.test_third_tier import COUNT, SPEC, assert_right, places, store, tokens
from tests.e2e.third_tier import ThirdTierSidecar
from tests.fakes import ObjectSettings, ObjectTier, Switch
from tests.server.raw import eventually


class Nodes:
    """``one`` stores, ``other`` has nothing of its own but its NVMe; ``engine``: a third way to what they share."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.settings = ObjectSettings(directory=directory, switches=directory.with_suffix(".switches"))
        servers = [stack.enter_context(ThirdTierSidecar("nvme", objects=directory)) for _ in range(2)]
        self.one, self.other = (stack.enter_context(connect(each.address)) for each in servers)
        self.engine = ObjectTier(self.settings)

    def put(self, seed: int) -> None:
        """The one node stores, and the objects have it."""
        before = self.engine.statistics().chunk_count
        assert store(self.one, seed).wait(10.0) is Durability.LOCAL
        eventually(lambda: self.engine.statistics().chunk_count == before + COUNT // SPEC.chunk_tokens)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(tmp_path_factory.mktemp("shared") / "objects", stack)


def assert_missed(client: Client, seed: int) -> None:
    fetched = client.fetch(SPEC, tokens(seed))
    assert fetched.token_count == 0
    assert fetched.reason is not MissReason.NONE


def test_what_one_node_stored_the_other_has(nodes: Nodes) -> None:
    nodes.put(0)
    assert set(places(nodes.other, 0)) == {Tier.S3}
    assert_right(nodes.other, 0)
    assert set(places(nodes.other, 0)) == {Tier.DRAM}
    stats = nodes.other.stats()
    assert [tier.name for tier in stats.tiers] == ["nvme", "s3"]
    assert (stats.counters["s3_asked_chunks"], stats.tier_problem) == (4, "")


def test_what_comes_back_wrong_is_a_miss(nodes: Nodes) -> None:
    nodes.put(1)
    nodes.engine.switches.turn_on(Switch.CORRUPT)
    assert_missed(nodes.other, 1)
    nodes.engine.switches.turn_off()
    assert_right(nodes.one, 1)


def test_what_the_engine_dropped_is_a_miss(nodes: Nodes) -> None:
    nodes.put(2)
    nodes.engine.drop_all()
    assert_missed(nodes.other, 2)
    assert_right(nodes.one, 2)


@pytest.mark.parametrize("switch", [Switch.AWAY, Switch.STALLED])
def test_while_the_engine_does_not_answer_each_node_has_its_own(nodes: Nodes, switch: Switch) -> None:
    seed = 3 + [Switch.AWAY, Switch.STALLED].index(switch)
    nodes.put(seed)
    nodes.engine.switches.turn_on(switch)
    assert_missed(nodes.other, seed)
    assert_right(nodes.one, seed)
    nodes.engine.switches.turn_off()
    eventually(lambda: nodes.other.fetch(SPEC, tokens(seed)).token_count == COUNT, 20.0)
    assert_right(nodes.other, seed)
