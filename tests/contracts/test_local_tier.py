"""What ``LocalTier`` promises, held against every local tier, under every weather, and against a fake."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.chunk import ChunkLayout, write_mark
from kvstore.errors import DataLoss, Exhausted, KVStoreError, Unavailable
from kvstore.spec import Encoding
from kvstore.tiers import ChunkName, Residency
from kvstore.tiers.contract import RESIDENCY_STOP
from tests.contracts.chunks import LARGE, SMALL, VALUE, Chunk, balance, chunk, holds, layouts, read, write
from tests.contracts.stands import STANDS, DramStand, Stand, SystemStand


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


def test_a_header_says_what_was_written(stand: Stand) -> None:
    what = chunk(1)

    async def scenario() -> None:
        stored = await stand.tier.open(what.name, await write(stand.tier, what))
        assert stored.header.storage_key == what.header.storage_key
        assert stored.header.write_id == what.header.write_id
        stored.close()
        stored.close()

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
        stand.tier.remove([one])
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
            stand.tier.remove([residency])
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
        stand.tier.remove([residency])
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


def test_what_was_erased_never_comes_back(stand: Stand) -> None:
    async def scenario() -> None:
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

    stand.run(scenario)


def test_what_was_superseded_never_comes_back(stand: Stand) -> None:
    """Also where its erasure fails, and the process ends right after."""
    key = chunk(1).header.storage_key

    async def scenario() -> None:
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

    stand.run(scenario)


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


def test_a_copy_that_failed_a_check_is_gone(stand: Stand) -> None:
    async def scenario() -> None:
        residency, other = await write(stand.tier, chunk(1)), await write(stand.tier, chunk(2))
        await stand.tier.quarantine(residency)
        balance(stand.tier)
        assert stand.tier.statistics().chunk_count == 1
        with pytest.raises((DataLoss, Unavailable)):
            await stand.tier.open(chunk(1).name, residency)
        await stand.restart(kill=True)
        assert set(stand.found()) == ({chunk(2).header.chain_digest} if stand.is_durable else set())
        assert not stand.is_durable or await holds(stand.tier, chunk(2), other)

    stand.run(scenario)


def test_a_check_reads_what_a_read_would(stand: Stand) -> None:
    what = chunk(1)

    async def scenario() -> None:
        residency = await write(stand.tier, what)
        stored = await stand.tier.open(what.name, residency)
        await stored.check(range(2))
        stand.flip(residency, what.layout.header_bytes)
        with pytest.raises(DataLoss):
            await stored.check(range(1))
        await stored.check(range(1, 2))
        stored.close()
        assert 0 < stand.tier.statistics().verified_bytes <= sum(slab.byte_count for slab in what.layout.slabs) * 3 / 2

    stand.run(scenario)


def test_residencies_say_how_their_copies_are_encoded(stand: Stand) -> None:
    async def scenario() -> None:
        places = [await write(stand.tier, chunk(number)) for number in range(3)]
        found = stand.tier.encodings(np.array(places, np.int64))
        assert found.dtype == np.uint8
        for number, residency in enumerate(places):
            stored = await stand.tier.open(chunk(number).name, residency)
            assert Encoding(int(found[number])).name.lower() == stored.header.encoding
            stored.close()
        assert stand.tier.encodings(np.empty(0, np.int64)).shape == (0,)

    stand.run(scenario)


# ---------------------------------------------------------------- room


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


def test_many_small_chunks_make_room_for_a_large_one(stand: Stand) -> None:
    """More of them than any one file, or run of memory, holds."""

    async def scenario() -> None:
        kept = await fill(stand)
        stand.evictor.held.add(kept[0][1])
        residency = await write(stand.tier, chunk(200, LARGE))
        assert await holds(stand.tier, chunk(200, LARGE), residency)
        assert await holds(stand.tier, *kept[0])
        assert len(stand.evictor.gone) < len(kept) / 2
        balance(stand.tier)

    stand.run(scenario)


@pytest.mark.parametrize("kill", [False, True])
def test_what_a_start_found_makes_room(stand: Stand, kill: bool) -> None:
    async def scenario() -> None:
        await fill(stand)
        await stand.restart(kill=kill)
        places = list(stand.found().values())
        stand.evictor.there += places
        residency = await write(stand.tier, chunk(200, LARGE))
        assert await holds(stand.tier, chunk(200, LARGE), residency)
        assert bool(stand.evictor.gone) == stand.is_durable
        balance(stand.tier)

    stand.run(scenario)


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
