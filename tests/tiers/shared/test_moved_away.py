"""Chunks that leave the node by an operator's word, while the tier that they are to be in has lost them since."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.controller.operators import Operators, Selection
from kvstore.controller.operators.changes import FREED
from kvstore.controller.operators.values import Tally
from kvstore.keys import ROOT_DIGEST
from kvstore.spec import MissReason
from tests.fakes import Switch
from tests.scenario import scenario
from tests.tiers.shared.world import PATH, Node, Wide, run


async def moved(node: Node, to: str) -> Tally:
    """Return the fates of all chunks that a node has."""
    changes = Operators(node.parts, node.controller).move(Selection(), to, keep=False, dry_run=False)
    return [news async for news in changes][-1].tally


def drop(wide: Wide, node: Node, name: str, *path: int) -> None:
    """As a rule of the bucket, somebody's ``kvstore scan --delete`` or a full server does."""
    if name == "redis":
        wide.engine.values.pop(node.key(*path))
    else:
        (wide.object_settings.directory / node.key(*path).hex()).unlink()


@pytest.mark.parametrize("name", ["redis", "s3"])
def test_what_a_tier_lost_since_is_sent_again_before_the_node_gives_it_up(tmp_path: Path, name: str) -> None:
    wide = Wide(tmp_path)
    node, other = (wide.node(**({"s3": "never"} if name == "redis" else {"redis": "never"})) for _ in range(2))

    async def scenario() -> None:
        await node.give(1, 2)
        drop(wide, node, name, 1)
        tally = await moved(node, name)
        assert (tally.counts["written"], tally.counts["there already"]) == (1, 1)
        assert node.lookup_now(1, 2) == 0
        assert await other.fetch(1, 2) == (2, MissReason.NONE)

    run([node, other], scenario)


@pytest.mark.parametrize("switch", [Switch.AWAY, Switch.STALLED])
def test_what_a_tier_does_not_say_that_it_has_is_not_given_up(
    tmp_path: Path, switch: Switch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answered when the operator's command began."""
    wide = Wide(tmp_path)
    node = wide.node(redis="never")

    async def scenario() -> None:
        await node.give(1, 2)
        s3 = node.controller.parts.movement.shared_tiers.tiers[1]
        asked = s3.ask

        async def ask(keys: Sequence[bytes], *args: Any, **options: Any) -> Any:
            if list(keys) != [ROOT_DIGEST]:
                wide.s3.turn_on(switch)
            return await asked(keys, *args, **options)

        monkeypatch.setattr(s3, "ask", ask)
        tally = await moved(node, "s3")
        assert FREED not in tally.counts
        assert tally.counts["failed"] == 2
        assert node.lookup_now(1, 2) == 2
        wide.s3.turn_off()

    run([node], scenario)


@scenario(lambda tmp_path: Wide(tmp_path).node())
async def test_a_tier_is_not_asked_for_what_a_faster_one_has(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drained device's chunks go no further than the first tier that has them. Questions to S3 cost money."""
    await node.give(1, 2)
    redis, s3 = node.controller.parts.movement.shared_tiers.tiers
    asked: dict[str, list[bytes]] = {"redis": [], "s3": []}
    for tier in (redis, s3):

        async def ask(keys: Sequence[bytes], *args: Any, ask: Any = tier.ask, name: str = tier.tier.name) -> Any:
            asked[name] += keys
            return await ask(keys, *args)

        monkeypatch.setattr(tier, "ask", ask)
    changes = Operators(node.parts, node.controller).drain(
        Selection(tier="nvme"), end=False, service=False, dry_run=False
    )
    tally = [news async for news in changes][-1].tally
    assert tally.counts[FREED] == 2
    assert [key for key in asked["s3"] if key != ROOT_DIGEST] == []
    assert set(asked["redis"]) == {node.key(1), node.key(1, 2)}


@pytest.mark.parametrize("is_drained", [True, False], ids=["drained", "moved"])
def test_what_a_crash_left_on_a_device_that_takes_no_writes_leaves_it_whole(tmp_path: Path, is_drained: bool) -> None:
    """It is good, and cannot be written anew where it lies. This is why an operator moves it away."""
    wide = Wide(tmp_path)
    node, other = (wide.node(redis="never", s3="never") for _ in range(2))

    async def scenario() -> None:
        await node.keep(*PATH)
        await node.restart(kill=True)
        node.disk.fail("pwrite", errno.EIO, path_contains="region", times=None)
        await node.store(node.session, 9)
        await asyncio.sleep(1.0)
        assert node.nvme.statistics().state == "read-only"
        operators = Operators(node.parts, node.controller)
        chosen = Selection(tier="nvme")
        if is_drained:
            changes = operators.drain(chosen, end=False, service=False, dry_run=False)
        else:
            changes = operators.move(chosen, "s3", keep=False, dry_run=False)
        tally = [news async for news in changes][-1].tally
        assert tally.counts[FREED] == len(PATH)
        assert await other.fetch(*PATH) == (len(PATH), MissReason.NONE)

    run([node, other], scenario)
