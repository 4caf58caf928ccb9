"""What a router is told of shared tiers: nothing that is not there, and in few questions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvstore.movement.shared_tiers import PROBE_COUNT_MAX
from kvstore.spec import Tier
from tests.tiers.shared.world import PATH, Wide, run

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
        assert await tiers.said([keys[:7], keys], 1.0) == [(Tier.REDIS, set(keys))]
        assert asked.count(0) == 1, "one that is late is asked no more"
        assert max(asked) <= PROBE_COUNT_MAX
        assert sum(asked) == len(keys)

    run([other], scenario)
