"""What ``LocalTier`` promises of copies, held against every local tier, wrapper and fake."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from kvstore.chunk import write_mark
from kvstore.errors import DataLoss, Exhausted, Unavailable
from kvstore.spec import Encoding
from kvstore.tiers import ChunkName, Residency
from tests.contracts.chunks import SMALL, balance, chunk, holds, layouts, read, write
from tests.contracts.local.stands import DramStand, Stand, SystemStand
from tests.scenario import scenario


async def room(stand: Stand) -> int:
    """How many more small chunks find a place; they are taken out again."""
    taken: list[Residency] = []
    with pytest.raises(Exhausted):
        while len(taken) < 1000:
            taken.append(await write(stand.tier, chunk(5000 + len(taken))))
    stand.tier.remove(taken)
    return len(taken)


@pytest.mark.parametrize("kind", layouts())
def test_a_chunk_comes_back_whole_and_in_parts(stand: Stand, kind: str) -> None:
    what = chunk(1, layouts()[kind])

    async def scenario() -> None:
        residency = await write(stand.tier, what)
        assert residency >= 0
        assert await holds(stand.tier, what, residency)
        slab_count = len(what.layout.slabs)
        for slabs in (range(1), range(slab_count - 1, slab_count), range(slab_count // 2, slab_count)):
            found = await read(stand.tier, what.name, residency, slabs)
            for slab, memory in zip(slabs, found, strict=True):
                assert (memory == what.pieces[1 + slab]).all()
        balance(stand.tier)

    stand.run(scenario)


@scenario()
async def test_a_header_says_what_was_written(stand: Stand) -> None:
    what = chunk(1)
    stored = await stand.tier.open(what.name, await write(stand.tier, what))
    assert stored.header.storage_key == what.header.storage_key
    assert stored.header.write_id == what.header.write_id
    stored.close()
    stored.close()


@scenario()
async def test_reads_into_memory_that_lies_anywhere(stand: Stand) -> None:
    what = chunk(1)
    residency = await write(stand.tier, what)
    odd = [np.zeros(slab.byte_count + 7, np.uint8)[7:] for slab in what.layout.slabs]
    stored = await stand.tier.open(what.name, residency)
    await stored.read(range(2), odd)
    stored.close()
    assert all((one == other).all() for one, other in zip(odd, what.pieces[1:], strict=True))


@scenario()
async def test_what_was_never_there_is_a_typed_error(stand: Stand) -> None:
    what, other = chunk(1), chunk(2)
    residency = await write(stand.tier, what)
    for wrong in (residency + 1, residency + 77, 1 << 40, (1 << 55) + 12345):
        with pytest.raises((DataLoss, Unavailable)):
            await stand.tier.open(what.name, wrong)
    with pytest.raises(DataLoss):
        await stand.tier.open(other.name, residency)
    with pytest.raises(DataLoss):  # the same place, another model's geometry
        await stand.tier.open(ChunkName(what.header.storage_key, layouts()["kv tail"]), residency)
    assert await holds(stand.tier, what, residency)
    balance(stand.tier)


@scenario()
async def test_two_writes_of_a_chunk_are_told_apart(stand: Stand) -> None:
    first, second = chunk(1, write=1), chunk(1, write=2)
    one, two = await write(stand.tier, first), await write(stand.tier, second)
    assert one != two
    assert await holds(stand.tier, first, one)
    assert await holds(stand.tier, second, two)
    with pytest.raises(DataLoss):
        await stand.tier.open(first.name, two)
    stored = await stand.tier.open(first.any_write, two)
    assert write_mark(stored.header.write_id) == second.name.mark
    stored.close()
    stand.tier.remove([one])
    assert await holds(stand.tier, second, two)


def test_many_at_once(stand: Stand) -> None:
    """Writers and readers of several kinds beside each other; some of it is removed meanwhile."""
    kinds = list(layouts().values())[:4]

    async def one(number: int) -> None:
        what = chunk(number, kinds[number % len(kinds)])
        residency = await write(stand.tier, what)
        results = await asyncio.gather(*(holds(stand.tier, what, residency) for _ in range(3)))
        assert results == [True] * 3
        if number % 3 == 0:
            stand.tier.remove([residency])
        else:
            assert await holds(stand.tier, what, residency)
        balance(stand.tier)

    async def scenario() -> None:
        await asyncio.gather(*map(one, range(24)))
        assert stand.tier.statistics().chunk_count == 16
        balance(stand.tier)

    stand.run(scenario)


@scenario()
async def test_a_removal_waits_for_readers_only_with_the_room(stand: Stand) -> None:
    """Removed while it is open: what is read is the chunk, however much is written meanwhile."""
    what = chunk(1)
    residency = await write(stand.tier, what)
    stored = await stand.tier.open(what.name, residency)
    stand.tier.remove([residency])
    others = [chunk(100 + number) for number in range(await room(stand))]
    for other in others:
        await write(stand.tier, other)
    target = [np.empty(slab.byte_count, np.uint8) for slab in what.layout.slabs]
    await stored.read(range(2), target)
    assert all((one == other).all() for one, other in zip(target, what.pieces[1:], strict=True))
    stored.close()
    balance(stand.tier)
    assert await room(stand) >= 1


async def cancelled(task: asyncio.Task[Any], delay_s: float) -> Any:
    """What became of a task that was cancelled so long after its start: its result, or None."""
    await asyncio.sleep(delay_s)
    task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        return None


@scenario()
async def test_a_cancelled_write_leaves_nothing(stand: Stand) -> None:
    kept = chunk(1)
    residency = await write(stand.tier, kept)
    stand.tier.remove([await write(stand.tier, chunk(2))])
    outcomes = set()
    for step in range(40):
        what = chunk(10 + step, write=step)
        done = await cancelled(asyncio.ensure_future(write(stand.tier, what)), step * 0.0001)
        outcomes.add(done is None)
        for piece in what.pieces:
            piece[:] = 0xDB  # the caller may use its memory again
        if done is not None:
            stand.tier.remove([done])
        balance(stand.tier)
        assert stand.tier.statistics().chunk_count == 1
    if not isinstance(stand, DramStand | SystemStand):  # one never waits, the other as long as it likes
        assert outcomes == {True, False}
    assert await holds(stand.tier, kept, residency)
    assert await holds(stand.tier, chunk(3), await write(stand.tier, chunk(3)))


@scenario()
async def test_a_cancelled_read_leaves_nothing(stand: Stand) -> None:
    what = chunk(1)
    residency = await write(stand.tier, what)
    for step in range(20):
        target = [np.zeros(slab.byte_count, np.uint8) for slab in SMALL.slabs]

        async def both(target: list[Any] = target) -> bool:
            stored = await stand.tier.open(what.name, residency)
            try:
                await stored.read(range(2), target)
            finally:
                stored.close()
            return True

        await cancelled(asyncio.ensure_future(both()), step * 0.0001)
        seen = [memory.copy() for memory in target]
        await asyncio.sleep(0.002)
        assert all((one == other).all() for one, other in zip(seen, target, strict=True)), "it went on writing"
    assert await holds(stand.tier, what, residency)
    before = await room(stand)
    stand.tier.remove([residency])
    assert await room(stand) == before + 1
    balance(stand.tier)


@scenario()
async def test_a_check_reads_what_a_read_would(stand: Stand) -> None:
    what = chunk(1)
    residency = await write(stand.tier, what)
    stored = await stand.tier.open(what.name, residency)
    await stored.check(range(2))
    stand.flip(residency, what.layout.header_bytes)
    with pytest.raises(DataLoss):
        await stored.check(range(1))
    await stored.check(range(1, 2))
    stored.close()
    assert 0 < stand.tier.statistics().verified_bytes <= sum(slab.byte_count for slab in what.layout.slabs) * 3 / 2


@scenario()
async def test_residencies_say_how_their_copies_are_encoded(stand: Stand) -> None:
    places = [await write(stand.tier, chunk(number)) for number in range(3)]
    found = stand.tier.encodings(np.array(places, np.int64))
    assert found.dtype == np.uint8
    for number, residency in enumerate(places):
        stored = await stand.tier.open(chunk(number).name, residency)
        assert Encoding(int(found[number])).name.lower() == stored.header.encoding
        stored.close()
    assert stand.tier.encodings(np.empty(0, np.int64)).shape == (0,)


@scenario()
async def test_the_account_counts_what_passes(stand: Stand) -> None:
    what = chunk(1)
    residency = await write(stand.tier, what)
    written = stand.tier.statistics().written_bytes
    assert 0 < written <= what.layout.total_bytes
    await read(stand.tier, what.name, residency, range(1))
    now = stand.tier.statistics()
    assert now.read_bytes == now.verified_bytes == what.layout.slabs[0].byte_count
    assert (now.chunk_count, now.state) == (1, "up")
