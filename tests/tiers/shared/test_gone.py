"""What leaves a shared tier, or is written anew there, while it is read: a miss, and no damage."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import DataLoss
from kvstore.movement.shared_tiers import HINT_S
from kvstore.spec import MissReason
from kvstore.tiers import SharedTier
from tests.scenario import scenario
from tests.tiers.shared.world import Wide, World, run, spoil


@contextmanager
def lost_by_readers(tier: SharedTier, reason: str) -> Iterator[None]:
    """Each chunk that is opened is gone when it is read."""
    opened = tier.open

    async def lost(*_: Any) -> None:
        raise DataLoss("it went", reason=reason)

    async def opened_and_lost(name: Any, ahead: Sequence[Any] = ()) -> Any:
        stored = await opened(name, ahead)
        stored.read = lost
        return stored

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tier, "open", opened_and_lost)
        yield


@pytest.mark.parametrize(
    ("reason", "miss"),
    [("absent", MissReason.EVICTED), ("replaced", MissReason.EVICTED), ("checksum", MissReason.CORRUPT)],
)
def test_an_object_that_goes_while_it_is_read_is_no_damage(tmp_path: Path, reason: str, miss: MissReason) -> None:
    wide = Wide(tmp_path)
    node, other = wide.node(redis="never"), wide.node(redis="never")

    async def scenario() -> None:
        await node.give(1)
        with lost_by_readers(other.shared[1], reason):
            assert await other.fetch(1) == (0, miss)
        assert await node.fetch(1) == (1, MissReason.NONE)

    run([node, other], scenario)


@scenario()
async def test_what_a_device_that_does_not_answer_has_is_not_called_evicted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has dropped it, and another chunk of the same fetch is still on its way."""
    node = world.one
    await node.give(1, 2)
    node.forget_memory()
    monkeypatch.setattr(node.device.tier, "stalled_s", lambda: 60.0)
    opened, going = node.shared[0].open, asyncio.Event()
    gone = node.key(1, 2)

    async def opened_late(name: Any, ahead: Sequence[Any] = ()) -> Any:
        if name.storage_key == gone:
            return None
        await going.wait()
        return await opened(name, ahead)

    node.shared[0].open = opened_late
    session = node.controller.open_session()
    first = await node.controller.fetch_wide(session, node.query(1, 2))
    assert first.hit_count == 2
    await asyncio.sleep(0.01)
    assert first.chunks[1].loading.lost is MissReason.EVICTED
    again = await node.controller.fetch_wide(session, node.query(1, 2))
    assert (again.hit_count, again.reason) == (1, MissReason.UNAVAILABLE)
    going.set()
    await asyncio.sleep(0.01)
    await node.controller.close_session(session)


@scenario()
async def test_another_nodes_write_of_what_a_device_has_that_does_not_answer_is_no_damage(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both nodes stored the chunk, and the engine keeps the first write. The other node's own is on its device."""
    node, other = world.one, world.other
    await other.keep(2)  # so that the nodes draw different write ids
    await node.give(1)
    await other.give(1)
    other.forget_memory()
    with monkeypatch.context() as still:
        still.setattr(other.device.tier, "stalled_s", lambda: 60.0)
        assert (await other.fetch(1))[1] is not MissReason.CORRUPT
    assert await other.fetch(1) == (1, MissReason.NONE)


@pytest.mark.parametrize(("reason", "again", "told"), [
    ("gone", "dropped", None), ("replaced", "there", True), ("gone", "broken", False), ("checksum", "there", False),
])  # fmt: skip
@scenario()
async def test_a_copy_that_goes_while_it_is_verified_is_damaged_only_if_it_goes_again(
    world: World, reason: str, again: str, told: bool | None
) -> None:
    """Dropped, or written anew by another node: that is no damage. A copy of which a part is never there is."""
    node = world.one
    await node.give(1)
    opened, count = node.shared[0].open, 0

    async def lost(*_: Any) -> None:
        raise DataLoss("it went", reason=reason)

    async def opened_and_lost(name: Any, ahead: Sequence[Any] = ()) -> Any:
        nonlocal count
        count += 1
        stored = await opened(name, ahead)
        if count == 1 or again == "broken":
            stored.check = lost
            return stored
        return None if again == "dropped" else stored

    node.shared[0].open = opened_and_lost
    [look] = [look for name, look in node.controller.parts.movement.looks(node.row(1)) if name == "redis"]
    assert await look() is told
    assert bool(node.controller.parts.movement.shared_tiers.tiers[0].bad) == (told is False)


@pytest.mark.parametrize("reason", ["gone", "checksum"])
@scenario()
async def test_a_copy_that_failed_and_was_put_right_meanwhile_is_not_written_again(world: World, reason: str) -> None:
    """Of many nodes that read one chunk while it goes, the first to store it writes it. Each further write would take
    the chunk from those that read it by then, which would write it, too."""
    node, other = world.one, world.other
    await node.give(1)
    with lost_by_readers(other.shared[0], reason):
        assert (await other.fetch(1))[0] == 0
    await other.give(1)
    assert not other.shared[0].statistics().written_bytes


@scenario()
async def test_what_another_node_sends_is_found_soon_after_it_was_not(world: World) -> None:
    """As by an engine that waits for the prompt that one of another node has computed: it looked too early."""
    node, other = world.one, world.other
    assert (await other.fetch(1))[0] == 0
    await node.give(1)
    await asyncio.sleep(other.controller.parts.movement.shared_tiers.absent_s)
    assert (await other.fetch(1))[0] == 1


@scenario()
async def test_a_copy_that_another_node_put_right_is_bad_no_more(world: World) -> None:
    node, other = world.one, world.other
    await node.give(1)
    good = dict(world.engine.values)
    spoil(world.engine, node, 1)
    assert (await other.fetch(1))[0] == 0
    world.engine.values.update(good)
    await asyncio.sleep(HINT_S)
    assert (await other.fetch(1))[0] == 1
    assert not other.controller.parts.movement.shared_tiers.tiers[0].bad
