"""What ``LocalTier`` promises of writes and reads that fail, bytes that change, and starts."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvstore.errors import DataLoss, KVStoreError, Unavailable
from kvstore.tiers.contract import RESIDENCY_STOP
from tests.contracts.chunks import SMALL, VALUE, balance, chunk, holds, layouts, read, write
from tests.contracts.local.stands import Stand
from tests.scenario import scenario


@pytest.mark.parametrize("method", ["pwrite", "sync"])
def test_a_write_that_fails_is_no_write(stand: Stand, method: str) -> None:
    if not stand.can_fail:
        pytest.skip("it has no device that could fail")

    async def scenario() -> None:
        first = await write(stand.tier, chunk(1))
        stand.fail(method)
        with pytest.raises(Unavailable):
            await write(stand.tier, chunk(2))
        stand.mend()
        balance(stand.tier)
        assert stand.tier.statistics().chunk_count == 1
        again = await write(stand.tier, chunk(2))
        assert await holds(stand.tier, chunk(2), again)
        assert await holds(stand.tier, chunk(1), first)
        balance(stand.tier)

    stand.run(scenario)


def test_a_read_that_fails_is_no_loss(stand: Stand) -> None:
    if not stand.can_fail:
        pytest.skip("it has no device that could fail")

    async def scenario() -> None:
        residency = await write(stand.tier, chunk(1))
        stand.fail("pread", None)
        with pytest.raises(Unavailable):
            await stand.tier.open(chunk(1).name, residency)
        stand.mend()
        stored = await stand.tier.open(chunk(1).name, residency)
        stand.fail("pread", None)
        with pytest.raises(Unavailable):
            await stored.read(range(2), [np.empty(slab.byte_count, np.uint8) for slab in SMALL.slabs])
        stand.mend()
        stored.close()
        assert await holds(stand.tier, chunk(1), residency)
        stand.tier.remove([residency])
        assert stand.tier.statistics().chunk_count == 0
        balance(stand.tier)

    stand.run(scenario)


def test_no_flipped_byte_is_served(stand: Stand) -> None:
    """Header and strips sampled: the chunk is lost. In the gaps between strips a flip changes nothing."""
    what = chunk(1)
    layout = what.layout
    draw = random.Random(1)
    starts = [layout.header_bytes + int(offset) for offset in layout.strip_offsets]
    covered = [0, 7, 8, 40, 300, 400, 2000, 4095, *(draw.randrange(layout.header_bytes) for _ in range(20)), starts[0]]
    anywhere = [draw.randrange(layout.total_bytes - 4096) for _ in range(60)]

    async def scenario() -> None:
        residency = await write(stand.tier, what)
        for offset in covered + anywhere:
            stand.flip(residency, offset)
            intact = await holds(stand.tier, what, residency)
            assert not (intact and offset in covered), offset
            stand.flip(residency, offset)
            assert await holds(stand.tier, what, residency)
        balance(stand.tier)

    stand.run(scenario)


@scenario()
async def test_one_bad_slab_leaves_the_others(stand: Stand) -> None:
    what = chunk(1)
    residency = await write(stand.tier, what)
    stand.flip(residency, what.layout.header_bytes)  # in the first strip, whatever the encoding
    with pytest.raises(DataLoss):
        await read(stand.tier, what.name, residency, range(1))
    assert (await read(stand.tier, what.name, residency, range(1, 2)))[0].tobytes() == what.pieces[2].tobytes()


@pytest.mark.parametrize("kill", [False, True])
def test_after_a_restart(stand: Stand, kill: bool) -> None:
    kinds = list(layouts().values())[:3]
    chunks = [chunk(number, kinds[number % 3]) for number in range(9)]

    async def scenario() -> None:
        places = [await write(stand.tier, what) for what in chunks]
        stand.tier.remove([places[4]], erase=True)
        await stand.tier.tidy()
        before = stand.tier.statistics()
        await stand.restart(kill=kill)
        found = stand.found()
        balance(stand.tier)
        if not stand.is_durable:
            assert found == {}
            assert stand.tier.statistics().chunk_count == 0
            return
        left = chunks[:4] + chunks[5:]
        assert set(found) == {what.header.chain_digest for what in left}
        assert stand.recovered.is_proven.tolist() == [not kill] * len(left)
        assert max(found.values()) < RESIDENCY_STOP
        for what in left:
            assert await stand.tier.renew(found[what.header.chain_digest])
            assert await holds(stand.tier, what, found[what.header.chain_digest])
        after = stand.tier.statistics()
        for field in ("file_bytes", "allocated_bytes", "free_bytes", "overhead_bytes", "chunk_count"):
            assert getattr(after, field) == getattr(before, field)

    stand.run(scenario)


@scenario()
async def test_what_was_erased_never_comes_back(stand: Stand) -> None:
    one, two = await write(stand.tier, chunk(1, write=1)), await write(stand.tier, chunk(1, write=2))
    other = await write(stand.tier, chunk(2))
    stand.tier.remove([one, two], erase=True)
    await stand.restart(kill=False)  # a clean stop erases what is to be erased
    assert chunk(1).header.chain_digest not in stand.found()
    three = await write(stand.tier, chunk(1, write=3))
    stand.tier.remove([three], erase=True)
    await stand.tier.tidy()
    for _ in range(2):
        with pytest.raises((DataLoss, Unavailable)):
            await stand.tier.open(chunk(1).any_write, three)
        await stand.restart(kill=True)
        assert chunk(1).header.chain_digest not in stand.found()
    if stand.is_durable:
        assert await holds(stand.tier, chunk(2), other)


@scenario()
async def test_what_was_superseded_never_comes_back(stand: Stand) -> None:
    """Also where its erasure fails, and the process ends right after."""
    key = chunk(1).header.storage_key
    one = await write(stand.tier, chunk(1, VALUE, write=1))
    kept = await write(stand.tier, chunk(2, VALUE))
    stand.tier.remove([one], erase=True)
    if stand.can_fail:
        stand.fail("pwrite")
    newer = chunk(1, VALUE, write=2)
    try:
        await stand.tier.supersede({key: newer.name.mark or 0}, 1.0)
    except KVStoreError:
        stand.mend()
        await stand.tier.supersede({key: newer.name.mark or 0}, 1.0)
    if stand.can_fail:
        stand.mend()
    await stand.restart(kill=True)
    assert chunk(1).header.chain_digest not in stand.found()
    assert not stand.is_durable or await holds(stand.tier, chunk(2, VALUE), kept)


def test_an_erasure_that_fails_is_tried_again(stand: Stand) -> None:
    if not stand.can_fail:
        pytest.skip("it has no device that could fail")

    async def scenario() -> None:
        residency = await write(stand.tier, chunk(1))
        stand.fail("pwrite", None)
        stand.tier.remove([residency], erase=True)
        await stand.tier.tidy()
        balance(stand.tier)
        stand.mend()
        await stand.tier.tidy()
        assert stand.tier.statistics().chunk_count == 0
        balance(stand.tier)
        await stand.restart(kill=True)
        assert stand.found() == {}

    stand.run(scenario)


@scenario()
async def test_a_copy_that_failed_a_check_is_gone(stand: Stand) -> None:
    residency, other = await write(stand.tier, chunk(1)), await write(stand.tier, chunk(2))
    await stand.tier.quarantine(residency)
    balance(stand.tier)
    assert stand.tier.statistics().chunk_count == 1
    with pytest.raises((DataLoss, Unavailable)):
        await stand.tier.open(chunk(1).name, residency)
    await stand.restart(kill=True)
    assert set(stand.found()) == ({chunk(2).header.chain_digest} if stand.is_durable else set())
    assert not stand.is_durable or await holds(stand.tier, chunk(2), other)
