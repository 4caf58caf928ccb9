"""What ``kvstore.tiers.contract`` promises, held against every tier, wrapper and fake."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.chunk import write_mark
from kvstore.errors import DataLoss, Exhausted, KVStoreError, Unavailable
from kvstore.tiers import ChunkName, Residency
from tests.contracts.chunks import SMALL, Chunk, balance, chunk, holds, layouts, read, write
from tests.contracts.stands import STANDS, ArenaStand, Stand, SystemStand


@pytest.fixture(params=STANDS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Stand]:
    return lambda **options: STANDS[request.param](tmp_path / "nvme", **options)


@pytest.fixture
def stand(make: Callable[..., Stand]) -> Stand:
    return make()


async def room(stand: Stand) -> int:
    """How many more small chunks find a place; they are taken out again."""
    taken: list[Residency] = []
    with pytest.raises(Exhausted):
        while len(taken) < 1000:
            taken.append(await write(stand.tier, chunk(5000 + len(taken))))
    await stand.tier.remove(taken)
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


def test_a_header_says_what_was_written(stand: Stand) -> None:
    what = chunk(1)

    async def scenario() -> None:
        stored = await stand.tier.open(what.name, await write(stand.tier, what))
        assert stored.header.storage_key == what.header.storage_key
        assert stored.header.write_id == what.header.write_id
        stored.close()
        stored.close()
        found = [each async for each in stand.tier.scan()]
        assert [each.header.chain_digest for each in found] == [what.header.chain_digest]

    stand.run(scenario)


def test_reads_into_memory_that_lies_anywhere(stand: Stand) -> None:
    what = chunk(1)

    async def scenario() -> None:
        residency = await write(stand.tier, what)
        odd = [np.zeros(slab.byte_count + 7, np.uint8)[7:] for slab in what.layout.slabs]
        stored = await stand.tier.open(what.name, residency)
        await stored.read(range(2), odd)
        stored.close()
        assert all((one == other).all() for one, other in zip(odd, what.pieces[1:], strict=True))

    stand.run(scenario)


def test_what_was_never_there_is_a_typed_error(stand: Stand) -> None:
    what, other = chunk(1), chunk(2)

    async def scenario() -> None:
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

    stand.run(scenario)


def test_two_writes_of_a_chunk_are_told_apart(stand: Stand) -> None:
    first, second = chunk(1, write=1), chunk(1, write=2)

    async def scenario() -> None:
        one, two = await write(stand.tier, first), await write(stand.tier, second)
        assert one != two
        assert await holds(stand.tier, first, one)
        assert await holds(stand.tier, second, two)
        with pytest.raises(DataLoss):
            await stand.tier.open(first.name, two)
        stored = await stand.tier.open(first.any_write, two)
        assert write_mark(stored.header.write_id) == second.name.mark
        stored.close()
        await stand.tier.remove([one])
        assert await holds(stand.tier, second, two)

    stand.run(scenario)


def test_many_at_once(stand: Stand) -> None:
    """Writers and readers of several kinds beside each other; some of it is removed meanwhile."""
    kinds = list(layouts().values())[:4]

    async def one(number: int) -> None:
        what = chunk(number, kinds[number % len(kinds)])
        residency = await write(stand.tier, what)
        results = await asyncio.gather(*(holds(stand.tier, what, residency) for _ in range(3)))
        assert results == [True] * 3
        if number % 3 == 0:
            await stand.tier.remove([residency])
        else:
            assert await holds(stand.tier, what, residency)
        balance(stand.tier)

    async def scenario() -> None:
        await asyncio.gather(*map(one, range(24)))
        assert stand.tier.statistics().chunk_count == 16
        balance(stand.tier)

    stand.run(scenario)


def test_a_removal_waits_for_readers_only_with_the_room(stand: Stand) -> None:
    """Removed while it is open: what is read is the chunk, however much is written meanwhile."""
    what = chunk(1)

    async def scenario() -> None:
        residency = await write(stand.tier, what)
        stored = await stand.tier.open(what.name, residency)
        await stand.tier.remove([residency])
        others = [chunk(100 + number) for number in range(await room(stand))]
        for other in others:
            await write(stand.tier, other)
        target = [np.empty(slab.byte_count, np.uint8) for slab in what.layout.slabs]
        await stored.read(range(2), target)
        assert all((one == other).all() for one, other in zip(target, what.pieces[1:], strict=True))
        stored.close()
        balance(stand.tier)
        assert await room(stand) >= 1

    stand.run(scenario)


async def cancelled(task: asyncio.Task[Any], delay_s: float) -> Any:
    """What became of a task that was cancelled so long after its start: its result, or None."""
    await asyncio.sleep(delay_s)
    task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        return None


def test_a_cancelled_write_leaves_nothing(stand: Stand) -> None:
    async def scenario() -> None:
        kept = chunk(1)
        residency = await write(stand.tier, kept)
        await stand.tier.remove([await write(stand.tier, chunk(2))])
        outcomes = set()
        for step in range(40):
            what = chunk(10 + step, write=step)
            done = await cancelled(asyncio.ensure_future(write(stand.tier, what)), step * 0.0001)
            outcomes.add(done is None)
            for piece in what.pieces:
                piece[:] = 0xDB  # the caller may use its memory again
            if done is not None:
                await stand.tier.remove([done])
            balance(stand.tier)
            assert stand.tier.statistics().chunk_count == 1
        if not isinstance(stand, ArenaStand | SystemStand):  # one never waits, the other as long as it likes
            assert outcomes == {True, False}
        assert await holds(stand.tier, kept, residency)
        assert await holds(stand.tier, chunk(3), await write(stand.tier, chunk(3)))

    stand.run(scenario)


def test_a_cancelled_read_leaves_nothing(stand: Stand) -> None:
    async def scenario() -> None:
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
        await stand.tier.remove([residency])
        assert await room(stand) == before + 1
        balance(stand.tier)

    stand.run(scenario)


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
        await stand.tier.remove([kept.pop(1)[1]])
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
        await stand.tier.remove([residency])
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


def test_one_bad_slab_leaves_the_others(stand: Stand) -> None:
    what = chunk(1)

    async def scenario() -> None:
        residency = await write(stand.tier, what)
        stand.flip(residency, what.layout.header_bytes)  # in the first strip, whatever the encoding
        with pytest.raises(DataLoss):
            await read(stand.tier, what.name, residency, range(1))
        assert (await read(stand.tier, what.name, residency, range(1, 2)))[0].tobytes() == what.pieces[2].tobytes()

    stand.run(scenario)


@pytest.mark.parametrize("kill", [False, True])
def test_after_a_restart(stand: Stand, kill: bool) -> None:
    kinds = list(layouts().values())[:3]
    chunks = [chunk(number, kinds[number % 3]) for number in range(9)]

    async def scenario() -> None:
        places = [await write(stand.tier, what) for what in chunks]
        await stand.tier.remove([places[4]], erase=True)
        before = stand.tier.statistics()
        await stand.restart(kill=kill)
        found = {each.header.storage_key: each.residency async for each in stand.tier.scan()}
        balance(stand.tier)
        if not stand.is_durable:
            assert found == {}
            assert stand.tier.statistics().chunk_count == 0
            return
        left = chunks[:4] + chunks[5:]
        assert set(found) == {what.header.storage_key for what in left}
        for what in left:
            assert await holds(stand.tier, what, found[what.header.storage_key])
        after = stand.tier.statistics()
        for field in ("file_bytes", "allocated_bytes", "free_bytes", "overhead_bytes", "chunk_count"):
            assert getattr(after, field) == getattr(before, field)

    stand.run(scenario)


def test_what_was_erased_never_comes_back(stand: Stand) -> None:
    async def scenario() -> None:
        one, two = await write(stand.tier, chunk(1, write=1)), await write(stand.tier, chunk(1, write=2))
        other = await write(stand.tier, chunk(2))
        await stand.tier.remove([one, two], erase=True)
        for kill in (False, True):
            with pytest.raises((DataLoss, Unavailable)):
                await stand.tier.open(chunk(1).any_write, one)
            found = [each async for each in stand.tier.scan()]
            assert all(each.header.storage_key != chunk(1).header.storage_key for each in found)
            await stand.restart(kill=kill)
        if stand.is_durable:
            assert await holds(stand.tier, chunk(2), other)

    stand.run(scenario)


def test_an_erasure_that_fails_says_so_and_can_be_tried_again(stand: Stand) -> None:
    if not stand.can_fail:
        pytest.skip("it has no device that could fail")

    async def scenario() -> None:
        residency = await write(stand.tier, chunk(1))
        stand.fail("pwrite")
        with pytest.raises(KVStoreError):
            await stand.tier.remove([residency], erase=True)
        stand.mend()
        balance(stand.tier)
        assert stand.tier.statistics().chunk_count == 1
        await stand.tier.remove([residency], erase=True)
        assert stand.tier.statistics().chunk_count == 0
        assert [each async for each in stand.tier.scan()] == []
        balance(stand.tier)

    stand.run(scenario)


def test_the_account_counts_what_passes(stand: Stand) -> None:
    what = chunk(1)

    async def scenario() -> None:
        residency = await write(stand.tier, what)
        written = stand.tier.statistics().written_bytes
        assert 0 < written <= what.layout.total_bytes
        await read(stand.tier, what.name, residency, range(1))
        now = stand.tier.statistics()
        assert now.read_bytes == now.verified_bytes == what.layout.slabs[0].byte_count
        assert (now.chunk_count, now.state) == (1, "up")

    stand.run(scenario)
