"""What ``SharedTier`` promises when its engine is full, away, stalled or wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest

from kvstore.errors import DataLoss, DeadlineExceeded, Exhausted, Unavailable
from tests.contracts.chunks import LARGE, SMALL, balance, chunk
from tests.contracts.shared.stands import TIMEOUT_S, Stand, found, write
from tests.fakes import Switch
from tests.scenario import scenario


def test_a_full_engine_drops_others_or_says_so(make: Callable[..., Stand]) -> None:
    stand = make(capacity_bytes=6 * SMALL.total_bytes)

    async def scenario() -> None:
        refused = 0
        for number in range(12):
            try:
                await write(stand.tier, chunk(number))
            except Exhausted:
                refused += 1
            assert stand.tier.statistics().file_bytes <= stand.capacity_bytes
        there = [number for number in range(12) if await found(stand.tier, chunk(number))]
        assert (refused, there) == ((0, list(range(6, 12))) if stand.evicts else (6, list(range(6))))
        with pytest.raises(Exhausted):
            await write(stand.tier, chunk(100, LARGE))
        balance(stand.tier)  # type: ignore[arg-type]  # its account is alike

    stand.run(scenario)


@scenario()
async def test_an_engine_that_is_away_is_unavailable_and_comes_back(stand: Stand) -> None:
    await write(stand.tier, chunk(1))
    stored = await stand.tier.open(chunk(1).name)
    assert stored is not None
    stand.switches.turn_on(Switch.AWAY)
    key = chunk(1).header.storage_key
    target = [np.empty(slab.byte_count, np.uint8) for slab in SMALL.slabs]
    for call in (
        write(stand.tier, chunk(2)), stand.tier.open(chunk(1).name), stand.tier.probe([key], TIMEOUT_S),
        stand.tier.claim([key], 60.0, TIMEOUT_S),
        stand.tier.remove([key]), stored.read(range(2), target), stored.check(range(2)),
    ):  # fmt: skip
        with pytest.raises(Unavailable):
            await call
    with suppress(Unavailable):
        await stand.tier.touch([key])
    stand.switches.turn_off()
    await stored.check(range(2))
    stored.close()
    assert await found(stand.tier, chunk(1))
    assert not await found(stand.tier, chunk(2))


@scenario()
async def test_a_use_that_it_is_told_of_changes_nothing_but_what_it_drops(stand: Stand) -> None:
    keys = [chunk(number).header.storage_key for number in range(3)]
    await stand.tier.touch(keys)  # nothing is there: no error
    await stand.tier.touch([])
    for number in range(3):
        await write(stand.tier, chunk(number))
    await stand.other.touch([*keys, chunk(9).header.storage_key])
    assert list(await stand.tier.probe([*keys, chunk(9).header.storage_key], TIMEOUT_S)) == [True] * 3 + [False]
    for number in range(3):
        assert await found(stand.tier, chunk(number))
    balance(stand.tier)


def test_what_is_used_elsewhere_is_not_dropped_first(make: Callable[..., Stand]) -> None:
    stand = make(capacity_bytes=4 * SMALL.total_bytes)
    if not stand.evicts:
        pytest.skip("this engine drops nothing")

    async def scenario() -> None:
        for number in range(4):
            await write(stand.tier, chunk(number))
        for number in range(4, 10):
            await stand.other.touch([chunk(0).header.storage_key])
            await write(stand.tier, chunk(number))
        assert [number for number in range(10) if await found(stand.tier, chunk(number))] == [0, 7, 8, 9]

    stand.run(scenario)


@scenario()
async def test_an_engine_that_stalls_says_for_how_long_and_a_probe_ends(stand: Stand) -> None:
    await write(stand.tier, chunk(1))
    assert stand.tier.stalled_s() == 0.0
    stand.switches.turn_on(Switch.STALLED)
    opening = asyncio.ensure_future(stand.tier.open(chunk(1).name))
    with pytest.raises(DeadlineExceeded):
        await stand.tier.probe([chunk(1).header.storage_key], TIMEOUT_S)
    with pytest.raises(DeadlineExceeded):
        await stand.tier.claim([chunk(2).header.storage_key], 60.0, 0.1)
    assert stand.tier.stalled_s() > 0.9
    assert stand.tier.stalled_s() < 1.5 or not stand.is_timed
    stand.switches.turn_off()
    stored = await opening
    assert stored is not None
    await stored.check(range(2))
    stored.close()
    assert stand.tier.stalled_s() == 0.0


@scenario()
async def test_a_hint_that_lies_changes_no_read(stand: Stand) -> None:
    await write(stand.tier, chunk(1))
    keys = [chunk(number).header.storage_key for number in (1, 2)]
    stand.switches.turn_on(Switch.LYING)
    assert list(await stand.tier.probe(keys, TIMEOUT_S)) == [False, True]
    assert await found(stand.tier, chunk(1))
    assert await stand.tier.open(chunk(2).name) is None
    stand.switches.turn_on(Switch.ABSENT)
    assert list(await stand.tier.probe(keys, TIMEOUT_S)) == [False, False]
    assert await stand.tier.open(chunk(1).name) is None
    for switch in (Switch.CORRUPT, Switch.GARBLED):
        stand.switches.turn_on(switch)
        with pytest.raises(DataLoss):
            await found(stand.tier, chunk(1))
    stand.switches.turn_off()
    assert await found(stand.tier, chunk(1))


@scenario()
async def test_a_cancelled_call_leaves_all_or_nothing(stand: Stand) -> None:
    outcomes = set()
    for step in range(30):
        what = chunk(step, write=step)
        writing = asyncio.ensure_future(write(stand.tier, what))
        await asyncio.sleep(step * 0.00005)
        writing.cancel()
        outcomes.add(bool((await asyncio.gather(writing, return_exceptions=True))[0]))
        for piece in what.pieces:
            piece[:] = 0xDB  # the caller may use its memory again
        await asyncio.sleep(0.01)
        await found(stand.other, chunk(step, write=step))
        balance(stand.tier)  # type: ignore[arg-type]  # its account is alike
    assert True in outcomes
