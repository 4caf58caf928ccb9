"""What is asked of shared tiers, and what changes while they are asked: a miss at worst, and nothing is left of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import Exhausted, Unavailable
from kvstore.keys import ROOT_DIGEST
from kvstore.movement.questions import PROBE_COUNT_MAX
from kvstore.spec import MissReason
from tests.fakes import Switch
from tests.scenario import scenario
from tests.specs import small_spec
from tests.tiers.shared.world import LOOKUP_S, PATH, Wide, World, redeemed, run


@scenario()
async def test_a_chunk_whose_parent_is_still_coming_stays(world: World) -> None:
    """Two fetches share a prefix. What the second one adds is there before the prefix is."""
    path = (1, 2, 3, 4)
    await world.one.give(*path)
    other = world.other
    tier, slow = other.shared[0], [0.5, 0.5]
    real = tier.open

    async def opens(name: Any, ahead: Any = ()) -> Any:
        await asyncio.sleep(slow.pop() if slow else 0.0)
        return await real(name)

    tier.open = opens
    first = asyncio.ensure_future(other.fetch(1, 2))
    await asyncio.sleep(0.1)
    assert await other.fetch(*path) == (4, MissReason.NONE)
    assert await first == (2, MissReason.NONE)
    assert (other.controller.stats().chunk_count, other.ghosts()) == (4, [])


@scenario()
async def test_a_ticket_is_for_what_is_here_when_it_is_given(world: World) -> None:
    """A chunk leaves while shared tiers are asked."""
    other = world.other
    await other.store(other.session, 1, 2)
    world.switches.turn_on(Switch.STALLED)
    asked = asyncio.ensure_future(other.lookup(*PATH, readers=1))
    await asyncio.sleep(LOOKUP_S / 2)
    other.controller.parts.movement.removal.remove(other.row(1, 2), MissReason.EVICTED)
    found = await asked
    assert found.hit_count == 1
    assert await redeemed(other, found.ticket) == 1


@scenario()
async def test_what_left_the_node_behind_a_gap_while_a_tier_was_asked_is_no_hit(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.one.give(1)
    other = world.other
    await other.store(other.session, 1, 2)
    movement = other.controller.parts.movement
    movement.removal.remove(other.row(1), MissReason.EVICTED)
    assert (await other.lookup(1, 2)).hit_count == 2
    movement.shared_tiers._hints.clear()
    tier = movement.shared_tiers.tiers[0].tier
    probe = tier.probe

    async def meanwhile(*asked: object) -> object:
        movement.removal.remove(other.row(1, 2), MissReason.EVICTED)
        return await probe(*asked)

    monkeypatch.setattr(tier, "probe", meanwhile)
    assert (await other.lookup(1, 2)).hit_count == 1


def test_a_document_that_nobody_has_hides_no_other(tmp_path: Path) -> None:
    """In a tier that does not ask for every key of a chain."""
    wide = Wide(tmp_path)
    one, other = (wide.node(redis="never") for _ in range(2))
    documents = [tuple(range(start, start + 5)) for start in (100, 200, 300, 400)]

    async def scenario() -> None:
        for number in (1, 3):
            await one.give(*documents[number])
        queries = [other.query(*each) for each in documents]
        assert [each.hit_count for each in await other.controller.lookup_segments(queries)] == [0, 5, 0, 5]

    run([one, other], scenario)


@scenario()
async def test_a_chain_that_turns_back_leaves_no_rows(world: World) -> None:
    other = world.other
    world.switches.turn_on(Switch.LYING)
    query = other.query(1, 2)
    first, second = query.digests
    for digests in ([first, first], [first, second, first], [ROOT_DIGEST, first], [first, ROOT_DIGEST, second]):
        result = await other.controller.fetch_wide(other.session, query._replace(digests=digests))
        other.controller.release(other.session, [result.lease_id])
        await asyncio.sleep(0.1)
        other.is_empty()


@scenario()
async def test_chains_that_cross_leave_no_rows(world: World) -> None:
    """Two fetches name the same chunks, each the other way round, while the first is on its way."""
    other = world.other
    query = other.query(1, 2)
    world.switches.turn_on(Switch.LYING)
    await other.controller.lookup_wide(query)
    world.switches.turn_on(Switch.STALLED)
    for digests in (query.digests, query.digests[::-1]):
        result = await other.controller.fetch_wide(other.session, query._replace(digests=digests))
        other.controller.release(other.session, [result.lease_id])
    world.switches.turn_off()
    await asyncio.sleep(10.0)
    other.is_empty()


@scenario()
async def test_a_session_that_ends_while_its_fetch_asks_leases_nothing(world: World) -> None:
    other = world.other
    await other.keep(1)
    world.switches.turn_on(Switch.STALLED)
    asked = asyncio.ensure_future(other.controller.fetch_wide(other.session, other.query(*PATH)))
    await asyncio.sleep(LOOKUP_S / 2)
    await other.controller.close_session(other.session)
    with pytest.raises(Unavailable):
        await asked
    assert other.controller.stats().lease_count == 0


@scenario()
async def test_a_fetch_of_what_others_have_finds_no_namespace_here(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """limits.namespace_count_max refuses stores, not fetches."""
    world.switches.turn_on(Switch.LYING)
    monkeypatch.setattr(world.other.controller.parts.catalog.spaces, "_count_max", 0)
    assert await world.other.fetch(1) == (0, MissReason.COLD)


@scenario()
async def test_chunks_of_many_parts_are_named_no_further_than_they_are_asked_for(world: World) -> None:
    """Nobody else is answered meanwhile."""
    controller, named = world.other.controller, []
    names = controller.parts.movement.names
    real = names.keys

    def keys(*arguments: Any) -> list[bytes]:
        found = real(*arguments)
        named.extend(found)
        return found

    names.keys = keys  # type: ignore[method-assign]  # replaced
    query = world.other.query(1, hidden_layers=(0, 1))
    digests = [number.to_bytes(32, "big") for number in range(1, 2000)]
    await controller.lookup_wide(query._replace(digests=digests))
    assert 0 < len(named) <= PROBE_COUNT_MAX


@scenario()
async def test_a_model_of_which_only_shared_tiers_have_chunks_stays_while_a_ticket_or_a_call_needs_it(
    world: World,
) -> None:
    """No row of the node keeps it."""
    await world.one.give(*PATH)
    other = world.other
    other.controller.parts.catalog.registered._count_max = 1
    new = small_spec(model_id="new")
    held = await other.lookup(*PATH, readers=1)
    assert held.hit_count == len(PATH)
    assert other.ghosts() == []
    with pytest.raises(Exhausted, match="all of them are in use"):
        other.controller.register_model(new)
    assert await redeemed(other, held.ticket) == len(PATH)
    await other.fetch(*PATH)  # what came is entered
    await other.quiet()
    for row in reversed(list(other.controller.parts.catalog.table.rows())):
        other.controller.parts.movement.removal.remove(row, MissReason.EVICTED)
    world.switches.turn_on(Switch.STALLED)
    for call in (other.lookup(7, 8), other.controller.fetch_wide(other.session, other.query(9))):
        asked = asyncio.ensure_future(call)
        await asyncio.sleep(LOOKUP_S / 2)
        with pytest.raises(Exhausted, match="all of them are in use"):
            other.controller.register_model(new)
        await asked
    assert not list(other.controller.parts.catalog.table.rows())
    other.controller.register_model(new)
    assert other.model not in other.controller.parts.catalog.models


def test_what_another_question_found_meanwhile_is_not_nowhere(tmp_path: Path) -> None:
    """Two lookups of a prompt, one shortly after the other. The second one hears from the faster tier that it has
    nothing when the first one has heard already that the slower tier has all of it."""
    wide = Wide(tmp_path)
    node, other = wide.node(redis="never"), wide.node(redis="never", s3="never")

    async def scenario() -> None:
        await node.give(*PATH)
        for tier, seconds in zip(other.shared, (0.01, 0.004), strict=True):

            async def slow(*args: Any, seconds: float = seconds, probe: Any = tier.probe) -> Any:
                await asyncio.sleep(seconds)
                return await probe(*args)

            tier.probe = slow
        first = asyncio.ensure_future(other.lookup(*PATH))
        await asyncio.sleep(0.006)
        second = asyncio.ensure_future(other.lookup(*PATH))
        assert [(await each).hit_count for each in (first, second)] == [3, 3]
        assert await other.fetch(*PATH) == (3, MissReason.NONE)

    run([node, other], scenario)
