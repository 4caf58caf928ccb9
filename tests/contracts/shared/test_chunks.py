"""What ``SharedTier`` promises of chunks, held against every engine, wrapper and fake."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvstore.errors import DataLoss
from kvstore.spec import Durability, Tier
from kvstore.tiers import ChunkName, UploadState
from tests.contracts.chunks import LARGE, SMALL, balance, chunk, layouts
from tests.contracts.shared.stands import TIMEOUT_S, Stand, found, write
from tests.fakes import EngineSettings, EngineTier
from tests.fakes.engine import ENGINES
from tests.scenario import scenario


@pytest.mark.parametrize("kind", [*layouts(), "large"])
def test_a_chunk_comes_back_whole_and_in_parts_to_every_node(stand: Stand, kind: str) -> None:
    what = chunk(1, LARGE if kind == "large" else layouts()[kind])

    async def scenario() -> None:
        await write(stand.tier, what)
        for node in (stand.tier, stand.other):
            assert await found(node, what)
            stored = await node.open(what.name)
            assert stored is not None
            assert stored.header.write_id == what.header.write_id
            last = len(what.layout.slabs) - 1
            target = [np.empty(what.layout.slabs[last].byte_count, np.uint8)]
            await stored.read(range(last, last + 1), target)
            assert (target[0] == what.pieces[1 + last]).all()
            await stored.check(range(last + 1))
            stored.close()
            stored.close()
        balance(stand.tier)  # type: ignore[arg-type]

    stand.run(scenario)


@scenario()
async def test_what_may_be_read_ahead_is_checked_all_the_same(stand: Stand) -> None:
    """Where all of it was announced, a part of it, other memory than is read into then, and what is read twice."""
    what = chunk(1)
    await write(stand.tier, what)
    for announced in (0, 1, 2):
        for start, stop in ((0, 2), (0, 1), (1, 2)):
            target = [np.full(slab.byte_count, 0x5A, np.uint8) for slab in SMALL.slabs]
            stored = await stand.other.open(what.name, target[:announced])
            assert stored is not None
            for _ in range(2):
                await stored.read(range(start, stop), target[start:stop])
                assert (np.concatenate(target[start:stop]) == np.concatenate(what.pieces[1 + start : 1 + stop])).all()
            other = [np.empty_like(each) for each in target]
            await stored.read(range(2), other)
            assert (np.concatenate(other) == np.concatenate(what.pieces[1:])).all()
            stored.close()


@scenario()
async def test_what_is_not_there_is_a_miss(stand: Stand) -> None:
    key = chunk(1).header.storage_key
    assert await stand.tier.open(chunk(1).name) is None
    assert list(await stand.tier.probe([key], TIMEOUT_S)) == [False]
    await stand.tier.remove([key])  # no error
    await write(stand.tier, chunk(1))
    await write(stand.tier, chunk(3))
    keys = [chunk(number).header.storage_key for number in (1, 2, 3)]
    assert list(await stand.other.probe(keys, TIMEOUT_S)) == [True, False, True]
    assert list(await stand.other.probe([], TIMEOUT_S)) == []
    await stand.other.remove([key])
    assert await stand.tier.open(chunk(1).name) is None
    assert await found(stand.tier, chunk(3))


@scenario()
async def test_many_keys_are_asked_for_at_once_whichever_of_them_are_there(stand: Stand) -> None:
    """Of chains that have nothing to do with each other, some of which end early; and of keys that are no chain."""
    there = {*range(4, 7), *range(10, 16)}
    keys = [chunk(number).header.storage_key for number in range(20)]
    await asyncio.gather(*(write(stand.tier, chunk(number)) for number in there))
    await asyncio.gather(*(write(stand.tier, chunk(number)) for number in (18, 19)))
    expected = [number in there | {18, 19} for number in range(20)]
    assert list(await stand.other.probe(keys, 10.0)) == expected
    found = list(await stand.other.probe(keys[:18], 10.0, [4, 5, 1, 8]))
    assert found == expected[:18]


def test_what_one_node_is_about_to_write_others_find_taken_for_a_while(stand: Stand) -> None:
    there, claimed = chunk(1).header.storage_key, chunk(2).header.storage_key
    taken = UploadState.TAKEN if stand.keeps_claims else UploadState.FREE

    async def scenario() -> None:
        await write(stand.tier, chunk(1))
        for _ in range(2):  # one's own claim is made anew
            found = await stand.tier.claim([there, claimed], 2.0, TIMEOUT_S)
            assert list(found) == [UploadState.THERE, UploadState.FREE]
        assert list(await stand.other.claim([claimed, there], 60.0, TIMEOUT_S)) == [taken, UploadState.THERE]
        assert list(await stand.other.probe([claimed], TIMEOUT_S)) == [False]
        assert await stand.other.open(chunk(2).name) is None
        async with asyncio.timeout(20.0):
            while await stand.other.claim([claimed], 60.0, TIMEOUT_S) != [UploadState.FREE]:  # noqa: ASYNC110 - the engine tells nobody
                await asyncio.sleep(0.1)  # the engine tells nobody that a claim has ended
        assert list(await stand.tier.claim([claimed], 60.0, TIMEOUT_S)) == [taken]
        await write(stand.tier, chunk(2))  # a claim forbids nothing
        for node in (stand.tier, stand.other):
            assert list(await node.claim([claimed], 60.0, TIMEOUT_S)) == [UploadState.THERE]
        assert list(await stand.tier.claim([], 60.0, TIMEOUT_S)) == []
        balance(stand.tier)

    stand.run(scenario)


@scenario()
async def test_what_the_engine_drops_is_a_miss_and_what_is_open_is_whole_or_lost(stand: Stand) -> None:
    await write(stand.tier, chunk(1))
    stored = await stand.tier.open(chunk(1).name)
    assert stored is not None
    stand.drop_all()
    assert await stand.tier.open(chunk(1).name) is None
    target = [np.empty(slab.byte_count, np.uint8) for slab in SMALL.slabs]
    try:
        await stored.read(range(2), target)
    except DataLoss:
        pass
    else:
        assert all((one == other).all() for one, other in zip(target, chunk(1).pieces[1:], strict=True))
    stored.close()
    await write(stand.other, chunk(1))
    assert await found(stand.tier, chunk(1))


@scenario()
async def test_a_replacement_is_never_mixed_with_what_it_replaces(stand: Stand) -> None:
    first, second = chunk(1, write=1), chunk(1, write=2)
    await write(stand.tier, first)
    stored = await stand.tier.open(first.name)
    assert stored is not None
    target = [np.empty(slab.byte_count, np.uint8) for slab in SMALL.slabs]
    await stored.read(range(1), target[:1])
    await write(stand.other, second)
    try:
        await stored.read(range(1, 2), target[1:])
    except DataLoss:
        pass
    else:
        assert (target[1] == first.pieces[2]).all()
    stored.close()
    if not stand.replaces:
        assert await found(stand.tier, first, second.any_write), "it was written once"
        with pytest.raises(DataLoss):
            await stand.tier.open(second.name)
        return
    assert await found(stand.tier, second)
    with pytest.raises(DataLoss):
        await stand.tier.open(first.name)
    assert await found(stand.tier, second, first.any_write)


@scenario()
async def test_what_others_wrote_is_believed_only_if_it_is_the_chunk(stand: Stand) -> None:
    what, other = chunk(1), chunk(2)
    await write(stand.tier, what)
    key = what.header.storage_key
    whole = b"".join(piece.tobytes() for piece in what.pieces)
    strange = b"".join(piece.tobytes() for piece in other.pieces)
    for data in (strange, b"", whole[:100], whole[: what.layout.header_bytes], bytes(len(whole)), whole[:-4096]):
        stand.put(key, data)
        with pytest.raises(DataLoss):
            await found(stand.tier, what)
    stand.put(key, whole)
    assert await found(stand.tier, what)
    for offset in (0, 8, 40, 300, what.layout.header_bytes, what.layout.header_bytes + SMALL.slabs[0].byte_count):
        stand.flip(key, offset)
        with pytest.raises(DataLoss):
            await found(stand.tier, what)
        stand.flip(key, offset)
    with pytest.raises(DataLoss):  # another model's geometry under this key
        await stand.tier.open(ChunkName(key, layouts()["kv tail"]))
    assert await found(stand.tier, what)


@scenario()
async def test_a_tier_says_what_it_is(stand: Stand) -> None:
    kind, durability = stand.tier.kind, stand.tier.durability
    assert (kind, durability) in {(Tier.REDIS, Durability.SHARED), (Tier.S3, Durability.OBJECT)}
    assert stand.tier.statistics().name == stand.tier.name
    await write(stand.tier, chunk(1))
    assert stand.tier.statistics().written_bytes == SMALL.total_bytes
    assert await found(stand.tier, chunk(1))
    assert stand.tier.statistics().verified_bytes == sum(slab.byte_count for slab in SMALL.slabs)


def test_engines_of_other_names_are_others() -> None:
    one, other = EngineTier(EngineSettings(engine="one")), EngineTier(EngineSettings(engine="other"))

    async def scenario() -> None:
        await write(one, chunk(1))
        assert not await found(other, chunk(1))

    try:
        asyncio.run(scenario())
    finally:
        del ENGINES["one"], ENGINES["other"]
