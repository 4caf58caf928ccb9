"""Which of the chunks that a tier did not take are tried again once it takes chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.controller.operators import Operators, Selection
from kvstore.controller.operators.changes import FREED
from kvstore.controller.operators.values import Tally
from kvstore.keys import ROOT_DIGEST
from kvstore.movement.parked import RETRY_S
from kvstore.movement.writes import LANE_COUNT
from kvstore.spec import Durability
from tests.fakes import Switch
from tests.tiers.shared.world import Node, Wide, run


async def moved(node: Node) -> Tally:
    changes = Operators(node.parts, node.controller).move(Selection(), "s3", keep=False, dry_run=False)
    return [news async for news in changes][-1].tally


async def moved_in_vain(wide: Wide, node: Node, monkeypatch: pytest.MonkeyPatch) -> Tally:
    """Move all chunks to a bucket that goes away once the command has begun."""
    s3 = node.controller.parts.movement.shared_tiers.tiers[1]
    claimed = s3.claim

    async def claim(keys: Sequence[bytes], *args: Any) -> Any:
        if list(keys) != [ROOT_DIGEST]:
            wide.s3.turn_on(Switch.AWAY)
        return await claimed(keys, *args)

    with monkeypatch.context() as patch:
        patch.setattr(s3, "claim", claim)
        return await moved(node)


async def stored_in_vain(wide: Wide, node: Node) -> None:
    """Store a chunk that is to be in a bucket that is away, and stays so."""
    wide.s3.turn_on(Switch.AWAY)
    await node.store(node.session, 1, durability=Durability.OBJECT)
    await node.quiet()


async def back_again(wide: Wide, node: Node) -> None:
    wide.s3.turn_off()
    wide.redis.turn_off()
    await asyncio.sleep(5 * RETRY_S)
    await node.quiet()


def test_a_move_that_failed_does_not_happen_later_behind_its_operators_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = Wide(tmp_path)
    node = wide.node(redis="never", s3="never")

    async def scenario() -> None:
        await node.keep(1, 2)
        tally = await moved_in_vain(wide, node, monkeypatch)
        assert tally.counts == {"failed": 2}
        assert tally.problem
        await back_again(wide, node)
        assert wide.in_s3(node, 1, 2) == [False, False]
        assert not any(each.reason for each in node.controller.parts.movement.all_writes)
        assert (await moved(node)).counts[FREED] == 2, "the operator may try again"
        assert wide.in_s3(node, 1, 2) == [True, True]

    run([node], scenario)


def test_what_the_settings_want_there_goes_also_after_a_move_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = Wide(tmp_path)
    node = wide.node(redis="never", s3="reuse")

    async def scenario() -> None:
        await node.keep(1, 2)
        await moved_in_vain(wide, node, monkeypatch)
        await node.fetch(1)
        await back_again(wide, node)
        assert wide.in_s3(node, 1, 2) == [True, False]

    run([node], scenario)


def test_what_a_store_asked_for_goes_also_after_a_move_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = Wide(tmp_path)
    node = wide.node(redis="never", s3="never")

    async def scenario() -> None:
        await stored_in_vain(wide, node)
        wide.s3.turn_off()
        await moved_in_vain(wide, node, monkeypatch)
        await back_again(wide, node)
        assert wide.in_s3(node, 1) == [True]

    run([node], scenario)


def test_a_move_that_fails_beside_a_try_for_a_store_does_not_end_the_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = Wide(tmp_path)
    node = wide.node(redis="never", s3="never")

    async def scenario() -> None:
        await stored_in_vain(wide, node)
        wide.s3.turn_off()
        s3, moves = node.controller.parts.movement.shared_tiers.tiers[1], list[asyncio.Task[Tally]]()
        claimed = s3.claim

        async def claim(keys: Sequence[bytes], *args: Any) -> Any:
            if list(keys) != [ROOT_DIGEST] and not moves:
                moves.append(asyncio.create_task(moved(node)))
                await asyncio.sleep(1.0)
                wide.s3.turn_on(Switch.AWAY)
            return await claimed(keys, *args)

        with monkeypatch.context() as patch:
            patch.setattr(s3, "claim", claim)
            await asyncio.sleep(2 * RETRY_S)
            assert (await moves[0]).counts == {"failed": 1}
        await back_again(wide, node)
        assert wide.in_s3(node, 1) == [True]

    run([node], scenario)


def test_what_a_store_asked_for_goes_also_after_a_drain_of_the_tier(tmp_path: Path) -> None:
    wide = Wide(tmp_path)
    node = wide.node(redis="never", s3="never")

    async def scenario() -> None:
        await stored_in_vain(wide, node)
        operators = Operators(node.parts, node.controller)
        for end in (False, True):
            _ = [news async for news in operators.drain(Selection(tier="s3"), end=end, service=False, dry_run=False)]
            await back_again(wide, node)
            assert wide.in_s3(node, 1) == [end]

    run([node], scenario)


def test_a_chunk_in_the_row_of_one_that_was_refused_is_not_sent_in_its_place(tmp_path: Path) -> None:
    wide = Wide(tmp_path)
    node = wide.node(redis="reuse", s3="never")

    async def scenario() -> None:
        wide.redis.turn_on(Switch.AWAY)
        await node.keep(1)
        await node.fetch(1)
        await node.quiet()
        row = node.row(1)
        assert row in node.controller.parts.movement.all_writes[1].parked
        removed = Operators(node.parts, node.controller).evict(Selection(), dry_run=False)
        assert [news async for news in removed][-1].tally.counts["removed"] == 1
        await node.keep(2)
        assert node.row(2) == row
        assert not list(node.controller.parts.movement.all_writes[1].parked), "a drain counts what was refused"
        await back_again(wide, node)
        assert wide.in_redis(node, 2) == [False], "it was used once"

    run([node], scenario)


def test_a_chunk_in_the_row_of_one_that_waited_for_its_turn_is_not_sent_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = Wide(tmp_path)
    node = wide.node(redis="reuse", s3="never")
    waiting, others = range(1, LANE_COUNT + 2), range(20, 40)

    async def scenario() -> None:
        gate, redis = asyncio.Event(), node.controller.parts.movement.shared_tiers.tiers[0]
        claimed = redis.claim

        async def claim(*args: Any) -> Any:
            await gate.wait()
            return await claimed(*args)

        monkeypatch.setattr(redis, "claim", claim)
        for number in waiting:
            await node.keep(number)
            await node.fetch(number)
        last, writes = waiting[-1], node.controller.parts.movement.all_writes[1]
        row = node.row(last)
        assert row in writes, "all lanes are busy with the others"
        removed = Operators(node.parts, node.controller).evict(Selection(), dry_run=False)
        assert [news async for news in removed][-1].tally.counts["removed"] == 1, "the others are on their way"
        for other in others:
            await node.keep(other)
            if node.row(other) == row:
                break
        assert node.row(other) == row
        assert row not in writes
        gate.set()
        await node.quiet()
        assert wide.in_redis(node, other) == [False], "it was used once"
        await node.fetch(other)
        await node.quiet()
        assert wide.in_redis(node, other) == [True]

    run([node], scenario)
