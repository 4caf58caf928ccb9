"""Chains that are longer than one question to a shared tier: all of it is asked for, as far as there is time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.controller import ChainQuery, LookupResult
from kvstore.movement.questions import PROBE_COUNT_MAX
from kvstore.spec import ChunkState, MissReason
from tests.fakes import EngineTier
from tests.fakes.engine import EngineSettings
from tests.tiers.shared.world import LOOKUP_S, Node, run

COUNT = 3000


class CountedTier(EngineTier):
    """Takes ``answer_s`` for each answer, and counts the keys of each question."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self.answer_s = 0.0
        self.asked: list[int] = []

    async def probe(
        self, storage_keys: Sequence[bytes], timeout_s: float, chains: Sequence[int] = ()
    ) -> Sequence[bool]:
        self.asked.append(len(storage_keys))
        await asyncio.sleep(self.answer_s)
        return await super().probe(storage_keys, timeout_s, chains)


class Chains:
    """A node beside an engine with the beginnings of long chains, which it was told of by nobody."""

    def __init__(self, directory: Path) -> None:
        self.node = Node(lambda: CountedTier(EngineSettings(engine=str(directory))))

    @property
    def tier(self) -> CountedTier:
        tier = self.node.shared[0]
        assert isinstance(tier, CountedTier)
        return tier

    def chain(self, there_count: int, number: int = 0, **options: Any) -> ChainQuery:
        """A chain of which the engine has so many leading chunks."""
        query = self.node.query(1, **options)
        query = query._replace(digests=[(number << 32 | at).to_bytes(32, "big") for at in range(1, COUNT + 1)])
        parts, model = self.node.controller.parts, self.node.controller.parts.catalog.model(self.node.model)
        for layer in (None, *query.hidden_layers):
            space = model.seen(layer, query.exactness)
            self.tier.engine.values |= {
                parts.movement.names.key(space, each): b"" for each in query.digests[:there_count]
            }
        return query

    async def segments(self, *queries: ChainQuery) -> list[LookupResult]:
        return await self.node.controller.lookups.segments(queries, self.node.controller.deadline(10.0))


@pytest.fixture
def chains(tmp_path: Path) -> Chains:
    return Chains(tmp_path)


def missed(found: LookupResult) -> tuple[int, set[MissReason]]:
    return found.hit_count, {each.reason for each in found.runs if each.state is not ChunkState.HIT}


@pytest.mark.parametrize("there_count", [0, 1, 1023, 1024, 1025, 2048, 2500])
def test_a_chain_is_followed_as_far_as_the_tier_has_it(chains: Chains, there_count: int) -> None:
    async def scenario() -> None:
        query = chains.chain(there_count)
        for _ in range(2):  # and by the hints of the time before
            assert missed(await chains.node.controller.lookup_wide(query)) == (there_count, {MissReason.COLD})
        asked = range(0, there_count + 1, PROBE_COUNT_MAX)
        assert chains.tier.asked == [min(COUNT - start, PROBE_COUNT_MAX) for start in asked]

    run([chains.node], scenario)


def test_a_chain_that_the_tier_has_as_a_whole_is_found(chains: Chains) -> None:
    async def scenario() -> None:
        found = await chains.node.controller.lookup_wide(chains.chain(COUNT))
        assert missed(found) == (COUNT, set())
        assert sum(chains.tier.asked) == COUNT

    run([chains.node], scenario)


def test_a_chain_of_many_parts_is_found(chains: Chains) -> None:
    async def scenario() -> None:
        query = chains.chain(1500, hidden_layers=(0, 1))
        assert missed(await chains.node.controller.lookup_wide(query)) == (1500, {MissReason.COLD})
        assert max(chains.tier.asked) <= PROBE_COUNT_MAX

    run([chains.node], scenario)


def test_chunks_that_there_was_no_time_to_ask_for_are_unknown_and_asked_for_the_next_time(chains: Chains) -> None:
    """A lookup waits for one bound, however long its chain is."""

    async def scenario() -> None:
        query, loop = chains.chain(2500), asyncio.get_running_loop()
        chains.tier.answer_s = 0.6 * LOOKUP_S
        began_s = loop.time()
        assert missed(await chains.node.controller.lookup_wide(query)) == (1024, {MissReason.UNAVAILABLE})
        assert loop.time() - began_s <= 1.01 * LOOKUP_S
        await asyncio.sleep(LOOKUP_S)  # the second answer comes late, and is good for the next lookup
        assert missed(await chains.node.controller.lookup_wide(query)) == (2500, {MissReason.COLD})

    run([chains.node], scenario)


def test_segments_beyond_one_question_are_asked_for_too(chains: Chains) -> None:
    async def scenario() -> None:
        queries = [chains.chain(count, number) for number, count in enumerate((1100, 0, 700, COUNT), 1)]
        found = [missed(each) for each in await chains.segments(*queries)]
        assert found == [(1100, {MissReason.COLD}), (0, {MissReason.COLD}), (700, {MissReason.COLD}), (COUNT, set())]
        assert max(chains.tier.asked) <= PROBE_COUNT_MAX

    run([chains.node], scenario)


def test_of_segments_that_there_was_no_time_to_ask_for_nothing_is_known(chains: Chains) -> None:
    async def scenario() -> None:
        queries = [chains.chain(count, number) for number, count in enumerate((100, 100, 100), 1)]
        chains.tier.answer_s = 0.9 * LOOKUP_S
        found = [missed(each) for each in await chains.segments(*queries)]
        assert found == [(100, {MissReason.COLD}), *[(0, {MissReason.UNAVAILABLE})] * 2]

    run([chains.node], scenario)
