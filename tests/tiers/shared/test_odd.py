"""Engines that break their promises: a miss at worst, of which nothing is left, and never at the cost of the node."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvstore.chunk import ChunkHeader, pack_header, parse_header
from kvstore.errors import DataLoss, Exhausted
from kvstore.movement.shared_tiers import CLOSE_S_MAX
from kvstore.spec import Exactness, MissReason, Provenance
from kvstore.tiers import pace
from tests.scenario import scenario
from tests.tiers.shared.odd import never, odd
from tests.tiers.shared.world import PATH, World


async def one_too_few(keys: Sequence[bytes], timeout_s: float, chains: Sequence[int]) -> list[bool]:
    return [True] * (len(keys) - 1)


async def one_too_many(keys: Sequence[bytes], timeout_s: float, chains: Sequence[int]) -> list[bool]:
    return [True] * (len(keys) + 1)


async def none_at_all(keys: Sequence[bytes], timeout_s: float, chains: Sequence[int]) -> Any:
    return None


@pytest.mark.parametrize("probe", [one_too_few, one_too_many, none_at_all, odd])
@scenario()
async def test_an_answer_that_is_none_is_a_miss_and_a_failure_of_the_tier(world: World, probe: Any) -> None:
    other = world.other
    other.shared[0].probe = probe
    for token in range(3):
        assert (await other.lookup(token)).hit_count == 0
        assert (await other.fetch(token))[0] == 0
    assert not other.controller.parts.movement.shared_tiers.tiers[0].is_asked
    other.is_empty()


@pytest.mark.parametrize("call", ["open", "read"])
@scenario()
async def test_an_odd_error_loses_one_chunk_and_no_other(world: World, call: str) -> None:
    """What the device has of the chain comes."""
    await world.one.give(*PATH)
    other, opened = world.other, []
    await other.keep(1, 2)
    other.forget_memory()
    tier = other.shared[0]
    real = tier.open

    async def opens(name: Any, ahead: Any = ()) -> Any:
        if call == "open":
            await odd()
        opened.append(await real(name))
        opened[-1].read = odd
        return opened[-1]

    tier.open = opens
    assert await other.fetch(*PATH) == (2, MissReason.UNAVAILABLE)
    assert all(each._is_closed for each in opened)
    assert not other.ghosts()


HEADERS: list[dict[str, Any]] = [
    {"chain_digest": b"x" * 32},
    {"parent": b"x" * 32},
    {"namespace": b"x" * 32},
    {"fingerprint": b"x" * 32},
    {"tenant_digest": b"x" * 16},
    {"provenance": Provenance.STANDALONE},
    {"exactness": Exactness.DERIVED},
]


@pytest.mark.parametrize("wrong", HEADERS, ids=lambda wrong: next(iter(wrong)))
@scenario()
async def test_a_header_that_names_another_chunk_is_not_believed(world: World, wrong: dict[str, Any]) -> None:
    """Under the right key, and whole by its own checksum."""
    await world.one.give(1)
    ((key, value),) = world.engine.values.items()
    layout = world.one.layout
    header: ChunkHeader = replace(parse_header(np.frombuffer(value, np.uint8), layout), **wrong)
    world.engine.values[key] = pack_header(header, layout) + value[layout.header_bytes :]
    assert await world.other.fetch(1) == (0, MissReason.CORRUPT)
    world.other.is_empty()


@scenario()
async def test_a_header_that_cannot_be_kept_leaves_nothing_open(world: World) -> None:
    await world.one.give(1)
    tier, opened = world.other.shared[0], []
    real = tier.open

    async def opens(name: Any, ahead: Any = ()) -> Any:
        chunk = await real(name)
        chunk.header = replace(chunk.header, checksums=chunk.header.checksums[:1], first_position=-1)
        opened.append(chunk)
        return chunk

    tier.open = opens
    assert (await world.other.fetch(1))[0] == 0
    assert [each._is_closed for each in opened] == [True]
    world.other.is_empty()


@pytest.mark.parametrize("call", ["open", "read"])
@scenario()
async def test_a_limit_of_our_own_costs_chunks_and_no_tier(world: World, call: str) -> None:
    """More waits for tiers.s3.bytes_per_s_max than its patience: what others ask of the tier goes on."""
    await world.one.give(1, 2, 3, 4)
    other = world.other
    tier = other.shared[0]
    real = tier.open

    async def refused(*_: Any) -> Any:
        raise Exhausted("tiers.s3.bytes_per_s_max: more waits already than moves in 10 s")

    async def opens(name: Any, ahead: Any = ()) -> Any:
        if call == "open":
            await refused()
        stored = await real(name)
        stored.read = stored.check = refused
        return stored

    tier.open = opens
    assert (await other.fetch(1, 2, 3, 4))[0] == 0
    [shared] = other.controller.parts.movement.shared_tiers.tiers
    assert not shared.breaker.is_open
    tier.open = real
    assert await other.fetch(1, 2, 3, 4) == (4, MissReason.NONE)


@scenario()
async def test_a_tier_that_is_busy_with_others_is_waited_for(world: World) -> None:
    """It answers one call after the other; the last of them has waited for longer than a stalled tier is given."""
    path = tuple(range(1, 12))
    await world.one.give(*path)
    tier, turn = world.other.shared[0], asyncio.Lock()
    real = tier.open

    async def opens(name: Any, ahead: Any = ()) -> Any:
        async with turn:
            await asyncio.sleep(0.4)
            return await real(name)

    tier.open = opens
    assert await world.other.fetch(*path) == (11, MissReason.NONE)


@scenario()
async def test_a_call_that_never_ends_is_given_up(world: World) -> None:
    await world.one.give(*PATH)
    other = world.other
    other.shared[0].open = never
    assert await other.fetch(*PATH) == (0, MissReason.UNAVAILABLE)
    await asyncio.sleep(120.0)
    other.is_empty()


@pytest.mark.parametrize("is_large", [True, False])
@pytest.mark.parametrize("call", ["open", "write"])
@scenario()
async def test_a_large_chunk_may_take_longer(
    world: World, monkeypatch: pytest.MonkeyPatch, call: str, is_large: bool
) -> None:
    """On a slow line whose tier gets on; a small chunk that takes as long has failed."""
    one, other = world.one, world.other
    monkeypatch.setattr(pace, "BYTES_PER_S_MIN", one.layout.total_bytes / (1000.0 if is_large else 1e-3))
    tier = (other if call == "open" else one).shared[0]
    real = getattr(tier, call)

    async def slow(*args: Any) -> Any:
        await asyncio.sleep(100.0)
        return await real(*args)

    if call == "open":
        await one.give(1)
    monkeypatch.setattr(tier, call, slow)
    monkeypatch.setattr(tier, "stalled_s", lambda: 0.0)
    if call == "open":
        await other.fetch(1)  # its own time is up before; the chunk goes on coming
        await asyncio.sleep(150.0)
        assert other.lookup_now(1) == is_large
    else:
        await one.keep(1)
        await asyncio.sleep(150.0)
        assert (one.key(1) in world.engine.values) == is_large


@scenario()
async def test_a_write_that_is_refused_oddly_costs_the_node_nothing(world: World) -> None:
    """Even an engine that calls what it was given damaged."""

    async def condemns(*_: Any) -> None:
        raise DataLoss("your chunk is bad")

    one = world.one
    one.shared[0].write = condemns
    await one.give(1)
    assert [row in one.mapped for row in one.mapped.rows()] == [True]
    assert one.counters()["quarantined_chunks"] == 0


@pytest.mark.parametrize("close", [odd, never])
@scenario()
async def test_a_stop_is_clean_whatever_an_engine_does(world: World, close: Any) -> None:
    one, loop = world.one, asyncio.get_running_loop()
    await one.give(*PATH)
    one.shared[0].close = close
    began_s = loop.time()
    await one.restart()
    assert loop.time() - began_s < CLOSE_S_MAX + 1.0
    assert all(map(one.device.is_proven, one.device.rows())), "the device's snapshot was taken"


@pytest.mark.parametrize("provenance", Provenance)
@scenario()
async def test_short_chunks_stay_on_their_node(world: World, provenance: Provenance) -> None:
    """Another node would take one for a chunk of full length, and find it damaged."""
    one = world.one
    await one.give(1)
    catalog, target = one.controller.parts.catalog, one.controller.parts.movement.shared[0].target
    (row,) = one.mapped.rows()
    catalog.space_of(row).provenance = provenance
    assert target.admits(row)
    catalog.table.token_counts[row] = 4
    assert not target.admits(row)


@scenario()
async def test_those_who_wait_no_longer_are_forgotten(world: World) -> None:
    """A tier that stalls would keep all of them."""
    one = world.one
    one.nvme.write = never  # type: ignore[method-assign]  # replaced
    await one.store(one.session, 1)
    for _ in range(10):
        await one.controller.settle(one.query(1), 0.01)
    assert not one.controller.parts.movement.writes[0]._waiters
