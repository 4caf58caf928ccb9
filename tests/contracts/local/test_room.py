"""What ``LocalTier`` promises of room: who makes it, and who is not driven out."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore.chunk import ChunkLayout
from kvstore.errors import Exhausted
from kvstore.tiers import Residency
from tests.contracts.chunks import LARGE, SMALL, Chunk, balance, chunk, holds, layouts, write
from tests.contracts.local.stands import Stand
from tests.scenario import scenario


def test_full_is_said_and_passes(make: Callable[..., Stand]) -> None:
    stand = make(capacity_bytes=8 * SMALL.total_bytes + 8192)

    async def scenario() -> None:
        kept: list[tuple[Chunk, Residency]] = []
        with pytest.raises(Exhausted):
            while len(kept) < 100:
                what = chunk(len(kept))
                kept.append((what, await write(stand.tier, what)))
        assert len(kept) >= 4
        for what, residency in kept:
            assert await holds(stand.tier, what, residency)
        stand.tier.remove([kept.pop(1)[1]])
        kept.append((chunk(50), await write(stand.tier, chunk(50))))
        with pytest.raises(Exhausted):
            await write(stand.tier, chunk(51))
        for what, residency in kept:
            assert await holds(stand.tier, what, residency)
        assert stand.tier.statistics().chunk_count == len(kept)
        balance(stand.tier)

    stand.run(scenario)


def test_a_chunk_that_could_never_fit_is_refused(make: Callable[..., Stand]) -> None:
    stand = make(capacity_bytes=SMALL.total_bytes + 4096)

    async def scenario() -> None:
        with pytest.raises(Exhausted):
            await write(stand.tier, chunk(1, layouts()["kv many heads"]))
        residency = await write(stand.tier, chunk(2))
        assert await holds(stand.tier, chunk(2), residency)
        balance(stand.tier)

    stand.run(scenario)


async def fill(stand: Stand, layout: ChunkLayout = SMALL) -> list[tuple[Chunk, Residency]]:
    """Chunks until there is no room for one more without giving one up."""
    kept: list[tuple[Chunk, Residency]] = []
    while stand.tier.has_room(layout):
        what = chunk(len(kept), layout)
        kept.append((what, await write(stand.tier, what)))
        stand.evictor.there.append(kept[-1][1])
    assert len(kept) >= 4
    assert stand.evictor.gone == []
    return kept


@pytest.mark.parametrize("erases", [False, True])
def test_room_is_made_in_the_evictors_order(make: Callable[..., Stand], erases: bool) -> None:
    stand = make(capacity_bytes=8 * SMALL.total_bytes + 8192)

    async def scenario() -> None:
        stand.evictor.erases = erases
        kept = await fill(stand)
        held = kept[0][1]
        stand.evictor.held.add(held)
        fresh = [(what, await write(stand.tier, what)) for what in (chunk(100), chunk(101))]
        gone = stand.evictor.gone
        assert gone
        assert gone == [residency for _, residency in kept[1 : 1 + len(gone)]]
        for what, residency in [kept[0], *kept[1 + len(gone) :], *fresh]:
            assert await holds(stand.tier, what, residency)
        balance(stand.tier)

    stand.run(scenario)


def test_what_is_held_makes_no_room(make: Callable[..., Stand]) -> None:
    stand = make(capacity_bytes=8 * SMALL.total_bytes + 8192)

    async def scenario() -> None:
        kept = await fill(stand)
        stand.evictor.held.update(residency for _, residency in kept)
        with pytest.raises(Exhausted):
            while True:
                await write(stand.tier, chunk(100))  # one that is encoded may find room that a raw one does not
        for layout in (layouts()["mla float8"], SMALL):
            with pytest.raises(Exhausted):
                await write(stand.tier, chunk(101, layout))
        assert stand.evictor.gone == []
        for what, residency in kept:
            assert await holds(stand.tier, what, residency)
        balance(stand.tier)

    stand.run(scenario)


def test_a_chunk_that_could_never_fit_drives_nothing_out(make: Callable[..., Stand]) -> None:
    stand = make(capacity_bytes=8 * SMALL.total_bytes + 8192)

    async def scenario() -> None:
        kept = await fill(stand)
        with pytest.raises(Exhausted):
            await write(stand.tier, chunk(100, LARGE))
        assert stand.evictor.gone == []
        for what, residency in kept:
            assert await holds(stand.tier, what, residency)
        balance(stand.tier)

    stand.run(scenario)


@scenario()
async def test_many_small_chunks_make_room_for_a_large_one(stand: Stand) -> None:
    """More of them than any one file, or run of memory, holds."""
    kept = await fill(stand)
    stand.evictor.held.add(kept[0][1])
    residency = await write(stand.tier, chunk(200, LARGE))
    assert await holds(stand.tier, chunk(200, LARGE), residency)
    assert await holds(stand.tier, *kept[0])
    assert len(stand.evictor.gone) < len(kept) / 2
    balance(stand.tier)


@pytest.mark.parametrize("kill", [False, True])
@scenario()
async def test_what_a_start_found_makes_room(stand: Stand, kill: bool) -> None:
    await fill(stand)
    await stand.restart(kill=kill)
    places = list(stand.found().values())
    stand.evictor.there += places
    residency = await write(stand.tier, chunk(200, LARGE))
    assert await holds(stand.tier, chunk(200, LARGE), residency)
    assert bool(stand.evictor.gone) == stand.is_durable
    balance(stand.tier)


@pytest.mark.parametrize("erases", [False, True])
def test_chunks_of_another_size_make_room(make: Callable[..., Stand], erases: bool) -> None:
    stand = make(capacity_bytes=16 * SMALL.total_bytes + 8192)
    other = layouts()["mla float8"]
    assert other.total_bytes != SMALL.total_bytes

    async def scenario() -> None:
        stand.evictor.erases = erases
        there = {residency: what for what, residency in await fill(stand)}
        for number in range(20):
            what = chunk(200 + number, other if number % 3 else SMALL)
            residency = await write(stand.tier, what)
            stand.evictor.there.append(residency)
            there[residency] = what
            assert await holds(stand.tier, what, residency)
            balance(stand.tier)
        await stand.tier.tidy()
        assert stand.evictor.gone
        assert stand.tier.statistics().chunk_count == len(stand.evictor.there)
        for residency in stand.evictor.there:
            assert await holds(stand.tier, there[residency], residency)

    stand.run(scenario)
