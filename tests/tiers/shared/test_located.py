"""What a router is told of shared tiers: nothing that is not there, and in few questions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.catalog import Namespace
from kvstore.controller.locating import KEYS_AT_ONCE, _of_nodes
from kvstore.directory.directory import Whereabouts
from kvstore.movement.questions import PROBE_COUNT_MAX, SILENT_BOUNDS
from kvstore.seams.pauses import STEP_S
from kvstore.spec import Tier
from tests.controller.service import Service
from tests.fakes import Switch
from tests.tiers.shared.world import LOOKUP_S, PATH, Wide, run

LONG = tuple(range(1, 13))
"""A chain that a bucket is not asked for key by key."""


def test_a_bucket_that_has_no_e_is_not_said_to_have_it(tmp_path: Path) -> None:
    wide = Wide(tmp_path)
    node, other = wide.node(redis="never"), wide.node(redis="never")

    async def scenario() -> None:
        await node.give(*LONG)
        query = other.query(*LONG)
        found = await other.controller.locate([query, query._replace(hidden_layers=(1,))])
        assert [(each.tier, each.chunk_count) for each in found.chains[0]] == [(Tier.S3, len(LONG))]
        assert found.chains[1] == [], "E was never stored"
        for length in range(1, len(LONG)):  # whichever keys a bucket is asked for
            query = other.query(*LONG[:length])._replace(hidden_layers=(1,))
            assert (await other.controller.locate([query])).chains == [[]], length

    run([node, other], scenario)


def test_all_contexts_of_a_call_are_one_question(tmp_path: Path) -> None:
    wide = Wide(tmp_path)
    node, other = wide.node(), wide.node()
    asked: list[int] = []

    async def scenario() -> None:
        await node.give(*PATH)
        probe = other.shared[0].probe

        async def counted(keys: Sequence[bytes], timeout_s: float, chains: Sequence[int] = ()) -> Any:
            asked.append(len(keys))
            assert sum(chains) == len(keys)
            return await probe(keys, timeout_s, chains)

        other.shared[0].probe = counted
        contexts = [other.query(*PATH), other.query(*PATH, 4), other.query(9), other.query(*PATH[:2])]
        found = await other.controller.locate(contexts)
        depths = [[each.chunk_count for each in chain if each.tier is Tier.REDIS] for chain in found.chains]
        assert depths == [[3], [3], [], [2]]
        assert asked == [5], "each key once"

    run([node, other], scenario)


def test_what_one_question_cannot_hold_is_asked_in_the_next(tmp_path: Path) -> None:
    wide = Wide(tmp_path)
    other = wide.node()
    keys = [number.to_bytes(32, "big") for number in range(2 * PROBE_COUNT_MAX + 1)]

    async def scenario() -> None:
        tiers = other.controller.parts.movement.shared_tiers
        asked: list[int] = []

        async def all_there(keys: Sequence[bytes], timeout_s: float, chains: Sequence[int] = ()) -> list[bool]:
            asked.append(len(keys))
            return [True] * len(keys)

        async def late(keys: Sequence[bytes], timeout_s: float, chains: Sequence[int] = ()) -> list[bool]:
            asked.append(0)
            raise TimeoutError

        other.shared[0].probe, other.shared[1].probe = all_there, late
        assert await tiers.said([keys[:7], keys], 1.0) == [(Tier.REDIS, set(keys), True), (Tier.S3, set(), False)]
        assert asked.count(0) == 1, "one that is late is asked no more"
        assert max(asked) <= PROBE_COUNT_MAX
        assert sum(asked) == len(keys)

    run([other], scenario)


@pytest.mark.parametrize("still", ["redis", "s3"])
def test_of_a_tier_that_stands_still_it_is_said_that_nothing_is_known(tmp_path: Path, still: str) -> None:
    """It costs one bound, and then nothing. What the other tier has is told."""
    wide = Wide(tmp_path)
    node, other = wide.node(), wide.node()

    async def scenario() -> None:
        await node.give(*PATH)
        found = await other.controller.locate([other.query(*PATH), other.query(9)])
        assert (found.chains[0], found.unknown) == ([("", Tier.REDIS, 3), ("", Tier.S3, 3)], ())
        kind, at = {"redis": (Tier.REDIS, 0), "s3": (Tier.S3, 1)}[still]
        {"redis": wide.redis, "s3": wide.s3}[still].turn_on(Switch.STALLED)
        loop, took_s = asyncio.get_running_loop(), []
        for _ in range(2 * SILENT_BOUNDS):
            began_s = loop.time()
            found = await other.controller.locate([other.query(*PATH), other.query(9)])
            took_s.append(loop.time() - began_s)
            assert found.unknown == (kind,)
            assert [each.tier for each in found.chains[0]] == [Tier.S3 if kind is Tier.REDIS else Tier.REDIS]
        assert max(took_s) == pytest.approx(LOOKUP_S), "virtual time"
        other.shared[at].probe = None  # whoever asked it would fail
        assert (await other.controller.locate([other.query(*PATH)])).unknown == (kind,)

    run([node, other], scenario)


def test_what_a_part_of_a_tier_does_not_answer_for_is_unknown_and_not_absent(tmp_path: Path) -> None:
    """A cluster has such keys while one of its nodes is dead: it is asked again at once, and a router hears that there
    may be more."""
    wide = Wide(tmp_path)
    node, other = wide.node(s3="never"), wide.node(s3="never")

    async def scenario() -> None:
        await node.give(*PATH)
        probe, asked, dead = other.shared[0].probe, list[int](), {other.key(*PATH[:2])}

        async def partly(keys: Sequence[bytes], timeout_s: float, chains: Sequence[int] = ()) -> list[bool | None]:
            asked.append(len(keys))
            found = await probe(keys, timeout_s, chains)
            return [None if key in dead else each for key, each in zip(keys, found, strict=True)]

        other.shared[0].probe = partly
        found = await other.controller.locate([other.query(*PATH)])
        assert [(each.tier, each.chunk_count) for each in found.chains[0]] == [(Tier.REDIS, 1)]
        assert Tier.REDIS in found.unknown
        assert (await other.lookup(*PATH, 9)).hit_count == 1
        dead.clear()
        asked.clear()
        assert (await other.lookup(*PATH, 9)).hit_count == 3, "it was not taken for absent"
        assert Tier.REDIS not in (await other.controller.locate([other.query(*PATH)])).unknown

    run([node, other], scenario)


def test_a_node_has_what_comes_before_a_chunk_that_it_has() -> None:
    """A node has the prompt as far as the known entries tell, where those of other chunks are unknown."""
    here, slow, nowhere = {"a": Tier.DRAM}, {"a": Tier.NVME}, dict[str, Tier]()
    for chunks, found in (
        ([here, None, here, None], [("a", Tier.DRAM, 3)]),
        ([None, None, here, here], [("a", Tier.DRAM, 4)]),
        ([here, None, nowhere, here], [("a", Tier.DRAM, 1)]),
        ([here, None, slow], [("a", Tier.DRAM, 1), ("a", Tier.NVME, 3)]),
        ([None, nowhere, here], []),
        ([None, None], []),
        ([], []),
    ):
        assert _of_nodes([[each] for each in chunks]) == found, chunks
    assert _of_nodes([[here, here], [here, None], [None, here]]) == [("a", Tier.DRAM, 1)], "a part of it is unknown"
    assert _of_nodes([[here, here], [here, None], [here, here]]) == [("a", Tier.DRAM, 3)]


async def test_a_long_chain_is_located_in_steps_and_hashed_only_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage key is a hash: those of a long prompt would keep every other request waiting."""
    service = Service()
    names, query = service.parts.movement.names, service.query(*range(3 * KEYS_AT_ONCE))
    keys, counts = names.keys, list[int]()

    def slowly(space: Namespace, digests: Sequence[bytes]) -> list[bytes]:
        service.clock.advance(STEP_S)
        counts.append(len(digests))
        return keys(space, digests)

    async def nowhere(asked: Sequence[bytes], timeout_s: float) -> Whereabouts:
        return Whereabouts([{}] * len(asked), "")

    monkeypatch.setattr(names, "keys", slowly)
    assert (await service.controller.locate([query])).chains == [[]]
    assert not counts, "nobody else can have it"
    object.__setattr__(service.parts, "directory", SimpleNamespace(where=nowhere))  # parts are frozen
    located, seen = asyncio.ensure_future(service.controller.locate([query])), set[int]()
    while not located.done():
        await asyncio.sleep(0)
        seen.add(len(counts))
    assert located.result().chains == [[]]
    assert (counts, seen) == ([KEYS_AT_ONCE] * 3, {1, 2, 3})
